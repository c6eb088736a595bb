r"""Release a synthetic table.

    pate synthesize patients.csv --epsilon 1 --account clinic --schema schema.yaml --out synthetic/
    pate synthesize patients.csv --epsilon 1 --account clinic --public old.csv --target diagnosis --group patient

The columns are declared in a YAML file (--schema), or read off public rows (--public), never off private rows:

    target: diagnosis
    columns:
      age: {type: integer, low: 0, high: 100, bins: 20}
      sex: {type: category, values: [f, m]}
      smoker: {type: boolean}
      weight: {type: real, low: 30, high: 200, bins: 17}
      admitted: {type: date, low: 2020-01-01, high: 2024-12-31, bins: 20}
      diagnosis: {type: category, values: ["yes", "no"]}

The folder --out holds everything that may be published: synthetic.csv, the model, the statement and the report. The
exit code is 0 if the command succeeds, and 2 if an argument is refused before a charge.
"""

from __future__ import annotations

import argparse

from pate_torch.api.messages import Words, reword_errors
from pate_torch.api.synthesizer import TabularSynthesizer
from pate_torch.core import checks
from pate_torch.data.table_files import read_table
from pate_torch.release.renderer import check_empty_folder

SYNTHESIZE_WORDS: Words = {
    r"\bdataset\.separator\b": "--separator",
    r"\ballow_refit=True": "--allow-refit",
    r"\ballow_duplicate_account=True": "--allow-duplicate-account",
    r"\bspend_anyway=True": "--spend-anyway",
    r"\bin schema=": "in --schema",
    r"^num_records_about(?==)": "--num-records-about",
    r"^(account|adjacency|cap|delta|epsilon|public|rounds|schema|target)(?=[=.])": r"--\1",
    r"^X(?==)": "table",
}


def main(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with reword_errors(SYNTHESIZE_WORDS):
        return _synthesize(parsed)


def _synthesize(parsed: argparse.Namespace) -> int:
    check_empty_folder("--out", parsed.out)
    table = read_table("table", parsed.table, parsed.separator, id_column=parsed.group)
    if parsed.group is not None:
        ids = table[checks.one_of("--group", parsed.group, list(table))]
        table[parsed.group] = ids.to_pylist()
    public = None if parsed.public is None else dict(read_table("--public", parsed.public, parsed.separator))
    if public is not None:
        if parsed.public.samefile(parsed.table):
            problem = "is the private table, and values of the public rows are published"
            raise checks.error("--public", str(parsed.public), problem, "Name other rows, or declare a --schema.")
        public.pop(parsed.group, None)
    own_options = ("command", "table", "out", "group", "separator", "public")
    parameters = {name: value for name, value in vars(parsed).items() if name not in own_options}
    synthesizer = TabularSynthesizer(public=public, **parameters)
    synthesizer.fit(table, groups=parsed.group)
    folder = synthesizer.save_release(parsed.out)
    print(f"  {synthesizer.model_.size:,} synthetic rows in {folder / 'synthetic.csv'}")
    return 0
