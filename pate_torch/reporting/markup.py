"""HTML that is escaped by construction: text becomes markup only inside ``tag``, which escapes all that is not yet."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is already HTML; made by ``tag`` and ``join`` alone."""

    __slots__ = ()


VOID = {"meta", "img", "br", "hr", "path", "line", "circle", "rect"}
Child = str | int | None


def text(value: Child) -> Markup:
    """Escaped text; markup as it is; None as nothing."""
    if value is None:
        return Markup("")
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(escape(between).join(text(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """<name ...>children</name>. ``class_`` is class, other underscores are hyphens; None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        assert not children, f"<{name}> has no content"
        return Markup(f"<{name}{given}>" if name in {"meta", "img", "br", "hr"} else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")
