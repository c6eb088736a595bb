"""Calls that are noted, and go on as they would."""


def spy(monkeypatch, holder, name: str, note=None) -> list:
    """What ``note`` makes of the arguments of every call of ``holder.name``; without a note, what each call returns."""
    real, notes = getattr(holder, name), []

    def noted(*args, **options):
        if note is not None:
            notes.append(note(*args, **options))
        result = real(*args, **options)
        if note is None:
            notes.append(result)
        return result

    monkeypatch.setattr(holder, name, noted)
    return notes
