"""Replications of the papers' tables: chosen by ``experiment=<name>``, found by the ``_target_`` of ``study``."""
