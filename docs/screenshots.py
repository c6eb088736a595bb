"""Pictures of a run, for the documentation: python docs/screenshots.py <run folder> <where to put them>
With --table the folder is that of a synthetic table.

Takes the head of release/report.html in light, dark and at a phone's width (the whole page with --whole), then shrinks
the pictures to 256 colors. Needs chromium (Debian: apt-get install chromium). Shows released values alone: the private
folder is never opened.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
REPORT = {"head": (1330, 1880), "whole": (5200, 8600)}
"""Heights of the report, wide and on a phone."""


def shoot(address: str, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """One picture."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("screenshots: no chromium found (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *SWITCHES, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        command += [f"--screenshot={picture.resolve()}"]
        command += ["--blink-settings=preferredColorScheme=" + ("0" if dark else "1")]
        subprocess.run([*command, address], check=True, capture_output=True, timeout=120)
    image = Image.open(picture).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(picture)


def framed(page: Path, width: int, height: int) -> str:
    """A page that shows ``page`` at a phone's width: a headless window is never narrower than 500 pixels."""
    frame = page.with_name(".frame.html")
    style = f"border:0;width:{width}px;height:{height}px;display:block"
    frame.write_text(f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe></body>')
    return frame.resolve().as_uri()


def report(page: Path, out: Path, wide: int, tall: int) -> None:
    address = page.resolve().as_uri()
    shoot(address, out / "report-light.png", 1180, wide)
    shoot(address, out / "report-dark.png", 1180, wide, dark=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(page, folder))
        shoot(framed(copy, 360, tall), out / "report-phone.png", 500, tall)
    image = Image.open(out / "report-phone.png")
    image.crop((0, 0, 360, tall)).save(out / "report-phone.png", optimize=True)


def show_table(page: Path, out: Path) -> None:
    """Take the columns and the associations of a synthetic table, in light and dark."""
    style = "<style>header, footer, section:not(#columns, #associations) { display: none } section { margin-top: 1rem }"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "report.html"
        copy.write_text(page.read_text().replace("</head>", style + "</style></head>"))
        for theme in ("light", "dark"):
            shoot(copy.as_uri(), out / f"synthetic-{theme}.png", 1080, 870, dark=theme == "dark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder (it holds release/)")
    parser.add_argument("out", type=Path, help="where the pictures go")
    parser.add_argument("--table", action="store_true", help="columns and associations of a synthetic table alone")
    parser.add_argument("--whole", action="store_true", help="the whole report, not its head alone")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.table:
        show_table(given.run / "report.html", given.out)
        return
    report(given.run / "release" / "report.html", given.out, *REPORT["whole" if given.whole else "head"])


if __name__ == "__main__":
    main()
