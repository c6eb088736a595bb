"""Answer a file of votes and nothing more."""
