"""Independent verification of a release: its claims are recomputed by code that no other module uses."""
