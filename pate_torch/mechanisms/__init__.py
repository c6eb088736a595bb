"""Mechanisms: noise on votes, counts or gradient sums, with the cost of each answer."""
