"""``python -m pate_torch.gpu_check``: whether a GPU does here what is claimed; where there is none, a pretend one."""
