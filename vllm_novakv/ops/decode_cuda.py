"""Paged decode in CUDA C++, compiled at start-up by NVRTC, which ships with PyTorch.

Same result as the Triton kernels of ops/paged_decode.py, for up to 8 query heads per KV head on compute capability 8.9
and up, which converts e4m3 in hardware; e5m2 and int8 need none, so 8.0 will do. At head size 256 a block needs 129 KB
of shared memory, more than 8.9 and 12.0 have. Three launches: ops/decode_fold.cu, ops/decode_attend.cu,
ops/decode_merge.cu; on capability 9.0 and up each may begin before the one ahead of it has ended, the first while the
store of ops/store_cuda.cu is at work. The codebook lies in shared memory and both tensor core operands are loaded
straight into their fragments, which Triton cannot express.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_novakv.ops import nvrtc
from vllm_novakv.ops.checks import check_rows, heads_per_kv_head, require
from vllm_novakv.ops.tables import PackedHistory

if TYPE_CHECKING:
    from vllm_novakv.ops.paged_decode import DecodeWorkspace

MAX_GROUP = 8
"""Query heads per KV head that the kernels serve."""

MAX_REQUESTS = 4096
"""Requests of a batch; where each begins in the line of work is kept in shared memory."""

_FOLDER = Path(__file__).parent
_WARPS = {64: 16, 128: 12, 256: 8}
"""Warps of a CTA, one on every multiprocessor, by head size: as many as their registers admit."""

_E4M3 = 0
_TILE_ROWS = 16
_SLOTS = 4
_SMALL_THREADS = 256


class Constants(NamedTuple):
    """What the kernels are compiled for, besides the device.

    Args:
        head_size, group: of the model; group: query heads per KV head.
        dtype: of queries.
        centroid_format: as in `KernelTables`.
        sink, recent, prompt_recent, band_block: tokens of the band and of one of its blocks.
        has_cap: whether logits have a soft cap.
        sink_dtype: of learned sinks; None where there are none.
        output_dtype: of the result.
        is_small: whether every request has a CTA of its own in the third launch, and a worker takes less of its history
            at a time in the second.
    """

    head_size: int
    group: int
    dtype: torch.dtype
    centroid_format: int
    sink: int
    recent: int
    prompt_recent: int
    band_block: int
    has_cap: bool
    sink_dtype: torch.dtype | None
    output_dtype: torch.dtype
    is_small: bool

    @property
    def requests(self) -> int:
        """Requests of a CTA in the third launch."""
        return 1 if self.is_small else self.tile_requests

    @property
    def tile_requests(self) -> int:
        """Requests whose query heads fill a tensor-core tile."""
        return _TILE_ROWS // self.padded_group

    @property
    def padded_group(self) -> int:
        """Query heads per KV head, at the next power of two."""
        return 1 << (self.group - 1).bit_length()


class _Kernels(NamedTuple):
    fold: nvrtc.Kernel
    attend: nvrtc.Kernel
    merge: nvrtc.Kernel


def is_supported(device: torch.device, head_size: int, group: int, centroid_format: int) -> bool:
    """Whether the kernels run on a device, for a head size, query heads per KV head and centroids of this format."""
    return (
        group <= MAX_GROUP
        and nvrtc.is_available(device, (8, 9) if centroid_format == _E4M3 else (8, 0))
        and _num_copies(head_size, device) > 0
    )


def num_ctas(num_kv_heads: int, device: torch.device) -> int:
    """CTAs for a KV head: one on every multiprocessor."""
    return max(1, num_processors(device) // num_kv_heads)


def num_parts(num_requests: int, num_kv_heads: int, head_size: int, ctas: int) -> int:
    """Partial results of a batch, each of a KV head's query heads."""
    workers = ctas * _WARPS[head_size]
    return num_kv_heads * (2 * (workers + num_requests) + ctas)


def launch_decode(
    query: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    prompt_recent_tokens: int,
    logits_soft_cap: float,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    workspace: DecodeWorkspace,
    ctas: int,
) -> None:
    """Write the result of `vllm_novakv.ops.paged_decode.paged_decode`, whose arguments these are.

    Args:
        seq_lens, prompt_lens, history_block_table, band_block_table: older than the kernel ahead in the stream, and
            than the one ahead of that if it is the store, as the second launch reads them before those have ended.
        ctas: of a KV head.

    Raises:
        ValueError: there are more than MAX_REQUESTS requests, a row does not begin at a multiple of four elements, or a
            token of the band at one of eight.
    """
    codec = history.tables.codec
    num_requests, size, heads = seq_lens.shape[0], codec.head_size, codec.num_kv_heads
    if num_requests > MAX_REQUESTS:
        raise ValueError(f"a batch has {num_requests} requests; the decode kernel serves up to {MAX_REQUESTS}")
    is_aligned = band_cache.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in band_cache.stride()[:3])
    is_band = band_cache.dtype == torch.bfloat16 and is_aligned
    require(is_band, "band_cache", band_cache, "bf16 tokens that begin at multiples of eight elements")
    for name, tensor in (("query", query), ("output", output)):
        require(tensor.stride(-1) == 1, name, tensor, "contiguous rows")
        check_rows(name, tensor, 2)
    constants = Constants(
        head_size=size,
        group=heads_per_kv_head(query.shape[1], heads),
        dtype=query.dtype,
        centroid_format=history.tables.centroid_format,
        sink=sink_tokens,
        recent=recent_tokens,
        prompt_recent=prompt_recent_tokens,
        band_block=band_cache.shape[2],
        has_cap=logits_soft_cap > 0,
        sink_dtype=None if sinks is None else sinks.dtype,
        output_dtype=output.dtype,
        is_small=num_requests * heads <= num_processors(query.device),
    )
    kernels = _compiled(constants, query.device)
    kernels.fold(
        grid=(-(-num_requests // constants.tile_requests), heads, 1),
        block=(_SMALL_THREADS, 1, 1),
        args=[
            query,
            codec.key_mean,
            history.tables.folding_terms,
            workspace.folded,
            workspace.row_scales,
            num_requests,
            *query.stride()[:2],
        ],
        shared_mem=0,
    )
    kernels.attend(
        grid=(ctas, heads, 1),
        block=(32 * _WARPS[size], 1, 1),
        args=[
            workspace.folded,
            workspace.row_scales,
            history.cache,
            history.tables.centroid_words,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            query,
            band_cache,
            workspace.partial_output,
            workspace.partial_weights,
            workspace.parts,
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
        shared_mem=_shared_bytes(size, _num_copies(size, query.device), num_requests),
    )
    kernels.merge(
        grid=(-(-num_requests // constants.requests), heads, 1),
        block=(_SMALL_THREADS, 1, 1),
        args=[
            workspace.partial_output,
            workspace.partial_weights,
            workspace.parts,
            history.tables.rotation_terms,
            query if sinks is None else sinks,
            output,
            num_requests,
            ctas,
            *output.stride()[:2],
        ],
        shared_mem=0,
    )


def source(kernel: str, constants: Constants, copies: int) -> str:
    """The source of one of the kernels fold, attend and merge.

    Args:
        kernel: its name.
        constants: what it is compiled for.
        copies: of the codebook in shared memory.
    """
    macros = {
        "D": constants.head_size,
        "FORMAT": constants.centroid_format,
        "SINK": constants.sink,
        "RECENT": constants.recent,
        "PROMPT_RECENT": constants.prompt_recent,
        "BAND_BLOCK": constants.band_block,
        "HAS_CAP": int(constants.has_cap),
        "HAS_SINKS": int(constants.sink_dtype is not None),
        "SINK_TYPE": nvrtc.TYPES[constants.sink_dtype or torch.float32],
        "TYPE": nvrtc.TYPES[constants.dtype],
        "OUTPUT_TYPE": nvrtc.TYPES[constants.output_dtype],
        "GROUP": constants.group,
        "PADDED": constants.padded_group,
        "REQUESTS": constants.requests,
        "IS_SMALL": int(constants.is_small),
        "WARPS": _WARPS[constants.head_size],
        "CHUNK": 32 if constants.is_small else 64,
        "COPIES": copies,
    }
    return nvrtc.source_text(macros, nvrtc.COMMON, _FOLDER / "decode_common.cuh", _FOLDER / f"decode_{kernel}.cu")


@cache
def _compiled(constants: Constants, device: torch.device) -> _Kernels:
    size = constants.head_size
    copies = _num_copies(size, device)
    shared_bytes = {"attend": _shared_bytes(size, copies, MAX_REQUESTS)}
    return _Kernels(
        *(
            nvrtc.compile_kernel(
                source(name, constants, copies), f"decode_{name}", device, shared_bytes.get(name, 0), overlaps=True
            )
            for name in _Kernels._fields
        )
    )


@cache
def _num_copies(size: int, device: torch.device) -> int:
    """Copies of the codebook, 8 at most: as many as shared memory holds, which may be none."""
    limit = nvrtc.shared_limit(device)
    return next((n for n in (8, 4, 2, 1) if _shared_bytes(size, n, MAX_REQUESTS) <= limit), 0)


def _shared_bytes(size: int, copies: int, num_requests: int) -> int:
    """The codebook, the warps' results, and where each request begins; see ops/decode_attend.cu."""
    warps = _WARPS[size]
    book = size // 4 * 256 * copies
    results = warps * 16 + _SLOTS * 8 * (size + 4)
    return 4 * (book + results + 2 * num_requests + 1)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where it is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]
