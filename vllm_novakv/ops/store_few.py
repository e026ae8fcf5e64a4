"""The store of few tokens in one launch of CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

A decode step stores one token per request and layer, and two Triton launches cost more than what they compute. Same
result as ops/store.py wherever the nearest centroid is unique beyond rounding, on compute capability 8.0 and up; see
ops/store_few.cu.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from vllm_novakv.codec.quantizer import VALUE_STEP
from vllm_novakv.ops import nvrtc, store_search
from vllm_novakv.ops.checks import require
from vllm_novakv.ops.tables import KernelTables

MAX_TOKENS = 512
"""With more tokens the tiles fill the GPU, and larger ones read the transforms less often."""

_SOURCE = Path(__file__).with_suffix(".cu")
_TILE = 16


def takes(num_slots: int, band_cache: torch.Tensor) -> bool:
    """Whether the kernel stores this many tokens to a band of this type, where `store_search` runs, too."""
    return num_slots <= MAX_TOKENS and band_cache.dtype == torch.bfloat16


def launch_store(
    key: torch.Tensor,
    value: torch.Tensor,
    history_cache: torch.Tensor,
    band_cache: torch.Tensor,
    history_slot_mapping: torch.Tensor,
    band_slot_mapping: torch.Tensor,
    tables: KernelTables,
) -> None:
    """Write tokens to both caches; arguments as in `vllm_novakv.ops.store.store`.

    Raises:
        ValueError: a row does not begin at a multiple of four elements.
    """
    for name, tensor, dims in (("key", key, 2), ("value", value, 2), ("band cache", band_cache, 3)):
        is_aligned = tensor.data_ptr() % (4 * tensor.element_size()) == 0
        is_aligned &= all(stride % 4 == 0 for stride in tensor.stride()[:dims])
        require(is_aligned, name, tensor, "rows that begin at multiples of four elements")
    codec = tables.codec
    num_slots, heads, size = history_slot_mapping.shape[0], codec.num_kv_heads, codec.head_size
    kernel = _compiled(size, key.dtype, band_cache.shape[2], key.device)
    kernel(
        grid=(-(-num_slots // _TILE), heads, 2),
        block=(32 * _num_warps(size), 1, 1),
        args=[
            key,
            value,
            history_cache,
            band_cache,
            history_slot_mapping,
            band_slot_mapping,
            codec.key_mean,
            tables.key_transform_terms,
            tables.search_words,
            tables.value_transform_terms,
            num_slots,
            *key.stride()[:2],
            *value.stride()[:2],
            # in 16 bytes, so that 32 bits suffice
            history_cache.stride(0) // 16,
            history_cache.stride(1) // 16,
            *band_cache.stride()[:3],
        ],
        shared_mem=0,
    )


def _num_warps(size: int) -> int:
    """Warps of a block: one for 8 columns of a transform, 16 at most."""
    return min(16, size // 8)


def source(size: int, dtype: torch.dtype, band_block_tokens: int) -> str:
    """The kernel's source for one head size, one type of keys and values, and the band's block size."""
    constants: dict[str, int | str] = {
        "D": size,
        "WARPS": _num_warps(size),
        "TYPE": nvrtc.TYPES[dtype],
        "STEP": f"{VALUE_STEP}f",
        "BAND_BLOCK": band_block_tokens,
    }
    return nvrtc.source_text(constants, store_search.COMMON, _SOURCE)


@cache
def _compiled(size: int, dtype: torch.dtype, band_block_tokens: int, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.compile_kernel(source(size, dtype, band_block_tokens), "store_few", device)
