"""CUDA C++ kernels, compiled at start-up by NVRTC, which ships with PyTorch: no compiler on the user's machine.

`torch.cuda._compile_kernel` is private to PyTorch; this is the only place that knows it. Where it is missing, the
Triton kernels run. Can go when PyTorch offers the same publicly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Macro TYPE of the kernels."""

COMMON = Path(__file__).with_name("cuda_common.cuh")
"""What all kernels begin with."""

_DEFAULT_SHARED_BYTES = 48 * 1024
_HOPPER_SHARED_BYTES = 227 * 1024


class Kernel(Protocol):
    """A compiled kernel; a launch goes to the current stream."""

    def __call__(
        self,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: list[torch.Tensor | int],
        shared_mem: int,
    ) -> None:
        """Launch with tensors, passed as pointers, and 32-bit integers; ``shared_mem`` bytes of shared memory."""


def is_available(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether kernels can be compiled for a device, which has at least this compute capability."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= capability
        and hasattr(torch.cuda, "_compile_kernel")
    )


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on a device; Hopper's where it is no GPU."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def source_text(constants: Mapping[str, int | str], *paths: Path) -> str:
    """A kernel's source with its constants defined as macros.

    Args:
        constants: macro names and values.
        paths: files, one after the other; the kernel's own is the last.
    """
    macros = [f"#define {name} {value}\n" for name, value in constants.items()]
    return "".join([*macros, *(path.read_text() for path in paths)])


def compile_kernel(
    source: str, name: str, device: torch.device, shared_bytes: int = 0, overlaps: bool = False
) -> Kernel:
    """Compile one kernel.

    Args:
        source: CUDA C++; the kernel is ``extern "C"``.
        name: of the kernel.
        device: where it will run.
        shared_bytes: dynamic shared memory of its launches.
        overlaps: whether a launch may begin before the one ahead of it in the stream has ended, for whose results it
            waits itself (griddepcontrol.wait); where the device has no such launches, it begins after it.

    Raises:
        RuntimeError: the source does not compile.
    """
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        if shared_bytes >= _DEFAULT_SHARED_BYTES:
            kernel.set_shared_memory_config(shared_bytes)
        overlaps &= torch.cuda.get_device_capability(device) >= (9, 0)
    compiled: Kernel = _OverlappingKernel(kernel) if overlaps else kernel
    return compiled


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""Identifier of the launch attribute, of the CUDA driver API."""


class _OverlappingKernel:
    """A kernel whose launches have the attribute of programmatic stream serialization, which PyTorch cannot set.

    Args:
        kernel: as PyTorch compiled it, kept because it owns the code.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)

    def __call__(
        self,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: list[torch.Tensor | int],
        shared_mem: int,
    ) -> None:
        """See `Kernel`."""
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = _LaunchConfig(
            grid, block, shared_mem, torch.cuda.current_stream().cuda_stream, ctypes.pointer(self._attribute), 1
        )
        result = _driver().cuLaunchKernelEx(ctypes.byref(config), self._kernel.func, pointers, None)
        if result != 0:
            raise RuntimeError(f"a kernel was not launched: CUDA driver error {result}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
