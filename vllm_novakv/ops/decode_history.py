"""History and band of paged decode in CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

Same results as the Triton kernels in ops/paged_decode.py, for up to 8 query heads per KV head on compute capability
8.9 and up, which converts e4m3 in hardware; e5m2 needs no conversion, so 8.0 will do. The codebook lies in shared
memory and both tensor core operands are loaded straight into their fragments, which Triton cannot express; see
ops/decode_history.cu.
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

MAX_REQUESTS = 4096
"""Requests of a batch; where each begins in the line of work is kept in shared memory."""

_SOURCE = Path(__file__).with_suffix(".cu")
_WARPS = {64: 16, 128: 12, 256: 8}
"""Warps of a CTA, one on every multiprocessor, by head size: as many as their registers admit."""

_SLOTS_PER_WARP = 4
_HOPPER_SHARED_BYTES = 227 * 1024


def is_supported(device: torch.device, rows: int, is_e5m2: bool) -> bool:
    """Whether the kernel runs on a device for query tiles of this many rows and centroids of this type."""
    return rows == MAX_ROWS and nvrtc.is_available(device, (8, 0) if is_e5m2 else (8, 9))


def launch_history(
    query: torch.Tensor,
    folded: torch.Tensor,
    row_scales: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_weights: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
    logits_soft_cap: float,
    ctas: int,
    sink_tokens: int,
    recent_tokens: int,
    prompt_recent_tokens: int,
) -> None:
    """Write every segment's and band's maximum, sum and weighted values, and which segments are a request's.

    Args:
        ctas: of a KV head; other arguments as in ops/paged_decode.py.

    Raises:
        ValueError: there are more than MAX_REQUESTS requests.
    """
    codec = history.tables.codec
    size, num_requests = codec.head_size, seq_lens.shape[0]
    if num_requests > MAX_REQUESTS:
        raise ValueError(f"a batch has {num_requests} requests; the decode kernel serves up to {MAX_REQUESTS}")
    kernel = _compiled(
        size,
        history.tables.is_e5m2,
        sink_tokens,
        recent_tokens,
        prompt_recent_tokens,
        band_cache.shape[2],
        logits_soft_cap > 0,
        query.dtype,
        query.shape[1] // codec.num_kv_heads,
        seq_lens.device,
    )
    kernel(
        grid=(ctas, codec.num_kv_heads, 1),
        block=(32 * _WARPS[size], 1, 1),
        args=[
            folded,
            row_scales,
            history.cache,
            history.tables.centroid_words,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            query,
            band_cache,
            partial_output,
            partial_weights,
            parts,
            num_requests,
            # in 16 bytes, so that 32 bits suffice
            history.cache.stride(0) // 16,
            history.cache.stride(1) // 16,
            history_block_table.stride(0),
            band_block_table.stride(0),
            *query.stride()[:2],
            *band_cache.stride()[:3],
            _float_bits(scale),
            _float_bits(logits_soft_cap),
        ],
        shared_mem=_shared_bytes(size, _num_copies(size, seq_lens.device), num_requests),
    )


def source(
    size: int,
    is_e5m2: bool,
    sink: int,
    recent: int,
    prompt_recent: int,
    band_block: int,
    has_cap: bool,
    dtype: torch.dtype,
    group: int,
    copies: int,
) -> str:
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
        "TYPE": nvrtc.TYPES[dtype],
        "GROUP": group,
        "WARPS": _WARPS[size],
        "COPIES": copies,
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
    dtype: torch.dtype,
    group: int,
    device: torch.device,
) -> nvrtc.Kernel:
    copies = _num_copies(size, device)
    text = source(size, is_e5m2, sink, recent, prompt_recent, band_block, has_cap, dtype, group, copies)
    return nvrtc.compile_kernel(text, "decode_history", device, _shared_bytes(size, copies, MAX_REQUESTS))


@cache
def _num_copies(size: int, device: torch.device) -> int:
    """Copies of the codebook, 8 at most: as many as shared memory holds."""
    limit = _HOPPER_SHARED_BYTES
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        limit = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return next(n for n in (8, 4, 2, 1) if _shared_bytes(size, n, MAX_REQUESTS) <= limit)


def _shared_bytes(size: int, copies: int, num_requests: int) -> int:
    """The codebook, the warps' results, and where each request begins; see ops/decode_history.cu."""
    warps = _WARPS[size]
    book = size // 4 * 256 * copies
    results = warps * 16 + warps // _SLOTS_PER_WARP * 8 * (size + 4)
    return 4 * (book + results + num_requests + 1)


def _float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]
