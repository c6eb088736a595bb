"""Data sets of benchmarks, files and tensors. Each is loaded as private records, public points and test records."""
