"""What ``python -m pate_torch.plan`` is made of: declared facts, imagined votes, and the choices judged by both."""
