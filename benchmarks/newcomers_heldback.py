"""Tables that are kept back: no rule was chosen on them, and none may be. They check the rule once it is fixed.

    PYTHONPATH=. python -m benchmarks.newcomers_heldback --noises 20

They come from the same packages as the tables of ``tests/newcomers``, by the same criteria.
"""

from __future__ import annotations

from tests.newcomers.tables import Table, main

TABLES = (
    Table(
        "openintro/mn_police_use_of_force",
        "subject_injury",
        ("response_datetime", "problem", "primary_offense", "neighborhood"),
    ),
    Table("openintro/yrbss", "gender"),
    Table("openintro/hfi", "region", ("ISO_code", "countries")),
    Table("openintro/epa2021", "drive_sys", ("carline", "drive_desc", "release_date")),
    Table("wooldridge/happiness", "happy", ("vhappy",)),
    Table("wooldridge/fertil2", "usemeth"),
    Table("wooldridge/alcohol", "status", ("inwf", "employ")),
    Table("pscl/vote92", "vote"),
    Table("Stat2Data/SuicideChina", "Died", ("Person_ID",)),
    Table("statsmodels/modechoice", "choice", ("individual",)),
    Table("scikit-learn/breast_cancer", "target"),
)

if __name__ == "__main__":
    main(TABLES)
