"""Kernels of your own: CUDA C++ on Fretwork's device headers, compiled through its cache, launched on torch tensors."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fretwork._library import core, last_error

__all__ = ["Kernel", "Report", "kernel"]

# What a Python number becomes, as in other libraries that launch raw kernels; ctypes has the rest.
_SCALARS: dict[type, Any] = {bool: ctypes.c_bool, int: ctypes.c_longlong, float: ctypes.c_double}


@dataclass(frozen=True)
class Report:
    """What the compiler reports of a kernel: the number of registers, other sizes in bytes."""

    registers: int
    spills: int
    stack: int
    shared: int


def _count(value: Any) -> int:
    """An int from anything that counts as one; −1 from anything else."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


class Kernel:
    """A kernel of `fw.jit.kernel`. Compiled when it is first launched on a GPU, or by `compile`."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        # The line break distinguishes a program from the name of an embedded file.
        self._source, self._name = (source + "\n").encode(), name.encode()
        self._loaded: dict[int, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is loaded, which belongs to a process."""
        return Kernel, (self._source.decode().removesuffix("\n"), self.name)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"

    def compile(self, arch: str) -> Report:
        """Compiles for an architecture, whether there is such a GPU or not; RuntimeError with the compiler's log.

        >>> import fretwork as fw
        >>> fw.jit.kernel("__global__ void nothing() {}", "nothing").compile("sm_90a").spills
        0
        """
        if not isinstance(arch, str):
            self._fail("arch", "a name such as sm_90a", repr(arch), TypeError)
        report = (ctypes.c_int64 * 4)()
        if core().fretwork_kernel_compile(self._source, self._name, arch.encode(), report) < 0:
            raise RuntimeError(last_error())
        return Report(*report)

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: object,
        shared_memory: int = 0,
    ) -> None:
        """Starts it on torch's current stream of the device that the tensors are on.

        A tensor is passed as its pointer, an int as `long long`, a float as `double`, a bool as `bool`; numbers,
        structures, unions and arrays of ctypes as they are (`ctypes.c_int(3)`). `shared_memory` are dynamic bytes.
        """
        held = [self._passed(n, a) for n, a in enumerate(arguments)]
        sizes = [self._three(what, given) for what, given in (("grid", grid), ("block", block))]
        if not 0 <= (dynamic := _count(shared_memory)) < 2**31:
            self._fail("shared_memory", "bytes as an int", repr(shared_memory))
        device = self._device(arguments)
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        stream = torch.cuda.current_stream(device).cuda_stream
        loaded = self._loaded.get(device) or self._load(device)
        bytes_ = (ctypes.c_size_t * len(held))(*(ctypes.sizeof(a) for a in held))
        if core().fretwork_kernel_launch(loaded, device, *sizes, dynamic, pointers, bytes_, len(held), stream) < 0:
            raise RuntimeError(last_error())

    def _load(self, device: int) -> int:
        loaded = core().fretwork_kernel_load(self._source, self._name, device)
        if not loaded:
            raise RuntimeError(last_error())
        self._loaded[device] = loaded
        return loaded

    def _device(self, arguments: Sequence[object]) -> int:
        tensors = [(n, a) for n, a in enumerate(arguments) if isinstance(a, Tensor)]
        for n, tensor in tensors:
            if not tensor.is_cuda:
                self._fail(f"argument {n}", "a tensor on a GPU", f"one on {tensor.device}")
            if tensor.device != tensors[0][1].device:
                self._fail(f"argument {n}", f"{tensors[0][1].device} like the first tensor", tensor.device)
        if not tensors and not torch.cuda.is_available():
            self._fail("device", "a GPU", "none", RuntimeError)
        return tensors[0][1].get_device() if tensors else torch.cuda.current_device()

    def _passed(self, n: int, argument: object) -> Any:
        if isinstance(argument, Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        if isinstance(argument, (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)):
            return argument
        if (scalar := _SCALARS.get(type(argument))) is None:
            expected = "a tensor, an int, a float, a bool or something of ctypes"
            self._fail(f"argument {n}", expected, type(argument).__name__, TypeError)
        if type(argument) is int and not -(2**63) <= argument < 2**63:
            self._fail(f"argument {n}", "an int of 64 bits", argument)
        return scalar(argument)

    def _three(self, what: str, given: int | Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
        counts = [_count(n) for n in (given if isinstance(given, Sequence) else [given])]
        if not 1 <= len(counts) <= 3 or any(not 1 <= n < 2**31 for n in counts):
            self._fail(what, "one to three positive ints", repr(given))
        return (ctypes.c_uint * 3)(*counts, *[1] * (3 - len(counts)))

    def _fail(self, argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{self.name}: {argument}: expected {expected}, got {got}")


def kernel(source: str, name: str) -> Kernel:
    """A kernel from CUDA C++ source: `name` is a __global__ function in it, with template arguments where it has some.

    The source may include Fretwork's device headers, which docs/kernels.md explains; no CUDA header is needed. Compiled
    kernels are kept in Fretwork's cache on disk.

    >>> import torch, fretwork as fw
    >>> source = '''
    ... #include "device/types.cuh"
    ... extern "C" __global__ void double_it(fretwork::bf16* x, long long n) {
    ...   const long long i = blockIdx.x * 256ll + threadIdx.x;
    ...   if (i < n) x[i] = fretwork::narrow<fretwork::bf16>(2 * fretwork::widen(x[i]));
    ... }
    ... '''
    >>> double_it = fw.jit.kernel(source, "double_it")
    >>> if torch.cuda.is_available():
    ...     x = torch.ones(1000, dtype=torch.bfloat16, device="cuda")
    ...     double_it(4, 256, x, 1000)
    """
    for what, given in (("source", source), ("name", name)):
        if not isinstance(given, str) or not given:
            raise TypeError(f"jit.kernel: {what}: expected a text, got {given!r}")
    return Kernel(source, name)
