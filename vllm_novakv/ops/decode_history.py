"""The history launch of paged decode in CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

Same inputs, outputs and formula as the Triton kernel in ops/paged_decode.py, for up to 8 query heads per KV head on
compute capability 8.9 and up (it converts 8-bit floats in hardware). The codebook lies in shared memory and both tensor
core operands are loaded straight into their fragments, which Triton cannot express; see ops/decode_history.cu.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import torch

from vllm_novakv.ops import nvrtc
from vllm_novakv.ops.tables import PackedHistory

MAX_ROWS = 8
"""Query heads per KV head that the kernel serves."""

RESIDENT = {64: 4, 128: 3, 256: 2}
"""Blocks that run on a multiprocessor at the same time, by head size: as many as their registers admit."""

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS = 128


def is_supported(device: torch.device, rows: int) -> bool:
    """Whether the kernel runs on a device for query tiles of this many rows."""
    return rows == MAX_ROWS and nvrtc.is_available(device, (8, 9))


def launch_history(
    folded: torch.Tensor,
    row_scales: torch.Tensor,
    history: PackedHistory,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_weights: torch.Tensor,
    scale: float,
    logits_soft_cap: float,
    splits: int,
    num_parts: int,
    sink_tokens: int,
    recent_tokens: int,
    prompt_recent_tokens: int,
    band_block_tokens: int,
) -> None:
    """Write every split's maximum, sum and weighted values; arguments as in ops/paged_decode.py."""
    codec = history.tables.codec
    size = codec.head_size
    kernel = _compiled(
        size,
        history.tables.is_e5m2,
        sink_tokens,
        recent_tokens,
        prompt_recent_tokens,
        band_block_tokens,
        logits_soft_cap > 0,
        seq_lens.device,
    )
    kernel(
        grid=(splits, codec.num_kv_heads, seq_lens.shape[0]),
        block=(_THREADS, 1, 1),
        args=[
            folded,
            row_scales,
            history.cache,
            history.tables.centroid_words,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            partial_output,
            partial_weights,
            # in 16 bytes, so that 32 bits suffice
            history.cache.stride(0) // 16,
            history.cache.stride(1) // 16,
            history_block_table.stride(0),
            band_block_table.stride(0),
            num_parts,
            _float_bits(scale),
            _float_bits(logits_soft_cap),
        ],
        shared_mem=_shared_bytes(size),
    )


def source(size: int, is_e5m2: bool, sink: int, recent: int, prompt_recent: int, band_block: int, has_cap: bool) -> str:
    """The kernel's source for one set of constants."""
    constants = {
        "D": size,
        "E5M2": int(is_e5m2),
        "SINK": sink,
        "RECENT": recent,
        "PROMPT_RECENT": prompt_recent,
        "BAND_BLOCK": band_block,
        "ROWS": MAX_ROWS,
        "HAS_CAP": int(has_cap),
        "RESIDENT": RESIDENT[size],
    }
    return nvrtc.source_text(constants, _SOURCE)


@cache
def _compiled(
    size: int,
    is_e5m2: bool,
    sink: int,
    recent: int,
    prompt_recent: int,
    band_block: int,
    has_cap: bool,
    device: torch.device,
) -> nvrtc.Kernel:
    text = source(size, is_e5m2, sink, recent, prompt_recent, band_block, has_cap)
    return nvrtc.compile_kernel(text, "decode_history", device, _shared_bytes(size))


def _shared_bytes(size: int) -> int:
    return size // 4 * 256 * 4


def _float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]
