"""Mechanisms: noise on votes, counts or gradient sums, with the price of each answer."""
