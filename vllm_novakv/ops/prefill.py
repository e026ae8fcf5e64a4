"""Causal attention of chunks of query tokens over the paged history, the band and the chunk itself.

    o_p = (Σ_exact w_j v_j + (Σ_history w_j ŵ_j) R_V^T) / (Σ w_j + e^sink)

One launch, grid (tile of query rows, KV head). A tile holds some consecutive tokens of one request, all query heads of
the KV head side by side, so that a dequantized key serves them all. Each tile:

1. folds its queries, q R_K^{-T} and q·k̄;
2. visits the history in tiles of keys, dequantized in the kernel; only tiles that hold keys which are exact or in the
   future for some row are masked;
3. rotates what it has by R_V^T and goes on, in the same accumulator, with the exact keys: [sink | window], from the
   band before the chunk and from ``key`` and ``value`` inside it.

Nothing is read from the device by the host: the request of a tile is found in the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_novakv.ops.checks import check_attention_inputs, heads_per_kv_head, require
from vllm_novakv.ops.launch import launch_for
from vllm_novakv.ops.tables import PackedHistory
from vllm_novakv.ops.tiles import (
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


@triton.jit
def _fold_plane(query_ptr, is_row, inverse_ptr, I: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Element I of every group of q R_K^{-T}: f32 [M, L]."""
    L: tl.constexpr = D // 4
    K: tl.constexpr = 32
    k = tl.arange(0, K)
    plane = tl.zeros([M, L], tl.float32)
    for first in range(0, D, K):
        q = tl.load(query_ptr[:, None] + (first + k)[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + (first + k)[:, None] * D + (4 * tl.arange(0, L) + I)[None, :])
        plane = tl.dot(q, inverse, plane, input_precision="tf32x3")
    return plane


@triton.jit
def _rotate_part(o0, o1, o2, o3, rotation_ptr, PART: tl.constexpr, D: tl.constexpr):
    """Dims 64 PART to 64 PART + 63 of o R_V^T: f32 [M, 64]."""
    d = tl.arange(0, 64)
    # R_V^T[i, o] = R_V[o, i]
    column_ptr = rotation_ptr + (PART * 64 + d)[None, :] * D + d[:, None]
    rotated = tl.dot(o0, tl.load(column_ptr), input_precision="tf32x3")
    if D >= 128:
        rotated = tl.dot(o1, tl.load(column_ptr + 64), rotated, input_precision="tf32x3")
    if D == 256:
        rotated = tl.dot(o2, tl.load(column_ptr + 128), rotated, input_precision="tf32x3")
        rotated = tl.dot(o3, tl.load(column_ptr + 192), rotated, input_precision="tf32x3")
    return rotated


@triton.jit
def _history_tile(
    q0,
    q1,
    q2,
    q3,
    row_scale,
    row_offset,
    positions,
    near_start,
    m,
    total,
    o0,
    o1,
    o2,
    o3,
    block_ptr,
    tile,
    first,
    head_table_ptr,
    band_row_ptr,
    context,
    seq_len,
    cap,
    SINK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """One online-softmax step over a tile of history keys."""
    L: tl.constexpr = D // 4
    tokens = tile_tokens(N)
    places = first + tokens
    j = tile + tokens
    rho, s = load_scales(block_ptr, places, j < seq_len, D)
    # [L, N]
    words = load_centroid_words(head_table_ptr, load_indices(block_ptr, places, L), L)
    # [M, N]
    logits = tl.dot(q0, centroid_element(words, 0, FORMAT))
    logits = tl.dot(q1, centroid_element(words, 1, FORMAT), logits)
    logits = tl.dot(q2, centroid_element(words, 2, FORMAT), logits)
    logits = tl.dot(q3, centroid_element(words, 3, FORMAT), logits)
    logits = logits * rho[None, :] * row_scale[:, None] + row_offset[:, None]
    if HAS_CAP:
        logits = soft_cap(logits, cap)
    logits *= LOG2E
    if IS_MASKED:
        in_band = (j < context) & (j < seq_len)
        held = tl.load(band_row_ptr + j // BAND_BLOCK, mask=in_band, other=0) > 0
        is_held = (held | (j >= context))[None, :]
        row = positions[:, None]
        is_exact = ((j < SINK)[None, :] | (j[None, :] > near_start[:, None])) & is_held
        is_key = (j[None, :] <= row) & (is_exact == 0)
        logits = tl.where(is_key, logits, MASKED)
    new_m = tl.maximum(m, tl.max(logits + log2_scale(s)[None, :], 1))
    weights = tl.exp2(logits - new_m[:, None])
    if IS_MASKED:
        weights = tl.where(is_key, weights, 0.0)
    decay = tl.exp2(m - new_m)
    value_weights = (weights * s[None, :]).to(tl.float16)
    total = total * decay + tl.sum(weights, 1)
    # 1.375 taken out tile by tile: a sum that stays small loses nothing to the products' truncation
    offset = 1.375 * tl.sum(value_weights.to(tl.float32), 1)[:, None]
    low, high = unpack_values(load_value_words(block_ptr, first, 0, D, N), N)
    o0 = tl.dot(value_weights, tl.trans(low), o0 * decay[:, None] - offset)
    if D >= 128:
        o1 = tl.dot(value_weights, tl.trans(high), o1 * decay[:, None] - offset)
    if D == 256:
        low, high = unpack_values(load_value_words(block_ptr, first, 1, D, N), N)
        o2 = tl.dot(value_weights, tl.trans(low), o2 * decay[:, None] - offset)
        o3 = tl.dot(value_weights, tl.trans(high), o3 * decay[:, None] - offset)
    return new_m, total, o0, o1, o2, o3


@triton.jit
def _load_exact(band_token_ptr, chunk_token_ptr, first, in_band, in_chunk, TYPE: tl.constexpr):
    """Elements first to first + 63 of exact keys or values: TYPE [N, 64], rounded to the band's type."""
    d = first + tl.arange(0, 64)
    old = tl.load(band_token_ptr[:, None] + d[None, :], mask=in_band[:, None], other=0.0)
    new = tl.load(chunk_token_ptr[:, None] + d[None, :], mask=in_chunk[:, None], other=0.0)
    return tl.where(in_chunk[:, None], new.to(tl.float32).to(old.dtype), old).to(TYPE)


@triton.jit(
    do_not_specialize=["num_requests", "block_table_stride", "band_table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "band_table_ptr",
        "query_start_ptr",
        "seq_lens_ptr",
        "prompt_lens_ptr",
    ],
)
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cache_ptr,
    band_ptr,
    block_table_ptr,
    band_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    prompt_lens_ptr,
    mean_ptr,
    inverse_ptr,
    rotation_ptr,
    table_ptr,
    sinks_ptr,
    output_ptr,
    num_requests,
    scale,
    cap,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    cache_stride_b,
    cache_stride_h,
    band_stride_b,
    band_stride_h,
    band_stride_t,
    block_table_stride,
    band_table_stride,
    output_stride_t,
    output_stride_h,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    PROMPT_RECENT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SKIP_PROMPT: tl.constexpr,
):
    L: tl.constexpr = D // 4
    M: tl.constexpr = TOKENS * G_PADDED
    # late tiles have the longest contexts: begin with them
    tile_number = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    # request i owns the tiles from query_start[i] div TOKENS + i on; find the last i that begins at or before ours
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start_ptr + middle) // TOKENS + middle
        low = tl.where(begins <= tile_number, middle, low)
        high = tl.where(begins <= tile_number, high, middle)
    request = low.to(tl.int64)
    query_start = tl.load(query_start_ptr + request)
    num_tokens = tl.load(query_start_ptr + request + 1) - query_start
    first_token = (tile_number - query_start // TOKENS - low) * TOKENS
    if first_token >= num_tokens:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - num_tokens
    rows = tl.arange(0, M)
    token = first_token + rows // G_PADDED
    g = rows % G_PADDED
    is_row = (token < num_tokens) & (g < G)
    positions = context + tl.minimum(token, num_tokens - 1)
    first_position = context + first_token
    last_position = context + tl.minimum(first_token + TOKENS, num_tokens) - 1
    prompt_len = tl.load(prompt_lens_ptr + request)
    if SKIP_PROMPT:
        if last_position < prompt_len:
            return
        is_row &= context + token >= prompt_len
    # a row's keys after near_start are exact; it grows with the row
    near_start = positions - tl.where(positions < prompt_len, PROMPT_RECENT, RECENT)
    first_near_start = first_position - tl.where(first_position < prompt_len, PROMPT_RECENT, RECENT)
    last_near_start = last_position - tl.where(last_position < prompt_len, PROMPT_RECENT, RECENT)
    head = h * G + g
    row_ptr = query_ptr + (query_start + token).to(tl.int64) * query_stride_t + head * query_stride_h

    # 1. fold
    q0 = _fold_plane(row_ptr, is_row, inverse_ptr + h * D * D, 0, M, D)
    q1 = _fold_plane(row_ptr, is_row, inverse_ptr + h * D * D, 1, M, D)
    q2 = _fold_plane(row_ptr, is_row, inverse_ptr + h * D * D, 2, M, D)
    q3 = _fold_plane(row_ptr, is_row, inverse_ptr + h * D * D, 3, M, D)
    largest = tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1))
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(q2), 1), tl.max(tl.abs(q3), 1)))
    largest = tl.where(largest > 0.0, largest, 1.0)
    q0 = (q0 / largest[:, None]).to(tl.float16)
    q1 = (q1 / largest[:, None]).to(tl.float16)
    q2 = (q2 / largest[:, None]).to(tl.float16)
    q3 = (q3 / largest[:, None]).to(tl.float16)
    row_scale = largest * scale
    row_offset = tl.zeros([M], tl.float32)
    for first in tl.static_range(0, D, 64):
        d = first + tl.arange(0, 64)
        q = tl.load(row_ptr[:, None] + d[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
        row_offset += tl.sum(q * tl.load(mean_ptr + h * D + d)[None, :], 1)
    row_offset *= scale

    m = tl.full([M], MASKED, tl.float32)
    total = tl.zeros([M], tl.float32)
    o0 = tl.zeros([M, 64], tl.float32)
    o1 = tl.zeros([M, 64], tl.float32)
    o2 = tl.zeros([M, 64], tl.float32)
    o3 = tl.zeros([M, 64], tl.float32)

    # 2. history: keys up to the last one that is not exact for some row
    head_cache_ptr = cache_ptr + h * cache_stride_h
    head_table_ptr = table_ptr + h * L * 256
    block_row_ptr = block_table_ptr + request * block_table_stride
    band_row_ptr = band_table_ptr + request * band_table_stride
    history_end = tl.maximum(last_near_start + 1, context)
    open_start = tl.minimum((SINK + N - 1) // N * N, (history_end + N - 1) // N * N)
    open_end = tl.maximum((first_near_start + 1) // N * N, open_start)
    for tile in range(open_start, open_end, N):
        entry, place = split_position(tile)
        block = tl.load(block_row_ptr + entry).to(tl.int64)
        m, total, o0, o1, o2, o3 = _history_tile(
            q0, q1, q2, q3, row_scale, row_offset, positions, near_start, m, total, o0, o1, o2, o3,
            head_cache_ptr + block * cache_stride_b, tile, place, head_table_ptr, band_row_ptr, context, seq_len, cap,
            SINK, HAS_CAP, FORMAT, False, BAND_BLOCK, D, N,
        )  # fmt: skip
    num_head_tiles = open_start // N
    num_masked_tiles = num_head_tiles + tl.maximum(history_end - open_end + N - 1, 0) // N
    for i in range(num_masked_tiles):
        tile = tl.where(i < num_head_tiles, i * N, open_end + (i - num_head_tiles) * N)
        entry, place = split_position(tile)
        block = tl.load(block_row_ptr + entry).to(tl.int64)
        m, total, o0, o1, o2, o3 = _history_tile(
            q0, q1, q2, q3, row_scale, row_offset, positions, near_start, m, total, o0, o1, o2, o3,
            head_cache_ptr + block * cache_stride_b, tile, place, head_table_ptr, band_row_ptr, context, seq_len, cap,
            SINK, HAS_CAP, FORMAT, True, BAND_BLOCK, D, N,
        )  # fmt: skip

    # 3. from value codes to the model's basis
    o0 *= 4.0
    o1 *= 4.0
    o2 *= 4.0
    o3 *= 4.0
    rotation_head_ptr = rotation_ptr + h * D * D
    e0 = _rotate_part(o0, o1, o2, o3, rotation_head_ptr, 0, D)
    e1 = e0
    e2 = e0
    e3 = e0
    if D >= 128:
        e1 = _rotate_part(o0, o1, o2, o3, rotation_head_ptr, 1, D)
    if D == 256:
        e2 = _rotate_part(o0, o1, o2, o3, rotation_head_ptr, 2, D)
        e3 = _rotate_part(o0, o1, o2, o3, rotation_head_ptr, 3, D)

    # 4. exact keys
    num_sink_tiles = (tl.minimum(SINK, last_position + 1) + N - 1) // N
    window_start = tl.maximum(first_near_start + 1, SINK)
    num_tiles = num_sink_tiles + tl.maximum(last_position + 1 - window_start + N - 1, 0) // N
    chunk_key_ptr = key_ptr + query_start.to(tl.int64) * key_stride_t + h * key_stride_h
    chunk_value_ptr = value_ptr + query_start.to(tl.int64) * value_stride_t + h * value_stride_h
    for i in range(num_tiles):
        is_sink = i < num_sink_tiles
        j = tl.where(is_sink, i * N, window_start + (i - num_sink_tiles) * N) + tl.arange(0, N)
        is_listed = (j <= last_position) & (j < tl.where(is_sink, SINK, seq_len))
        in_chunk = is_listed & (j >= context)
        in_band = is_listed & (j < context)
        block = tl.load(band_row_ptr + j // BAND_BLOCK, mask=in_band, other=0).to(tl.int64)
        in_band &= block > 0
        band_token_ptr = band_ptr + block * band_stride_b + h * band_stride_h + (j % BAND_BLOCK) * band_stride_t
        own = (j - context).to(tl.int64)
        logits = tl.zeros([M, N], tl.float32)
        for first in tl.static_range(0, D, 64):
            d = first + tl.arange(0, 64)
            # [M, 64], [N, 64]
            typed = tl.load(row_ptr[:, None] + d[None, :], mask=is_row[:, None], other=0.0).to(TYPE)
            k = _load_exact(band_token_ptr, chunk_key_ptr + own * key_stride_t, first, in_band, in_chunk, TYPE)
            logits = tl.dot(typed, tl.trans(k), logits, input_precision=PRECISION)
        logits *= scale
        if HAS_CAP:
            logits = soft_cap(logits, cap)
        row = positions[:, None]
        is_exact = (j < SINK)[None, :] | (j[None, :] > near_start[:, None])
        is_key = (j[None, :] <= row) & is_exact & (in_band | in_chunk)[None, :]
        logits = tl.where(is_key, logits * LOG2E, MASKED)
        new_m = tl.maximum(m, tl.max(logits, 1))
        weights = tl.where(is_key, tl.exp2(logits - new_m[:, None]), 0.0)
        decay = tl.exp2(m - new_m)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(TYPE)
        own_value_ptr = chunk_value_ptr + own * value_stride_t
        v = _load_exact(band_token_ptr + D, own_value_ptr, 0, in_band, in_chunk, TYPE)
        e0 = tl.dot(weights, v, e0 * decay[:, None], input_precision=PRECISION)
        if D >= 128:
            v = _load_exact(band_token_ptr + D, own_value_ptr, 64, in_band, in_chunk, TYPE)
            e1 = tl.dot(weights, v, e1 * decay[:, None], input_precision=PRECISION)
        if D == 256:
            v = _load_exact(band_token_ptr + D, own_value_ptr, 128, in_band, in_chunk, TYPE)
            e2 = tl.dot(weights, v, e2 * decay[:, None], input_precision=PRECISION)
            v = _load_exact(band_token_ptr + D, own_value_ptr, 192, in_band, in_chunk, TYPE)
            e3 = tl.dot(weights, v, e3 * decay[:, None], input_precision=PRECISION)
        m = new_m

    # 5. the learned sink joins once
    share = tl.full([M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=g < G, other=MASKED).to(tl.float32) * LOG2E
        new_m = tl.maximum(m, sink)
        share = tl.exp2(m - new_m)
        total = total * share + tl.exp2(sink - new_m)
    share /= total
    d = tl.arange(0, 64)
    out_ptr = output_ptr + (query_start + token).to(tl.int64) * output_stride_t + head * output_stride_h
    out_ptr = out_ptr[:, None] + d[None, :]
    element = output_ptr.dtype.element_ty
    tl.store(out_ptr, (e0 * share[:, None]).to(element), mask=is_row[:, None])
    if D >= 128:
        tl.store(out_ptr + 64, (e1 * share[:, None]).to(element), mask=is_row[:, None])
    if D == 256:
        tl.store(out_ptr + 128, (e2 * share[:, None]).to(element), mask=is_row[:, None])
        tl.store(out_ptr + 192, (e3 * share[:, None]).to(element), mask=is_row[:, None])


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    prompt_recent_tokens: int,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    skip_prompt: bool = False,
) -> torch.Tensor:
    """Causal attention of chunks of query tokens; the chunks' own tokens are in the history already.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, fp16, bf16 or f32, the requests' chunks one after the other.
        key, value: ``[num_tokens, num_kv_heads, head_size]``, the chunks' own.
        query_start_loc: ``[num_requests + 1]`` int32, where each chunk begins, in tokens.
        seq_lens: ``[num_requests]`` int32, tokens up to the end of the chunk; it may reach past the prompt.
        output: where the result goes, ``[num_tokens, num_heads, head_size]`` of any float type; new and f32 if None.
        skip_prompt: write the rows of tokens past the prompt only.
        Others as in `vllm_novakv.ops.paged_decode.paged_decode`.

    Returns:
        ``output``.

    Raises:
        ValueError: a shape, type, device or stride is not as above.
    """
    num_tokens, num_heads, head_size = query.shape
    tables = history.tables
    num_kv_heads = tables.codec.num_kv_heads
    check_attention_inputs(query, history, band_cache, history_block_table, band_block_table, seq_lens, prompt_lens)
    for name, tensor in (("key", key), ("value", value)):
        require(
            tuple(tensor.shape) == (num_tokens, num_kv_heads, head_size) and tensor.stride(2) == 1,
            name,
            tensor,
            f"[{num_tokens}, {num_kv_heads}, {head_size}], last dimension contiguous",
        )
    require(
        query_start_loc.dtype == torch.int32 and query_start_loc.shape[0] == seq_lens.shape[0] + 1,
        "query_start_loc",
        query_start_loc,
        f"int32 [{seq_lens.shape[0] + 1}]",
    )
    if output is None:
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    num_requests = seq_lens.shape[0]
    if num_tokens == 0 or num_requests == 0:
        return output
    group = heads_per_kv_head(num_heads, num_kv_heads)
    padded_group = triton.next_power_of_2(group)
    launch = launch_for("prefill", query.device, head_size)
    tokens = max(1, launch.tokens // padded_group)
    # the interpreter, which runs on the CPU, multiplies bf16 as integers
    is_bf16 = query.dtype == torch.bfloat16 and query.device.type == "cuda"
    _prefill_kernel[(triton.cdiv(num_tokens, tokens) + num_requests, num_kv_heads)](
        query,
        key,
        value,
        history.cache,
        band_cache,
        history_block_table,
        band_block_table,
        query_start_loc,
        seq_lens,
        prompt_lens,
        tables.codec.key_mean,
        tables.folding,
        tables.codec.value_transform,
        tables.centroid_words,
        query if sinks is None else sinks,
        output,
        num_requests,
        scale,
        logits_soft_cap,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        history.cache.stride(0),
        history.cache.stride(1),
        *band_cache.stride()[:3],
        history_block_table.stride(0),
        band_block_table.stride(0),
        output.stride(0),
        output.stride(1),
        SINK=sink_tokens,
        RECENT=recent_tokens,
        PROMPT_RECENT=prompt_recent_tokens,
        HAS_CAP=logits_soft_cap > 0,
        HAS_SINKS=sinks is not None,
        FORMAT=tables.centroid_format,
        G=group,
        G_PADDED=padded_group,
        TOKENS=tokens,
        BAND_BLOCK=band_cache.shape[2],
        D=head_size,
        N=launch.keys,
        TYPE=tl.bfloat16 if is_bf16 else tl.float32,
        SKIP_PROMPT=skip_prompt,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return output
