"""How large the tensors are that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor that was made has; repetitions of what is there take no room."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            if torch.is_tensor(part):
                self.entries = max(self.entries, min(part.numel(), part.untyped_storage().nbytes() // part.itemsize))
        return made
