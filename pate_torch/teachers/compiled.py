"""Counting compiled where a C compiler is: ``tally.c``, built at first use and kept in the user's cache folder.

Where there is none, or anything goes wrong, there is no kernel and torch counts (``voting``). numba would need no
compiler; it was left out because one loop does not carry a dependency of sixty megabytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("tally.c")
_BLOCK = 1 << 12
"""Queries the kernel walks at once: a thread takes no fewer."""
_STRETCH = 1 << 15
"""Queries a thread takes at a time, at most: a thread which must wait leaves the rest to others."""
_HUGE = 1 << 21
"""Bytes of a huge page."""

Kernel = Callable[[int, int, int, int, int, int, int], None]
"""(predictions, stride, teachers, first query, end, classes, counts), addresses as integers; see ``tally.c``."""


@cache
def kernel() -> Kernel | None:
    """The compiled function, or None."""
    try:
        return _load(_built(_folder()))
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError):
        return None


def tally(count: Kernel, prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """uint8 [K, Q] on the CPU -> int32 [Q, C], by as many threads as torch has."""
    if prediction_KQ.stride(1) != 1:
        prediction_KQ = prediction_KQ.contiguous()
    teachers, queries = prediction_KQ.shape
    counts_QC = _empty(queries, num_classes)
    source, stride, target = prediction_KQ.data_ptr(), prediction_KQ.stride(0), counts_QC.data_ptr()
    threads = torch.get_num_threads()
    stretch = min(_STRETCH, max(_BLOCK, queries // threads))
    parts = iter(range(0, queries, stretch))

    def work(_: int) -> None:
        for first in parts:  # whoever is free takes the next
            count(source, stride, teachers, first, min(first + stretch, queries), num_classes, target)

    with ThreadPoolExecutor(threads) as pool:  # the interpreter is not held during a foreign call
        list(pool.map(work, range(threads)))
    return counts_QC


def _empty(queries: int, num_classes: int) -> Tensor:
    """int32 [Q, C], in huge pages where the system has them: small ones come and go in a tenth of the whole time."""
    size = queries * num_classes * 4
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(queries, num_classes, dtype=torch.int32)
    memory = mmap.mmap(-1, -(-size // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32, count=queries * num_classes).view(queries, num_classes)


def _folder() -> Path:
    """The user's own cache folder, which nobody else may write. Raises OSError or RuntimeError without one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pate_torch"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others: nothing is loaded from it")
    return folder


def _built(folder: Path) -> Path:
    """The library, compiled unless it is there. Raises OSError or SubprocessError."""
    source = _SOURCE.read_bytes()
    name = hashlib.blake2b(source + platform.platform().encode(), digest_size=8).hexdigest()
    library = folder / f"tally-{name}.so"
    if library.exists():
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / library.name
        command = [compiler, "-O3", "-shared", "-fPIC", str(_SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(built, library)  # at once: another process sees all of it or nothing
    return library


def _load(library: Path) -> Kernel:
    function = ctypes.CDLL(str(library)).tally
    size, address = ctypes.c_ssize_t, ctypes.c_void_p
    function.argtypes = [address, size, size, size, size, ctypes.c_int, address]
    function.restype = None
    return function
