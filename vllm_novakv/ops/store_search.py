"""The search for nearest centroids of the store in CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

Same result as the search in ops/store.py wherever the nearest centroid is unique beyond rounding, on compute capability
8.0 and up: the scores come from tensor cores, in three bf16 terms, which Triton's products cannot express for groups of
four; see ops/store_common.cuh.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from vllm_novakv.ops import nvrtc
from vllm_novakv.ops.tables import KernelTables

_TILES, _WARPS = 4, 8
"""Tiles of 16 tokens, and warps, of a block."""

COMMON = Path(__file__).with_name("store_common.cuh")
_SOURCE = Path(__file__).with_suffix(".cu")


def is_supported(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    return nvrtc.is_available(device, (8, 0))


def launch_search(
    keys: torch.Tensor, history_cache: torch.Tensor, history_slot_mapping: torch.Tensor, tables: KernelTables
) -> None:
    """Write index bytes and scales of transformed keys.

    Args:
        keys: f32 ``[num_slots, num_kv_heads, head_size]``, contiguous, (k − k̄) R_K; rows that are not stored may hold
            anything.
        history_cache, history_slot_mapping, tables: as in `vllm_novakv.ops.store.store`.
    """
    num_slots, heads, size = keys.shape
    _compiled(size, keys.device)(
        grid=(-(-num_slots // (16 * _TILES)), heads, 1),
        block=(32 * _WARPS, 1, 1),
        args=[
            keys,
            history_cache,
            history_slot_mapping,
            tables.search_words,
            num_slots,
            # in 16 bytes, so that 32 bits suffice
            history_cache.stride(0) // 16,
            history_cache.stride(1) // 16,
        ],
        shared_mem=0,
    )


def source(size: int) -> str:
    """The kernel's source for one head size."""
    return nvrtc.source_text({"D": size, "TILES": _TILES, "WARPS": _WARPS}, COMMON, _SOURCE)


@cache
def _compiled(size: int, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.compile_kernel(source(size), "store_search", device)
