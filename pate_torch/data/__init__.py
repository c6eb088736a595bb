"""Data sets: benchmarks, a user's own files and tensors, loaded into the private, public and evaluation sides."""
