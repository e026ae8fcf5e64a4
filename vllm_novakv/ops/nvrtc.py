"""CUDA C++ kernels, compiled at start-up by NVRTC, which ships with PyTorch: no compiler on the user's machine.

`torch.cuda._compile_kernel` is private to PyTorch; this is the only place that knows it. Where it is missing, the
Triton kernels run. Can go when PyTorch offers the same publicly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Macro TYPE of the kernels."""

_DEFAULT_SHARED_BYTES = 48 * 1024


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


def source_text(constants: Mapping[str, int | str], *paths: Path) -> str:
    """A kernel's source with its constants defined as macros.

    Args:
        constants: macro names and values.
        paths: files, one after the other; the kernel's own is the last.
    """
    macros = [f"#define {name} {value}\n" for name, value in constants.items()]
    return "".join([*macros, *(path.read_text() for path in paths)])


def compile_kernel(source: str, name: str, device: torch.device, shared_bytes: int = 0) -> Kernel:
    """Compile one kernel.

    Args:
        source: CUDA C++; the kernel is ``extern "C"``.
        name: of the kernel.
        device: where it will run.
        shared_bytes: dynamic shared memory of its launches.

    Raises:
        RuntimeError: the source does not compile.
    """
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        if shared_bytes >= _DEFAULT_SHARED_BYTES:
            kernel.set_shared_memory_config(shared_bytes)
    compiled: Kernel = kernel
    return compiled
