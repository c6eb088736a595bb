"""Reports: what may be published of a run, and what its owner alone may see."""
