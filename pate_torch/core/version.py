"""Which version of the package this is, for what it writes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As the installed package says; "not installed" for a bare checkout, in which nothing says so."""
    try:
        return version("pate-torch")
    except PackageNotFoundError:
        return "not installed"
