"""One thread per process: the suite runs in parallel, and one-thread arithmetic is steadier than threads.

The programs that tests start inherit it: four of them with four threads each wait for each other for minutes.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
