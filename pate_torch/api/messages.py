"""Messages of the Python interface, in the words of its callers.

The errors of the package name the settings of train.py. Each class of the interface has a table that maps these names
to arguments in Python, and ``reword_errors`` translates every ValueError that one of its methods raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

Words = Mapping[str, str]
"""Replacements of regular expressions, which are applied in order."""

_START = r"(?<![\w./'\"])"  # not within a value, a path or the name of a module
PATE_WORDS: Words = {
    rf"{_START}dataset\.name\b": "name",
    rf"{_START}paths\.root\b": "home",
    rf"{_START}private_test\.share\b": "private_test",
    rf"{_START}features\.(?=[a-z_])": "encoder.",
    rf"{_START}(dataset|mechanism|method|partition|privacy|query)\.(?=[a-z_])": "",
    r"=true\b": "=True",
    r"=null\b": "=None",
}
CLASSIFIER_WORDS: Words = {
    r"add noise \((mechanism\.)?sigma\)": "take a smaller epsilon",
    r"Use noise=discrete, or a larger delta": "Use a larger delta",
    r"\ballow_uninformative_labels\b": "spend_anyway",
    r"max_categories=(\d+): (.*values)\. Leave out the column, list its values in categories, or raise the limit": (
        r"public: \2, but at most \1 are allowed. Leave out the column, or list its values in categories"
    ),
    **PATE_WORDS,
    r"\b(budget_epsilon|opening_budget)\b": "cap",
    r"\btarget_epsilon\b": "epsilon",
    r"\bnominal_size\b|^size(?==)": "num_records_about",
    r"^name(?==)": "account",
    r"^(x|table)(?==)": "X",
    r"^(pool_x|public_x)(?==)": "public",
    r"^unit_id(?==)": "groups",
    r"\bpartition='?(\w+)'?": r"adjacency='\1'",
    r"\bmethod=(\w+)( mechanism=\w+)?": r"method='\1'",
}


@contextmanager
def reword_errors(words: Words) -> Iterator[None]:
    """Replace words in the message of every ValueError of the ``with`` block. The type of the error stays."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for pattern, replacement in words.items():
            message = re.sub(pattern, replacement, message)
        if message != str(error):
            error.args = (message,)
        raise
