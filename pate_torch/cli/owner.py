"""``pate owner ACCOUNT``: asks the owner of an account for the statements that its releases publish.

    pate owner clinic

The answers are written to owner.yaml beside the ledger, and every later release of the account publishes them as they
stand. An empty answer keeps the present value. Comments in the file are lost; edit the file by hand to keep them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import yaml

from pate_torch.core import checks, run_folders
from pate_torch.core.files import write_atomically
from pate_torch.release import owner_file

PROMPTS = {
    "contact": "Who answers inquiries about the data (an office or a person)?",
    "collection": "How, where and when were the records collected?",
    "consent": "On which legal basis are the records used?",
    "access": "Who can reach the records, and how are they secured?",
    "retention": "How long are records, teachers and votes kept?",
    "period": "For which time does the cap of the account hold?",
    "renewal": "What happens to the cap after this time?",
    "tuning": f"How were the parameters chosen ({', '.join(owner_file.TUNING_METHODS)})?",
}


def main(options: argparse.Namespace) -> int:
    """Run the dialogue and return its exit code. Raises ValueError without a terminal or for an invalid file."""
    file = run_folders.find_home() / owner_file.OWNER_FILE
    facts = owner_file.read(file.parent, options.account)
    if not sys.stdin.isatty():
        raise checks.error("stdin", "no terminal", "must be a terminal for a dialogue", f"Or edit {file} by hand.")
    print(f"Statements of the owner of {options.account!r}. An empty answer keeps the value in brackets.")
    answers: dict[str, str] = {}
    for name, prompt in PROMPTS.items():
        while answer := input(f"{prompt} [{getattr(facts, name) or 'not stated'}] ").strip():
            change: dict[str, Any] = {name: answer}
            try:
                facts, answers[name] = replace(facts, **change), answer
                break
            except ValueError as error:
                print(f"error: {error}")
    content = (yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None) or {}
    content[options.account] = (content.get(options.account) or {}) | answers
    write_atomically(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    print(f"Written to {file}. The next release of {options.account!r} publishes these statements.")
    return 0
