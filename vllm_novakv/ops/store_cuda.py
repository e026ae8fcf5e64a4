"""The store in CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

Same result as ops/store.py wherever the nearest centroid is unique beyond rounding, on compute capability 8.0 and up:
one launch, and scores from tensor cores in bf16 terms, which Triton's products cannot express for groups of four; see
ops/store_cuda.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from vllm_novakv.codec.quantizer import VALUE_STEP
from vllm_novakv.ops import nvrtc
from vllm_novakv.ops.checks import check_rows
from vllm_novakv.ops.tables import KernelTables

FEW_TOKENS = 512
"""With more tokens the tiles fill the GPU, and larger ones read the tables less often."""

_SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut.

    Args:
        tiles: of 16 tokens in a block.
        warps: of a block.
        resident: blocks that run on a multiprocessor at the same time, at least.
    """

    tiles: int
    warps: int
    resident: int


def shape_for(size: int, num_tokens: int) -> Shape:
    """The cut for a head size and a number of tokens; a warp has 8 columns of a transform at a time."""
    if num_tokens <= FEW_TOKENS:
        return Shape(1, min(16, size // 8), 1)
    return Shape(4 if size < 256 else 2, 8, 2)


def takes(band_cache: torch.Tensor) -> bool:
    """Whether the kernel runs on a device and stores to a band of this type."""
    return nvrtc.is_available(band_cache.device, (8, 0)) and band_cache.dtype == torch.bfloat16


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
        check_rows(name, tensor, dims)
    codec = tables.codec
    num_slots, heads, size = history_slot_mapping.shape[0], codec.num_kv_heads, codec.head_size
    shape = shape_for(size, num_slots)
    kernel = _compiled(size, shape, key.dtype, band_cache.shape[2], key.device)
    kernel(
        grid=(-(-num_slots // (16 * shape.tiles)), heads, 2),
        block=(32 * shape.warps, 1, 1),
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
        shared_mem=_shared_bytes(size, shape),
    )


def source(size: int, shape: Shape, dtype: torch.dtype, band_block_tokens: int) -> str:
    """The kernel's source for one head size, one cut, one type of keys and values, and the band's block size."""
    constants: dict[str, int | str] = {
        "D": size,
        "TILES": shape.tiles,
        "WARPS": shape.warps,
        "RESIDENT": shape.resident,
        "TYPE": nvrtc.TYPES[dtype],
        "STEP": f"{VALUE_STEP}f",
        "BAND_BLOCK": band_block_tokens,
    }
    return nvrtc.source_text(constants, nvrtc.COMMON, _SOURCE)


@cache
def _compiled(
    size: int, shape: Shape, dtype: torch.dtype, band_block_tokens: int, device: torch.device
) -> nvrtc.Kernel:
    text = source(size, shape, dtype, band_block_tokens)
    return nvrtc.compile_kernel(text, "store_cuda", device, _shared_bytes(size, shape), overlaps=True)


def _shared_bytes(size: int, shape: Shape) -> int:
    """The rows as three bf16 terms, and transformed in padded rows of f32."""
    tokens = 16 * shape.tiles
    return tokens * size * 2 * 3 + tokens * (size + 4) * 4
