"""A simulated GPU for machines that have none: its tensors report the device ``cuda:0`` and hold real numbers.

Every operation is checked by CUDA's rules for the devices of its operands, and counted by the line of the package that
called it: kernels, copies between host and device, and synchronizations. Operands are rounded where TF32 is switched
on, the gradients of convolutions differ in their last bits from run to run unless cuDNN is told to be deterministic,
and allocated memory is counted. Times, algorithms, streams, autocast and fragments of memory are not simulated.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.findings import CodeLine, find_package_line
from pate_torch.features import augmentation, contrastive
from pate_torch.privacy import records

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SYNCHRONIZING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "repeat_interleave"),
    *("_unique2", "unique_dim", "unique_consecutive", "isin", "_linalg_eigh", "_linalg_svd", "linalg_eig"),
}
"""Operations for whose results, or for whose results' size, the host waits."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_PRODUCTS, _CONVOLUTIONS = {"mm", "bmm", "addmm", "baddbmm"}, {"convolution", "convolution_backward"}
_BACKEND = "simulated"  # PyTorch's core would look for a driver if the tensors lay on "cuda"


class PlacementError(RuntimeError):
    """An operation that CUDA would refuse because of the devices of its operands."""


@dataclass
class SimulatedGpu:
    """Counts of executed operations, by line of the package, and bytes of memory. A copy that blocks is a sync, too."""

    kernels: Counter[CodeLine] = field(default_factory=Counter)
    copies_to_device: Counter[CodeLine] = field(default_factory=Counter)
    copies_to_host: Counter[CodeLine] = field(default_factory=Counter)
    syncs: Counter[CodeLine] = field(default_factory=Counter)
    allocated: int = 0
    peak: int = 0
    _storage_sizes: dict[int, int] = field(default_factory=dict)
    _warn_of_syncs: bool = False

    def reset_counts(self) -> None:
        """Count from 0 again. Tensors that are alive stay allocated."""
        for counter in (self.kernels, self.copies_to_device, self.copies_to_host, self.syncs):
            counter.clear()
        self.reset_peak()

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self._warn_of_syncs = mode not in ("default", 0)

    def count_sync(self) -> None:
        self.syncs[find_package_line()] += 1
        if self._warn_of_syncs:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def count_copy(self, counter: Counter[CodeLine], blocks: bool) -> None:
        counter[find_package_line()] += 1
        if blocks:
            self.count_sync()

    def count_memory(self, value: Tensor) -> None:
        """Count the memory of a tensor for as long as it lives."""
        storage = value.untyped_storage()
        if storage._cdata in self._storage_sizes:
            return
        size = self._storage_sizes[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self._release_memory, storage._cdata)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def _release_memory(self, storage: int) -> None:
        self.allocated -= self._storage_sizes.pop(storage)


_active_gpus: list[SimulatedGpu] = []
"""The simulated GPU that is in use, or nothing."""


class CudaTensor(Tensor):
    """A tensor that reports the simulated GPU as its device and holds its numbers in ``host_tensor``."""

    host_tensor: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host_tensor: Tensor) -> CudaTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            host_tensor.size(),
            strides=host_tensor.stride(),
            storage_offset=host_tensor.storage_offset(),
            dtype=host_tensor.dtype,
            device=torch.device(_BACKEND, 0),
        )
        tensor.host_tensor = host_tensor
        return tensor

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {})

    def tolist(self) -> Any:
        _active_gpus[-1].count_copy(_active_gpus[-1].copies_to_host, blocks=True)
        return self.host_tensor.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise PlacementError(f"can't convert cuda:0 device type tensor to numpy at {find_package_line()}")

    __array__ = numpy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CudaTensor(shape={tuple(self.shape)}, {self.dtype})"


_HostGenerator = torch.Generator


class _CudaGenerator(torch.Generator):
    device = property(lambda self: CUDA)


_cuda_generators: weakref.WeakValueDictionary[int, _CudaGenerator] = weakref.WeakValueDictionary()
"""Generators of the simulated GPU by their C pointers: operations receive another Python object."""


class _GeneratorType(type):
    def __call__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        if torch.device(device).type == "cpu":
            return _HostGenerator()
        generator = _CudaGenerator()
        _cuda_generators[generator._cdata] = generator
        return generator

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)


class _Generator(metaclass=_GeneratorType):
    """The replacement of ``torch.Generator``, which makes generators of either device."""


class _DispatchMode(TorchDispatchMode):
    """Intercepts operations that make tensors out of nothing, or out of tensors of the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first use of this mode would import torch's compiler: four seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {})


def _execute(func: Any, args: Any, kwargs: Any) -> Any:
    """Execute an operation on the operands' host tensors; check and count it if the simulated GPU takes part."""
    leaves = list(_iterate_leaves((*args, *kwargs.values())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    makes_cuda = device is not None and device.type in ("cuda", _BACKEND)
    name = func._schema.name.removeprefix("aten::")
    if not any(isinstance(one, CudaTensor) for one in tensors) and not makes_cuda:
        _check_generator(name, leaves, CPU)
        return func(*args, **kwargs)
    gpu, to_cuda = _active_gpus[-1], device is None or makes_cuda
    if name in ("_to_copy", "copy_"):
        source, into_cuda = (args[1], isinstance(args[0], CudaTensor)) if name == "copy_" else (args[0], to_cuda)
        non_blocking = kwargs.get("non_blocking", False) or args[2:] == (True,)
        if isinstance(source, CudaTensor) and not into_cuda:
            gpu.count_copy(gpu.copies_to_host, blocks=not non_blocking)
        elif into_cuda and not isinstance(source, CudaTensor):
            gpu.count_copy(gpu.copies_to_device, blocks=not (non_blocking and source.is_pinned()))
    else:
        _check_generator(name, leaves, CUDA)
        _check_placement(gpu, func, name, args, tensors)
        if name in _PRODUCTS and not tensors[0].is_floating_point():
            raise NotImplementedError(f'"{name}_cuda" not implemented for {tensors[0].dtype} at {find_package_line()}')
        if name in SYNCHRONIZING:
            gpu.count_sync()
    if not func.is_view and name != "_local_scalar_dense":
        gpu.kernels[find_package_line()] += 1
    operands = {id(one.host_tensor if isinstance(one, CudaTensor) else one): one for one in tensors}
    host_args = _round_to_tf32(name, _map_leaves(_to_host, args))
    out = func(*host_args, **{key: _map_leaves(_to_host, value) for key, value in kwargs.items()})

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in operands:  # an operand that was changed in place
            return operands.get(id(value), value)
        if not to_cuda:
            return value
        gpu.count_memory(value)
        return CudaTensor(value)

    return _map_leaves(wrap, _perturb_gradients(name, out))


def _iterate_leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _iterate_leaves(value)
        else:
            yield value


def _map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the values within lists and tuples; PyTorch's function for any tree takes four times as long."""
    if isinstance(value, list | tuple):
        return type(value)([_map_leaves(change, one) for one in value])
    return change(value)


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, CudaTensor):
        return leaf.host_tensor
    return CPU if isinstance(leaf, torch.device) else leaf


def _check_generator(name: str, leaves: list[Any], device: torch.device) -> None:
    generator = next((leaf for leaf in leaves if isinstance(leaf, _HostGenerator)), None)
    if generator is None:
        return
    found = CUDA if generator._cdata in _cuda_generators else CPU
    if found != device:
        message = f"Expected a '{device.type}' device type for generator but found '{found.type}'"
        raise PlacementError(f"{message}: {name} at {find_package_line()}")


def _check_placement(gpu: SimulatedGpu, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Apply CUDA's rule: pointwise operations take single numbers of the host, and indexing takes its indices."""
    host_tensors = [one for one in tensors if not isinstance(one, CudaTensor)]
    if name in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        if not isinstance(args[0], CudaTensor):
            message = "indices should be either on cpu or on the same device"
            raise PlacementError(f"{message}: {name} at {find_package_line()}")
        fills_mask = name != "index" and args[2].numel() == 1  # one number where a mask is true needs no positions
        if not fills_mask and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            gpu.count_sync()
        for index in indices:
            if not isinstance(index, CudaTensor):
                gpu.count_copy(gpu.copies_to_device, blocks=True)
        host_tensors = [one for one in host_tensors if all(one is not index for index in indices)]
    takes_numbers = torch.Tag.pointwise in func.tags or name in (*_INDEXING, "fill_", "masked_fill", "masked_fill_")
    for one in host_tensors:
        is_changed = one is args[0] and name.endswith("_")
        if one.dim() > 0 or is_changed or not takes_numbers:
            message = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            raise PlacementError(f"{message} {name}, {tuple(one.shape)} at {find_package_line()}")


def _round_to_tf32(name: str, operands: Any) -> Any:
    """Round float32 operands of a product to ten bits of mantissa if TF32 is switched on."""
    backend: Any = torch.backends.cudnn.conv if name in _CONVOLUTIONS else torch.backends.cuda.matmul
    if name not in _PRODUCTS | _CONVOLUTIONS or backend.fp32_precision != "tf32":
        return operands

    def round_value(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).view_as(value)

    return _map_leaves(round_value, operands)


def _perturb_gradients(name: str, out: Any) -> Any:
    """Change the last bits of a convolution's gradients if cuDNN is free to add in any order."""
    is_deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    if name != "convolution_backward" or is_deterministic:
        return out
    return _map_leaves(lambda grad: None if grad is None else grad * (1 + 1e-7 * torch.randn_like(grad)), out)


# ---- replacing torch.cuda --------------------------------------------------------------------------------------------


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return bool(_active_gpus)


class _BackendModule(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        return bool(_active_gpus)

    def device_count(self) -> int:
        return len(_active_gpus)


def _register_backend() -> None:
    """Register a device that Python simulates with PyTorch's core, once in a process."""
    if torch._C._get_privateuse1_backend_name() == _BACKEND:
        return
    # Autograd counts devices at its first use: threads for them, which it must not have, would forbid to fork.
    (torch.ones(1, requires_grad=True) * 2).sum().backward()
    backend_registration._setup_privateuseone_for_python_backend(_BACKEND, _BackendModule(), _Hooks())
    torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def _intercept_operations() -> Iterator[None]:
    """Simulate the operations of this thread, backward passes included."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then copies to the GPU by an operation that is seen
    try:
        with _DispatchMode(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


_plain_submit = ThreadPoolExecutor.submit


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    return _plain_submit(pool, _intercept_operations()(work), *args, **kwargs)


@contextmanager
def simulate_gpu() -> Iterator[SimulatedGpu]:
    """Let ``cuda`` be a simulated GPU; the package asks ``torch.cuda``, which answers for it."""
    assert not _active_gpus, "there is one simulated GPU at a time"
    _register_backend()
    gpu = SimulatedGpu()
    properties = SimpleNamespace(name="simulated GPU", total_memory=80 * 2**30, major=9, minor=0)
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: torch.cuda._utils._get_device_index(device),  # refuses one without a number
        "synchronize": lambda device=None: gpu.count_sync(),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_properties": lambda device=None: properties,
        "memory_allocated": lambda device=None: gpu.allocated,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "reset_peak_memory_stats": lambda device=None: gpu.reset_peak(),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
    }
    pinned_storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def pin_memory(value: Tensor) -> Tensor:  # PyTorch's refuses without a driver
        copied = value.clone()
        pinned_storages.add(copied.untyped_storage())
        return copied

    with ExitStack() as stack:
        for cached_on_device in (records._make_constant_tensor, augmentation._pixels_to_grid):
            stack.callback(cached_on_device.cache_clear)
        stack.enter_context(patch.dict(contrastive._ENCODER_CACHE, clear=True))
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(patch.object(Tensor, "pin_memory", pin_memory))
        stack.enter_context(patch.object(Tensor, "is_pinned", lambda value: value.untyped_storage() in pinned_storages))
        _active_gpus.append(gpu)
        stack.callback(_active_gpus.remove, gpu)
        stack.enter_context(_intercept_operations())
        yield gpu
