"""One thread per process: the suite runs in parallel, and one-thread arithmetic is steadier than threads."""

import torch

torch.set_num_threads(1)
