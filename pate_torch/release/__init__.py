"""Releases on disk: files, reports, the privacy statement, and the owner's attack on a released student."""
