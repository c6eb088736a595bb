"""Benchmarks and tuning aids of a checkout; no part of the installed package."""
