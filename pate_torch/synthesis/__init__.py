"""Synthetic tables: the domain of a table, a model of noisy marginals, and rounds of votes for candidates."""
