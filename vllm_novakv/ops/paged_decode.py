"""Attention of one query token per request over its paged history and band, split over the context.

    o = (Σ_band w_j v_j + (Σ_history w_j ŵ_j) R_V^T) / (Σ w_j + e^sink),  w_j = exp(logit_j)

Three launches, whose grids depend on shapes alone:

1. fold and band, (request, KV head, part): part 0 is q R_K^{-T} in fp16 relative to its largest element, and q·k̄, of
   several requests in a large batch; the others are the exact keys, split further where the batch is too small to fill
   the GPU.
2. history, (split, KV head, request): each split reads its share of the request's blocks in tiles and keeps a running
   maximum, the sum of weights and the weighted values of every query head of the KV head. The maximum is taken over
   logit + log₂ s, so that the weights w s that meet the value codes are at most 1 and fit fp16.
3. merge, (requests, KV head): the splits by log-sum-exp, the rotation R_V^T, the band, the learned sink.

Partial results are [request, KV head, part, query head, dim]: the history's splits, then the band's. Where they run,
the CUDA kernels of ops/decode_cuda.py take the place of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_novakv.ops import decode_cuda
from vllm_novakv.ops.checks import check_attention_inputs, heads_per_kv_head
from vllm_novakv.ops.launch import launch_for
from vllm_novakv.ops.tables import PackedHistory
from vllm_novakv.ops.tiles import (
    BLOCK,
    LOG2E,
    MASKED,
    centroid_element,
    load_centroid_words,
    load_indices,
    load_scales,
    load_value_words,
    log2_scale,
    soft_cap,
    split_position,
    tile_tokens,
    unpack_values,
)

MAX_SPLITS = 48
_SPLIT_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, MAX_SPLITS)
MAX_BAND_PARTS = 4
_START_COST = 0.01
"""What a program does once, whatever its share (its codebook, its partial result), in units of its time for a whole
context."""

_RESIDENT = {64: 4, 128: 3, 256: 2}
"""Programs that run on a processor at the same time, by head size."""

_MIN_QUERY_ROWS = 8
_MIN_GROUP_ROWS, _TILE_ROWS = 4, 16


@dataclass(frozen=True, eq=False)
class DecodeWorkspace:
    """Scratch of `paged_decode`, to be allocated before CUDA graphs are captured and shared by all layers.

    Args:
        folded: fp16, queries in the key basis.
        row_scales: f32, two numbers per query row.
        partial_output: f32, weighted values per split.
        partial_weights: f32, maximum and sum per split.
        parts: int32 [max_requests, 8], where the CUDA kernels find the partial results of each request.
    """

    folded: torch.Tensor
    row_scales: torch.Tensor
    partial_output: torch.Tensor
    partial_weights: torch.Tensor
    parts: torch.Tensor

    @classmethod
    def allocate(
        cls, max_requests: int, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
    ) -> DecodeWorkspace:
        """Scratch for batches of up to max_requests, whatever their contexts.

        Args:
            max_requests: largest number of requests in one call.
            num_heads, num_kv_heads, head_size: of the model.
            device: where the caches are.
        """
        rows, group = query_rows(num_heads, num_kv_heads), heads_per_kv_head(num_heads, num_kv_heads)
        num_parts = num_kv_heads * max(
            n * (num_splits(n, num_kv_heads, head_size, device) + num_band_parts(n, num_kv_heads, device))
            for n in range(1, max_requests + 1)
        )
        num_cuda_parts = decode_cuda.num_parts(
            max_requests, num_kv_heads, head_size, decode_cuda.num_ctas(num_kv_heads, device)
        )
        return cls.empty(
            max_requests, num_kv_heads, rows, head_size, max(num_parts * rows, num_cuda_parts * group), device
        )

    @classmethod
    def empty(
        cls, max_requests: int, num_kv_heads: int, rows: int, head_size: int, partial_rows: int, device: torch.device
    ) -> DecodeWorkspace:
        """Scratch for a number of rows of partial results; rows: of a query tile, other arguments as for `allocate`."""
        query_tiles = max_requests * num_kv_heads * rows
        return cls(
            # rows of no query head stay zero
            folded=torch.zeros(query_tiles * head_size, dtype=torch.float16, device=device),
            row_scales=torch.zeros(2 * query_tiles, dtype=torch.float32, device=device),
            partial_output=torch.empty(partial_rows * head_size, dtype=torch.float32, device=device),
            partial_weights=torch.empty(2 * partial_rows, dtype=torch.float32, device=device),
            parts=torch.empty(max_requests, 8, dtype=torch.int32, device=device),
        )

    def check_holds(self, num_requests: int, num_kv_heads: int, rows: int, partial_rows: int) -> None:
        """Raise a ValueError where a batch does not fit; arguments as for `empty`."""
        if (
            self.partial_weights.numel() < 2 * partial_rows
            or self.row_scales.numel() < 2 * num_requests * num_kv_heads * rows
            or self.parts.shape[0] < num_requests
        ):
            raise ValueError(
                f"the workspace is too small for {num_requests} requests; allocate it for the largest batch"
            )


def query_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a query tile: the query heads of a KV head, padded to 8 or 16."""
    return max(_MIN_QUERY_ROWS, triton.next_power_of_2(num_heads // num_kv_heads))


def num_splits(num_requests: int, num_kv_heads: int, head_size: int, device: torch.device) -> int:
    """Parts of each request's context: a function of the batch's shape alone, so that a CUDA graph can hold it.

    The number whose programs take the least time: they run in waves, each as long as a share of the context and the
    programs' start.
    """
    pairs, slots = num_requests * num_kv_heads, _RESIDENT[head_size] * decode_cuda.num_processors(device)
    return min(_SPLIT_CHOICES, key=lambda n: triton.cdiv(pairs * n, slots) * (1 / n + _START_COST))


def num_band_parts(num_requests: int, num_kv_heads: int, device: torch.device) -> int:
    """Parts of each request's band: more than one where the requests alone leave processors idle."""
    return MAX_BAND_PARTS if num_requests * num_kv_heads <= decode_cuda.num_processors(device) else 1


@triton.jit
def _row_of(M: tl.constexpr, REQUESTS: tl.constexpr):
    """Request, among those of a program, and query head of each of M rows; heads are padded to a power of two."""
    i = tl.arange(0, M)
    return i // (M // REQUESTS), i % (M // REQUESTS)


@triton.jit(
    do_not_specialize=["band_table_stride", "num_requests", "num_parts"],
    do_not_specialize_on_alignment=["band_table_ptr", "seq_lens_ptr", "prompt_lens_ptr"],
)
def _fold_band_kernel(
    query_ptr,
    mean_ptr,
    inverse_ptr,
    band_ptr,
    band_table_ptr,
    seq_lens_ptr,
    prompt_lens_ptr,
    folded_ptr,
    row_scales_ptr,
    partial_ptr,
    weights_ptr,
    query_stride_t,
    query_stride_h,
    band_stride_b,
    band_stride_h,
    band_stride_t,
    band_table_stride,
    num_requests,
    num_parts,
    scale,
    cap,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    PROMPT_RECENT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    BAND_PARTS: tl.constexpr,
    REQUESTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = D // 4
    K: tl.constexpr = 32
    h = tl.program_id(1)
    d = tl.arange(0, D)
    k = tl.arange(0, K)

    if tl.program_id(2) == 0:
        # 1. q R_K^{-T} and q·k̄, of several requests where one would not fill a tile
        first_request = tl.program_id(0) * REQUESTS
        if first_request >= num_requests:
            return
        own, head = _row_of(M, REQUESTS)
        request = (first_request + own).to(tl.int64)
        is_query = (head < G) & (request < num_requests)
        is_query &= tl.load(seq_lens_ptr + request, mask=is_query, other=0) > 0
        queries_ptr = query_ptr + (request * query_stride_t + (h * G + head) * query_stride_h)[:, None]
        folded = tl.zeros([M, D], tl.float32)
        offset = tl.zeros([M], tl.float32)
        for first in tl.static_range(0, D, K):
            # [M, K], [K, D]
            elements = tl.load(queries_ptr + (first + k)[None, :], mask=is_query[:, None], other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + h * D + first + k)
            inverse = tl.load(inverse_ptr + h * D * D + (first + k)[:, None] * D + d[None, :])
            folded = tl.dot(elements, inverse, folded, input_precision="tf32x3")
            offset += tl.sum(elements * mean[None, :], 1)
        largest = tl.max(tl.abs(folded), 1)
        largest = tl.where(largest > 0.0, largest, 1.0)
        # planes by element of the group: [4, ROWS, L]; rows of no head keep the zeros of a new workspace
        fold_pair = request * tl.num_programs(1) + h
        place = fold_pair[:, None] * (ROWS * D) + (d % 4)[None, :] * (ROWS * L) + head[:, None] * L + (d // 4)[None, :]
        tl.store(folded_ptr + place, (folded / largest[:, None]).to(tl.float16), mask=is_query[:, None])
        tl.store(row_scales_ptr + fold_pair * 2 * ROWS + head, largest, mask=is_query)
        tl.store(row_scales_ptr + fold_pair * 2 * ROWS + ROWS + head, offset, mask=is_query)
    else:
        r = tl.program_id(0).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + r)
        if seq_len <= 0:
            return
        pair = r * tl.num_programs(1) + h
        g = tl.arange(0, ROWS)
        is_row = g < G
        query_rows_ptr = query_ptr + r * query_stride_t + (h * G + g)[:, None].to(tl.int64) * query_stride_h
        # 2. exact keys: [sink | recent], places past the sequence or listed twice are masked
        q = tl.load(query_rows_ptr + d[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
        window = tl.where(seq_len <= tl.load(prompt_lens_ptr + r), PROMPT_RECENT, RECENT)
        m = tl.full([ROWS], MASKED, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        output = tl.zeros([ROWS, D], tl.float32)
        for first in range((tl.program_id(2) - 1) * N, SINK + window, BAND_PARTS * N):
            i = first + tl.arange(0, N)
            is_sink = i < SINK
            j = tl.where(is_sink, i, seq_len - window + i - SINK)
            is_key = (j < seq_len) & (is_sink | (j >= SINK)) & (i < SINK + window)
            block = tl.load(band_table_ptr + r * band_table_stride + j // BAND_BLOCK, mask=is_key, other=0).to(tl.int64)
            is_key &= block > 0
            # [N, D]
            token_ptr = band_ptr + block * band_stride_b + h * band_stride_h + (j % BAND_BLOCK) * band_stride_t
            key = tl.load(token_ptr[:, None] + d[None, :], mask=is_key[:, None], other=0.0).to(tl.float32)
            value = tl.load(token_ptr[:, None] + D + d[None, :], mask=is_key[:, None], other=0.0).to(tl.float32)
            logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
            if HAS_CAP:
                logits = soft_cap(logits, cap)
            logits = tl.where(is_key[None, :], logits * LOG2E, MASKED)
            new_m = tl.maximum(m, tl.max(logits, 1))
            weights = tl.where(is_key[None, :], tl.exp2(logits - new_m[:, None]), 0.0)
            decay = tl.exp2(m - new_m)
            total = total * decay + tl.sum(weights, 1)
            output = tl.dot(weights, value, output * decay[:, None], input_precision=PRECISION)
            m = new_m
        part = (pair + 1) * num_parts - BAND_PARTS + tl.program_id(2) - 1
        tl.store(weights_ptr + part * 2 * ROWS + g, m)
        tl.store(weights_ptr + part * 2 * ROWS + ROWS + g, total)
        tl.store(partial_ptr + part * ROWS * D + g[:, None] * D + d[None, :], output)


@triton.jit(
    do_not_specialize=["block_table_stride", "band_table_stride", "splits", "num_parts"],
    do_not_specialize_on_alignment=["block_table_ptr", "band_table_ptr", "seq_lens_ptr", "prompt_lens_ptr"],
)
def _history_kernel(
    folded_ptr,
    row_scales_ptr,
    cache_ptr,
    table_ptr,
    block_table_ptr,
    band_table_ptr,
    seq_lens_ptr,
    prompt_lens_ptr,
    partial_ptr,
    weights_ptr,
    cache_stride_b,
    cache_stride_h,
    block_table_stride,
    band_table_stride,
    scale,
    cap,
    splits,
    num_parts,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    PROMPT_RECENT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    split, h, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + r)
    share = tl.cdiv(tl.cdiv(seq_len, splits), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, seq_len)
    pair = r * tl.num_programs(1) + h
    part = pair * num_parts + split
    g = tl.arange(0, ROWS)
    if start >= end:
        # an empty part: weight 0, and its output is never read
        tl.store(weights_ptr + part * 2 * ROWS + g, tl.full([ROWS], MASKED, tl.float32))
        tl.store(weights_ptr + part * 2 * ROWS + ROWS + g, tl.zeros([ROWS], tl.float32))
        return

    L: tl.constexpr = D // 4
    # [L, ROWS] per element of the group
    query_ptr = folded_ptr + pair * ROWS * D + tl.arange(0, L)[:, None] + g[None, :] * L
    q0 = tl.load(query_ptr)
    q1 = tl.load(query_ptr + ROWS * L)
    q2 = tl.load(query_ptr + 2 * ROWS * L)
    q3 = tl.load(query_ptr + 3 * ROWS * L)
    row_scale = tl.load(row_scales_ptr + pair * 2 * ROWS + g) * scale
    row_offset = tl.load(row_scales_ptr + pair * 2 * ROWS + ROWS + g) * scale
    head_table_ptr = table_ptr + h * L * 256
    tokens = tile_tokens(N)
    window = tl.where(seq_len <= tl.load(prompt_lens_ptr + r), PROMPT_RECENT, RECENT)

    m = tl.full([ROWS], MASKED, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out0 = tl.zeros([64, ROWS], tl.float32)
    out1 = tl.zeros([64, ROWS], tl.float32)
    out2 = tl.zeros([64, ROWS], tl.float32)
    out3 = tl.zeros([64, ROWS], tl.float32)
    for tile in range(start, end, N):
        entry, first = split_position(tile)
        block = tl.load(block_table_ptr + r * block_table_stride + entry).to(tl.int64)
        block_ptr = cache_ptr + block * cache_stride_b + h * cache_stride_h
        places = first + tokens
        j = tile + tokens
        is_band = (j < SINK) | (j >= seq_len - window)
        held = tl.load(band_table_ptr + r * band_table_stride + j // BAND_BLOCK, mask=is_band & (j < seq_len), other=0)
        is_key = (j < end) & (held == 0)
        indices = load_indices(block_ptr, places, L)
        rho, s = load_scales(block_ptr, places, j < end, D)

        # [N, ROWS]
        words = tl.trans(load_centroid_words(head_table_ptr, indices, L))
        logits = tl.dot(centroid_element(words, 0, FORMAT), q0)
        logits = tl.dot(centroid_element(words, 1, FORMAT), q1, logits)
        logits = tl.dot(centroid_element(words, 2, FORMAT), q2, logits)
        logits = tl.dot(centroid_element(words, 3, FORMAT), q3, logits)
        logits = logits * rho[:, None] * row_scale[None, :] + row_offset[None, :]
        if HAS_CAP:
            logits = soft_cap(logits, cap)
        logits = tl.where(is_key[:, None], logits * LOG2E, MASKED)
        new_m = tl.maximum(m, tl.max(logits + log2_scale(s)[:, None], 0))
        weights = tl.where(is_key[:, None], tl.exp2(logits - new_m[None, :]), 0.0)
        decay = tl.exp2(m - new_m)
        # [N, ROWS]
        value_weights = (weights * s[:, None]).to(tl.float16)
        total = total * decay + tl.sum(weights, 0)
        # 1.375 taken out tile by tile: a sum that stays small loses nothing to the products' truncation
        offset = 1.375 * tl.sum(value_weights.to(tl.float32), 0)[None, :]
        # [64, N] each
        low, high = unpack_values(load_value_words(block_ptr, first, 0, D, N), N)
        out0 = tl.dot(low, value_weights, out0 * decay[None, :] - offset)
        if D >= 128:
            out1 = tl.dot(high, value_weights, out1 * decay[None, :] - offset)
        if D == 256:
            low, high = unpack_values(load_value_words(block_ptr, first, 1, D, N), N)
            out2 = tl.dot(low, value_weights, out2 * decay[None, :] - offset)
            out3 = tl.dot(high, value_weights, out3 * decay[None, :] - offset)
        m = new_m

    tl.store(weights_ptr + part * 2 * ROWS + g, m)
    tl.store(weights_ptr + part * 2 * ROWS + ROWS + g, total)
    output_ptr = partial_ptr + part * ROWS * D + g[None, :] * D + tl.arange(0, 64)[:, None]
    tl.store(output_ptr, 4.0 * out0)
    if D >= 128:
        tl.store(output_ptr + 64, 4.0 * out1)
    if D == 256:
        tl.store(output_ptr + 128, 4.0 * out2)
        tl.store(output_ptr + 192, 4.0 * out3)


@triton.jit(do_not_specialize=["num_requests", "splits", "num_parts"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_kernel(
    partial_ptr,
    weights_ptr,
    rotation_ptr,
    sinks_ptr,
    seq_lens_ptr,
    output_ptr,
    output_stride_t,
    output_stride_h,
    num_requests,
    splits,
    num_parts,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    G: tl.constexpr,
    REQUESTS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BAND_PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    h = tl.program_id(1)
    CHUNK: tl.constexpr = 8192 // (M * D)
    own, g = _row_of(M, REQUESTS)
    request = (tl.program_id(0) * REQUESTS + own).to(tl.int64)
    d = tl.arange(0, D)
    column = tl.arange(0, COLUMNS)
    is_written = (g < G) & (request < num_requests)
    # a padded row yields zeros
    is_row = is_written & (tl.load(seq_lens_ptr + request, mask=is_written, other=0) > 0)
    pair = request * tl.num_programs(1) + h
    head_ptr = output_ptr + (request * output_stride_t + (h * G + g) * output_stride_h)[:, None]

    # 1. weights of the parts: [M, PARTS]
    part = tl.arange(0, PARTS)
    part_ptr = weights_ptr + (pair[:, None] * num_parts + part[None, :]) * 2 * ROWS + g[:, None]
    is_part = (part < num_parts)[None, :] & is_row[:, None]
    m = tl.load(part_ptr, mask=is_part, other=MASKED)
    total = tl.load(part_ptr + ROWS, mask=is_part, other=0.0)
    top = tl.max(tl.where(total > 0.0, m, MASKED), 1)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h * G + g, mask=is_row, other=MASKED).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    denominator = tl.sum(tl.where(total > 0.0, tl.exp2(m - top[:, None]) * total, 0.0), 1)
    if HAS_SINKS:
        denominator += tl.exp2(sink - top)
    denominator = tl.where(denominator > 0.0, denominator, 1.0)

    # 2. history: [M, D] in the rotated basis
    history = tl.zeros([M, D], tl.float32)
    for first in range(0, splits, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        # [CHUNK, M]
        entry = pair[None, :] * num_parts + chunk[:, None]
        is_full = (chunk < splits)[:, None] & is_row[None, :]
        chunk_ptr = weights_ptr + entry * 2 * ROWS + g[None, :]
        chunk_total = tl.load(chunk_ptr + ROWS, mask=is_full, other=0.0)
        is_full &= chunk_total > 0.0
        weight = tl.where(is_full, tl.exp2(tl.load(chunk_ptr, mask=is_full, other=MASKED) - top[None, :]), 0.0)
        # [CHUNK, M, D]
        values_ptr = partial_ptr + (entry * ROWS + g[None, :])[:, :, None] * D + d[None, None, :]
        values = tl.load(values_ptr, mask=is_full[:, :, None], other=0.0)
        history += tl.sum(values * weight[:, :, None], 0)

    # 3. rotate by R_V^T, add the band
    for first in tl.static_range(0, D, COLUMNS):
        # R_V^T: [D, COLUMNS]
        rotation = tl.load(rotation_ptr + h * D * D + d[:, None] + (first + column)[None, :] * D)
        rotated = tl.dot(history, rotation, input_precision="tf32x3")
        for i in tl.static_range(BAND_PARTS):
            band = pair * num_parts + splits + i
            band_total = tl.load(weights_ptr + band * 2 * ROWS + ROWS + g, mask=is_row, other=0.0)
            is_band = is_row & (band_total > 0.0)
            band_m = tl.load(weights_ptr + band * 2 * ROWS + g, mask=is_band, other=MASKED)
            band_weight = tl.where(is_band, tl.exp2(band_m - top), 0.0)
            exact_ptr = partial_ptr + (band * ROWS + g)[:, None] * D + (first + column)[None, :]
            rotated += tl.load(exact_ptr, mask=is_band[:, None], other=0.0) * band_weight[:, None]
        result = rotated / denominator[:, None]
        tl.store(head_ptr + (first + column)[None, :], result.to(output_ptr.dtype.element_ty), mask=is_written[:, None])


def paged_decode(
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
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    splits: int | None = None,
    use_cuda: bool | None = None,
) -> torch.Tensor:
    """Attention of one query token per request over its cached tokens (module docstring).

    Args:
        query: ``[num_requests, num_heads, head_size]``, fp16, bf16 or f32; the last dimension is contiguous.
        history: the layer's history; its blocks and heads may have any stride.
        band_cache: ``[num_blocks, num_kv_heads, 16, 2 * head_size]`` bf16.
        history_block_table, band_block_table: ``[num_requests, max_blocks]`` int32; band entries of 0 are not held.
        seq_lens: ``[num_requests]`` int32, tokens including the query's own; 0 for a padded row, which yields zeros.
        prompt_lens: ``[num_requests]`` int32, tokens of the prompt; a shorter sequence is still in its prompt.
        scale: factor of the logits.
        sink_tokens: first tokens that are exact.
        recent_tokens, prompt_recent_tokens: exact window of a generated token and of a prompt token.
        logits_soft_cap: c of c·tanh(logit / c); 0 for none.
        sinks: ``[num_heads]`` learned sink logits.
        output: where the result goes, ``[num_requests, num_heads, head_size]`` of any float type; new and f32 if None.
        workspace: scratch, required to outlive a captured CUDA graph; allocated here if None.
        splits: parts of the context, or CTAs of a KV head in the CUDA kernels; chosen from the batch if None.
        use_cuda: whether the kernels are the CUDA instead of the Triton ones; where they run, if None.

    Returns:
        ``output``.

    Raises:
        ValueError: a shape, type, device or stride is not as above.
    """
    num_requests, num_heads, head_size = query.shape
    tables = history.tables
    num_kv_heads = tables.codec.num_kv_heads
    check_attention_inputs(query, history, band_cache, history_block_table, band_block_table, seq_lens, prompt_lens)
    if output is None:
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if num_requests == 0:
        return output
    group = heads_per_kv_head(num_heads, num_kv_heads)
    rows = query_rows(num_heads, num_kv_heads)
    if use_cuda is None:
        use_cuda = decode_cuda.is_supported(query.device, head_size, group, tables.centroid_format)
    if use_cuda:
        ctas = splits or decode_cuda.num_ctas(num_kv_heads, query.device)
        partial_rows = decode_cuda.num_parts(num_requests, num_kv_heads, head_size, ctas) * group
    else:
        splits = splits or num_splits(num_requests, num_kv_heads, head_size, query.device)
        band_parts = num_band_parts(num_requests, num_kv_heads, query.device)
        num_parts = splits + band_parts
        partial_rows = num_requests * num_kv_heads * num_parts * rows
    if workspace is None:
        workspace = DecodeWorkspace.empty(num_requests, num_kv_heads, rows, head_size, partial_rows, query.device)
    workspace.check_holds(num_requests, num_kv_heads, rows, partial_rows)
    if use_cuda:
        decode_cuda.launch_decode(
            query,
            history,
            band_cache,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            scale,
            sink_tokens,
            recent_tokens,
            prompt_recent_tokens,
            logits_soft_cap,
            sinks,
            output,
            workspace,
            ctas,
        )
        return output
    padded_group = max(_MIN_GROUP_ROWS, triton.next_power_of_2(group))
    # where the batch fills the GPU, requests share a program's tile and what it reads of the transforms
    requests = 1 if band_parts > 1 else max(1, _TILE_ROWS // padded_group)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    fold, history_launch, merge = (
        launch_for(kernel, query.device, head_size, rows, num_requests) for kernel in ("fold", "history", "merge")
    )
    _fold_band_kernel[(num_requests, num_kv_heads, 1 + band_parts)](
        query,
        tables.codec.key_mean,
        tables.folding,
        band_cache,
        band_block_table,
        seq_lens,
        prompt_lens,
        workspace.folded,
        workspace.row_scales,
        workspace.partial_output,
        workspace.partial_weights,
        query.stride(0),
        query.stride(1),
        *band_cache.stride()[:3],
        band_block_table.stride(0),
        num_requests,
        num_parts,
        scale,
        logits_soft_cap,
        SINK=sink_tokens,
        RECENT=recent_tokens,
        PROMPT_RECENT=prompt_recent_tokens,
        HAS_CAP=logits_soft_cap > 0,
        G=group,
        ROWS=rows,
        D=head_size,
        BAND_BLOCK=band_cache.shape[2],
        BAND_PARTS=band_parts,
        REQUESTS=requests,
        M=requests * padded_group,
        N=fold.tokens,
        PRECISION="tf32" if is_half else "ieee",
        num_warps=fold.warps,
        num_stages=fold.stages,
    )
    _history_kernel[(splits, num_kv_heads, num_requests)](
        workspace.folded,
        workspace.row_scales,
        history.cache,
        tables.centroid_words,
        history_block_table,
        band_block_table,
        seq_lens,
        prompt_lens,
        workspace.partial_output,
        workspace.partial_weights,
        history.cache.stride(0),
        history.cache.stride(1),
        history_block_table.stride(0),
        band_block_table.stride(0),
        scale,
        logits_soft_cap,
        splits,
        num_parts,
        SINK=sink_tokens,
        RECENT=recent_tokens,
        PROMPT_RECENT=prompt_recent_tokens,
        HAS_CAP=logits_soft_cap > 0,
        FORMAT=tables.centroid_format,
        ROWS=rows,
        D=head_size,
        BAND_BLOCK=band_cache.shape[2],
        N=history_launch.tokens,
        num_warps=history_launch.warps,
        num_stages=history_launch.stages,
    )
    _merge_kernel[(triton.cdiv(num_requests, requests), num_kv_heads)](
        workspace.partial_output,
        workspace.partial_weights,
        tables.codec.value_transform,
        query if sinks is None else sinks,
        seq_lens,
        output,
        output.stride(0),
        output.stride(1),
        num_requests,
        splits,
        num_parts,
        PARTS=triton.next_power_of_2(MAX_SPLITS + MAX_BAND_PARTS),
        HAS_SINKS=sinks is not None,
        G=group,
        REQUESTS=requests,
        M=requests * padded_group,
        ROWS=rows,
        D=head_size,
        BAND_PARTS=band_parts,
        COLUMNS=merge.tokens,
        num_warps=merge.warps,
        num_stages=merge.stages,
    )
    return output
