"""Privacy accounting: events in, (epsilon, delta) out. NumPy/SciPy float64, log space; no torch, no Hydra."""
