"""A second opinion on a release: its claims recomputed by code that shares nothing with what made them."""
