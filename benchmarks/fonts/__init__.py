"""Data sets drawn from fonts, to make choices on."""
