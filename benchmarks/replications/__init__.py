"""Tables of the papers, measured again: ``python train.py --config-dir benchmarks/conf experiment=<name>``."""
