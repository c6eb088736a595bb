"""A pretend GPU: tensors that say they lie on ``cuda:0`` and hold real numbers, for machines that have none.

Every operation is checked for where its operands lie, by CUDA's rules, and counted by the line of the package that
asked for it: kernels, copies between host and device, and what makes the host wait. TF32 is rounded where it is
switched on, convolutions differ in their last bits from run to run where cuDNN is not told to be deterministic, and
memory is counted, so that code meant for a GPU meets there what it would meet on one.

Not to be seen here: how long anything takes, which algorithms cuDNN and cuBLAS choose, what streams do, autocast (which
changes nothing), and what the allocator leaves between blocks.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from warnings import warn

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from pate_torch import types
from pate_torch.features import augmentation, contrastive

CARD = torch.device("cuda", 0)
SYNCS = frozenset(
    (
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "repeat_interleave"),
        *("_unique2", "unique_dim", "unique_consecutive", "isin", "_linalg_eigh", "_linalg_svd", "linalg_eig"),
    )
)
"""Operations for whose results, or for whose results' size, the host waits."""
_INDEX = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
_CONVOLUTIONS = frozenset(("convolution", "convolution_backward"))
_COPIES = frozenset(("_to_copy", "copy_"))
_UNDERLYING = "pretend"  # what the tensors lie on for PyTorch's core, which wants a driver for "cuda"
_CHECK = str(Path(__file__).resolve().parent)
_PACKAGE = str(Path(_CHECK).parent)


class PlacementError(RuntimeError):
    """An operation that CUDA would refuse for where its operands lie."""


class Site(NamedTuple):
    """A line of the package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def site() -> Site:
    """The innermost line of the package that is being run; the check itself is not meant."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and not code.co_filename.startswith(_CHECK):
            return Site(code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return Site("elsewhere", 0, "")


@dataclass
class Card:
    """What the pretend GPU has seen. Copies that block are syncs, too.

    Attributes:
        memory: Bytes; more raise ``torch.OutOfMemoryError``.
        kernels: Operations that compute, by the line that asked.
        to_device: Copies from the host.
        to_host: Copies to the host.
        syncs: What makes the host wait.
        allocated: Bytes of the tensors that are alive.
        peak: The most there were.
    """

    memory: int = 80 * 2**30
    kernels: Counter[Site] = field(default_factory=Counter)
    to_device: Counter[Site] = field(default_factory=Counter)
    to_host: Counter[Site] = field(default_factory=Counter)
    syncs: Counter[Site] = field(default_factory=Counter)
    allocated: int = 0
    peak: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _warns: bool = False

    def forget(self) -> None:
        """Count from 0 again; what is allocated stays."""
        for counter in (self.kernels, self.to_device, self.to_host, self.syncs):
            counter.clear()
        self.peak = self.allocated

    def waits(self) -> None:
        """Count a sync, and warn where ``torch.cuda.set_sync_debug_mode`` wants it."""
        self.syncs[site()] += 1
        if self._warns:
            warn("called a synchronizing CUDA operation", stacklevel=2)

    def copies(self, counter: Counter[Site], blocks: bool) -> None:
        """Count a copy between host and device."""
        counter[site()] += 1
        if blocks:
            self.waits()

    def holds(self, value: Tensor) -> None:
        """Count the memory of a tensor for as long as it lives."""
        storage = value.untyped_storage()
        if storage._cdata in self._sizes:
            return
        size = self._sizes[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self._frees, storage._cdata)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        if self.allocated > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self.allocated} of {self.memory} bytes at {site()}")

    def _frees(self, storage: int) -> None:
        self.allocated -= self._sizes.pop(storage)


_cards: list[Card] = []
"""The card in use, or none."""


class OnCard(Tensor):
    """A tensor that says it lies on the card, and holds its numbers in ``held``."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCard:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(_UNDERLYING, 0),
        )
        made.held = held
        return made

    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _execute(func, args, kwargs or {})

    def tolist(self) -> Any:
        _cards[-1].copies(_cards[-1].to_host, blocks=True)
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise PlacementError(f"can't convert cuda:0 device type tensor to numpy at {site()}")

    __array__ = numpy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnCard(shape={tuple(self.shape)}, {self.dtype})"


class _CardGenerator(torch.Generator):
    """A generator that says it lies on the card."""

    _cdata: int
    device = property(lambda self: CARD)


_generators: weakref.WeakValueDictionary[int, _CardGenerator] = weakref.WeakValueDictionary()
"""Those on the card, by what is behind them: operations see another Python object."""


class _Generators(type):
    """What takes the place of ``torch.Generator``: makes those of the host as ever, and those of the card."""

    def __call__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        if torch.device(device).type == "cpu":
            return _GENERATOR()
        made = _CardGenerator()
        _generators[made._cdata] = made
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _Generator(metaclass=_Generators): ...


_GENERATOR = torch.Generator


class _Mode(TorchDispatchMode):
    """Catches what makes tensors out of nothing, or out of those of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {})


def _lies_on_card(device: torch.device | None) -> bool:
    return device is not None and device.type in ("cuda", _UNDERLYING)


def _execute(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the numbers that the operands hold, checked and counted where the card takes part."""
    leaves = list(_leaves((*args, *kwargs.values())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    name = func._schema.name.removeprefix("aten::")
    if not any(isinstance(one, OnCard) for one in tensors) and not _lies_on_card(device):
        _check_generator(name, leaves, torch.device("cpu"))
        return func(*args, **kwargs)
    card, to_card = _cards[-1], device is None or _lies_on_card(device)
    if name in _COPIES:
        source, into = (args[1], isinstance(args[0], OnCard)) if name == "copy_" else (args[0], to_card)
        _count_copy(card, source, into, kwargs.get("non_blocking", False) or args[2:] == (True,))
    else:
        _check_generator(name, leaves, CARD)
        _check_placement(card, func, name, args, tensors)
        if name in SYNCS:
            card.waits()
    if not func.is_view and name != "_local_scalar_dense":
        card.kernels[site()] += 1
    own = {id(one.held if isinstance(one, OnCard) else one): one for one in tensors}
    plain = _mapped(_plain, args)
    out = func(*_rounded(name, plain), **{key: _mapped(_plain, value) for key, value in kwargs.items()})

    def wrapped(value: Any) -> Any:
        """The operand itself, where it was changed in place; else a new one."""
        if not isinstance(value, Tensor) or id(value) in own:
            return own.get(id(value), value)
        if not to_card:
            return value
        card.holds(value)
        return OnCard(value)

    return _mapped(wrapped, _unsettled(name, out))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Values within lists and tuples, changed; PyTorch's own, for trees of any kind, takes four times as long."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, one) for one in value])
    return change(value)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, OnCard):
        return leaf.held
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _count_copy(card: Card, source: Tensor, to_card: bool, non_blocking: bool) -> None:
    if isinstance(source, OnCard) and not to_card:
        card.copies(card.to_host, blocks=not non_blocking)
    elif to_card and not isinstance(source, OnCard):
        card.copies(card.to_device, blocks=not (non_blocking and source.is_pinned()))


def _check_generator(name: str, leaves: list[Any], device: torch.device) -> None:
    generator = next((leaf for leaf in leaves if isinstance(leaf, _GENERATOR)), None)
    if generator is None:
        return
    behind: int = generator._cdata  # type: ignore[attr-defined]
    lies = CARD if behind in _generators else torch.device("cpu")
    if lies != device:
        found = f"Expected a '{device.type}' device type for generator but found '{lies.type}'"
        raise PlacementError(f"{found}: {name} at {site()}")


def _check_placement(card: Card, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """As CUDA does: of the host's tensors an operation by elements takes single numbers, an index takes indices."""
    hosts = [one for one in tensors if not isinstance(one, OnCard)]
    if name in _INDEX:
        indices = [index for index in args[1] if index is not None]
        if not isinstance(args[0], OnCard):
            raise PlacementError(f"indices should be either on cpu or on the same device: {name} at {site()}")
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            card.waits()
        for index in indices:
            if not isinstance(index, OnCard):
                card.copies(card.to_device, blocks=True)
        hosts = [one for one in hosts if all(one is not index for index in indices)]
    numbers = torch.Tag.pointwise in func.tags or name in _INDEX or name in ("fill_", "masked_fill", "masked_fill_")
    for one in hosts:
        if one.dim() > 0 or not numbers:
            found = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            raise PlacementError(f"{found} {name}, {tuple(one.shape)} at {site()}")


def _rounded(name: str, operands: Any) -> Any:
    """Operands of a product as the card takes them: of float32 with ten bits of mantissa, where TF32 is on."""
    backend: Any = torch.backends.cudnn.conv if name in _CONVOLUTIONS else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    if name not in _PRODUCTS | _CONVOLUTIONS or backend.fp32_precision != "tf32":
        return operands

    def round_(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).view_as(value)

    return _mapped(round_, operands)


def _unsettled(name: str, out: Any) -> Any:
    """What a convolution's backward pass gives where cuDNN may add in any order: other last bits each time."""
    settled = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    if name != "convolution_backward" or settled:
        return out
    return _mapped(lambda grad: None if grad is None else grad * (1 + 1e-7 * torch.randn_like(grad)), out)


# ---- the world in which there is such a card -------------------------------------------------------------------------


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return bool(_cards)


class _Backend(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        return bool(_cards)

    def device_count(self) -> int:
        return len(_cards)


def _register() -> None:
    """Make PyTorch's core know a device for which Python computes; once in a process."""
    if torch._C._get_privateuse1_backend_name() == _UNDERLYING:
        return
    # Autograd counts devices at its first use: threads for them, which it must not have, would forbid to fork.
    (torch.ones(1, requires_grad=True) * 2).sum().backward()
    backend_registration._setup_privateuseone_for_python_backend(_UNDERLYING, _Backend(), _Hooks())
    torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def _watched() -> Iterator[None]:
    """Operations of this thread go by the card; a backward pass stays in it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor copies to the card by an operation that can be seen
    try:
        with _Mode(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _watched():
            return work(*args, **kwargs)

    return _SUBMIT(pool, watched, *args, **kwargs)


_SUBMIT = ThreadPoolExecutor.submit


def _pinned() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], bool]]:
    """``pin_memory`` and ``is_pinned``, which PyTorch refuses without a driver."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def pin_memory(value: Tensor) -> Tensor:
        copied = value.clone()
        alive.add(copied.untyped_storage())
        return copied

    return pin_memory, lambda value: value.untyped_storage() in alive


@contextmanager
def pretend_gpu(memory: int = 80 * 2**30) -> Iterator[Card]:
    """A world in which ``cuda`` is a pretend GPU with so many bytes.

    Nothing of the package knows: it asks ``torch.cuda``, which answers for the card.
    """
    assert not _cards, "there is one pretend GPU at a time"
    _register()
    card = Card(memory)

    def set_sync_debug_mode(mode: str | int) -> None:
        card._warns = mode not in ("default", 0)

    def reset_peak(device: Any = None) -> None:
        card.peak = card.allocated

    facts = SimpleNamespace(name="pretend GPU", total_memory=memory, major=0, minor=0)
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: card.waits(),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_properties": lambda device=None: facts,
        "memory_allocated": lambda device=None: card.allocated,
        "max_memory_allocated": lambda device=None: card.peak,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": set_sync_debug_mode,
    }
    pin_memory, is_pinned = _pinned()
    with ExitStack() as changed:
        for kept_on_card in (types._on_device, augmentation._pixels):
            changed.callback(kept_on_card.cache_clear)
        changed.enter_context(patch.dict(contrastive._LEARNT, clear=True))
        for name, answer in answers.items():
            changed.enter_context(patch.object(torch.cuda, name, answer))
        changed.enter_context(patch.object(torch, "Generator", _Generator))
        changed.enter_context(patch.object(ThreadPoolExecutor, "submit", _submit))
        changed.enter_context(patch.object(Tensor, "pin_memory", pin_memory))
        changed.enter_context(patch.object(Tensor, "is_pinned", is_pinned))
        _cards.append(card)
        changed.callback(_cards.remove, card)
        changed.enter_context(_watched())
        yield card
