"""The papers' theorems in numbers, and what learners and ensembles are measured for by them.

Measured on private votes or private records, the results are PRIVATE.
"""
