"""Prefill on a FlashAttention kernel: dequantize the keys that a chunk reads into bounded scratch, attend, merge.

Every row of a chunk has two sets of keys, and each set is the causal or sliding window of one dense attention:

    near  the window of exact keys before p, p included       sliding window over [band | chunk]
    far   all keys j <= p - window: sink, then history        causal with the last key at p - window

Both sets are written to scratch in the model's basis, k̂ = r̂ R_K^{-1} and v̂ = ŵ R_V^T; far keys leave k̄ out, whose
term q·k̄ is the same for all of a row's far keys and is added to their log-sum-exp. Then

    o = (e^{l_near} o_near + e^{l_far + scale q·k̄} o_far) / (e^{l_near} + e^{l_far + scale q·k̄})

Scratch holds a fixed number of tokens: a batch that reads more is computed in passes, planned on the host once for all
layers. A dequantized key serves all rows of a chunk, so this costs little more than attention over a dense cache.
Rows past the prompt (a preempted request that computes its own output again) have another window; ops/prefill.py
computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from vllm_novakv.ops.checks import require
from vllm_novakv.ops.launch import launch_for
from vllm_novakv.ops.tables import PackedHistory
from vllm_novakv.ops.tiles import (
    centroid_element,
    load_centroid_words,
    load_indices,
    load_scales,
    load_value_words,
    split_position,
    tile_tokens,
    unpack_values,
)

SCRATCH_TOKENS = 32_768


class FlashAttention(Protocol):
    """Attention of ragged batches without a paged cache, as the FlashAttention libraries offer it."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_bounds: torch.Tensor,
        key_bounds: torch.Tensor,
        max_query_len: int,
        max_key_len: int,
        scale: float,
        is_causal: bool,
        window: int | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Write the attention of each sequence's queries over its keys to ``output``.

        Args:
            query, output: ``[num_tokens, num_heads, head_size]``.
            key, value: ``[num_keys, num_kv_heads, head_size]``.
            query_bounds, key_bounds: ``[num_sequences + 1]`` int32, where each sequence begins.
            max_query_len, max_key_len: of the longest sequence.
            scale: factor of the logits.
            is_causal: the last query sees all keys, each one before it one key less; otherwise all see all.
            window: keys that a query sees at most, the latest ones; None for no limit.

        Returns:
            Natural logarithm of each row's sum of weights, ``[num_heads, num_tokens]`` f32; not finite for a row
            without keys, whose output is 0.
        """


@dataclass(frozen=True)
class Piece:
    """Keys ``[start, start + count)`` of one request of the batch."""

    request: int
    start: int
    count: int


@dataclass(frozen=True)
class Pass:
    """One attention call: pieces of consecutive requests.

    Args:
        is_near: whether the keys are the exact window; otherwise sink and history.
        is_causal: whether the mask's edge lies inside the pieces; otherwise every row sees all of them.
        pieces: what is written to scratch, side by side.
        query_lens: rows of each piece's request.
        first_row: where the first request's rows begin in the batch.
    """

    is_near: bool
    is_causal: bool
    pieces: tuple[Piece, ...]
    query_lens: tuple[int, ...]
    first_row: int

    @property
    def num_keys(self) -> int:
        """Tokens of scratch that the pass takes."""
        return sum(piece.count for piece in self.pieces)

    @property
    def rows(self) -> slice:
        """Rows of the batch that the pass attends for."""
        return slice(self.first_row, self.first_row + sum(self.query_lens))


@dataclass(frozen=True)
class PrefillPlan:
    """Passes of one step's batch, with their bounds on the device.

    Args:
        passes: near ones first.
        bounds: per pass int32 ``query_bounds [n + 1], key_bounds [n + 1], key_starts [n]``.
    """

    passes: tuple[Pass, ...]
    bounds: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]


def plan_passes(query_lens: Sequence[int], seq_lens: Sequence[int], window: int, capacity: int) -> tuple[Pass, ...]:
    """Split what a batch reads into passes of at most ``capacity`` keys.

    Args:
        query_lens: rows of each request's chunk.
        seq_lens: tokens of each request up to the end of its chunk.
        window: exact keys of a row, its own included.
        capacity: tokens of scratch; at least the longest chunk and window together.

    Returns:
        The passes; every row is in one near pass and in far passes whose pieces cover its far keys once.

    Raises:
        ValueError: a chunk and its window do not fit.

    Example:
        A chunk of 2 after 8 tokens, window 4: keys 5 to 9 are near; keys 0 to 5 are far, the last for row 9 alone.

        >>> [(p.is_near, p.pieces) for p in plan_passes([2], [10], window=4, capacity=6)]
        [(True, (Piece(request=0, start=5, count=5),)), (False, (Piece(request=0, start=0, count=6),))]
    """
    near, far_edges, far_bodies = [], [], []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 0:
            continue
        near_start = max(0, seq_len - query_len - window + 1)
        near.append(Piece(request, near_start, seq_len - near_start))
        num_far = max(0, seq_len - window)
        # the mask's edge spans the last query_len keys: they stay in one piece
        edge = min(num_far, capacity)
        if edge:
            far_edges.append(Piece(request, num_far - edge, edge))
        far_bodies += [
            Piece(request, start, min(capacity, num_far - edge - start)) for start in range(0, num_far - edge, capacity)
        ]
        if max(near[-1].count, query_len) > capacity:
            raise ValueError(f"a chunk of {query_len} tokens and a window of {window} do not fit {capacity} tokens")
    first_rows = [0]
    for query_len in query_lens:
        first_rows.append(first_rows[-1] + query_len)

    def make(is_near: bool, is_causal: bool, pieces: list[Piece]) -> Pass:
        members = tuple(query_lens[piece.request] for piece in pieces)
        return Pass(is_near, is_causal, tuple(pieces), members, first_rows[pieces[0].request])

    passes = [make(True, True, pieces) for pieces in _pack(near, capacity)]
    passes += [make(False, True, pieces) for pieces in _pack(far_edges, capacity)]
    passes += [make(False, False, [piece]) for piece in far_bodies]
    return tuple(passes)


def _pack(pieces: list[Piece], capacity: int) -> list[list[Piece]]:
    """Groups of pieces of consecutive requests that fit side by side."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        is_next = bool(groups) and groups[-1][-1].request + 1 == piece.request
        if not is_next or piece.count > room:
            groups.append([])
            room = capacity
        groups[-1].append(piece)
        room -= piece.count
    return groups


def make_plan(
    query_lens: Sequence[int], seq_lens: Sequence[int], window: int, capacity: int, device: torch.device
) -> PrefillPlan:
    """`plan_passes`, with the bounds on the device in one copy; arguments and errors as there."""
    passes = plan_passes(query_lens, seq_lens, window, capacity)
    numbers: list[int] = []
    for part in passes:
        for counts in (part.query_lens, tuple(piece.count for piece in part.pieces)):
            numbers.append(0)
            for count in counts:
                numbers.append(numbers[-1] + count)
        numbers += [piece.start for piece in part.pieces]
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    rest = host.to(device, non_blocking=True)
    bounds = []
    for part in passes:
        n = len(part.pieces)
        query_bounds, key_bounds, key_starts, rest = rest.split([n + 1, n + 1, n, rest.numel() - 3 * n - 2])
        bounds.append((query_bounds, key_bounds, key_starts))
    return PrefillPlan(passes, tuple(bounds))


@dataclass(frozen=True, eq=False)
class PrefillWorkspace:
    """Scratch of `flash_prefill`, allocated once and shared by all layers.

    Args:
        key, value: ``[capacity, num_kv_heads, head_size]`` of the model's type.
        partial_output: ``[max_tokens, num_heads, head_size]`` of the model's type.
        log_sums: ``[num_heads, max_tokens]`` f32.
    """

    key: torch.Tensor
    value: torch.Tensor
    partial_output: torch.Tensor
    log_sums: torch.Tensor

    @property
    def capacity(self) -> int:
        """Tokens of key and value scratch."""
        return self.key.shape[0]

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        window: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefillWorkspace:
        """Scratch for batches of up to max_tokens rows, whatever their contexts.

        Args:
            max_tokens: most rows in a step.
            window: exact keys of a row.
            num_heads, num_kv_heads, head_size: of the model.
            dtype: the model's type.
            device: where the caches are.
        """
        capacity = scratch_tokens(max_tokens, window)
        return cls(
            key=torch.empty(capacity, num_kv_heads, head_size, dtype=dtype, device=device),
            value=torch.empty(capacity, num_kv_heads, head_size, dtype=dtype, device=device),
            partial_output=torch.empty(max_tokens, num_heads, head_size, dtype=dtype, device=device),
            log_sums=torch.empty(num_heads, max_tokens, dtype=torch.float32, device=device),
        )


def is_planned(dtype: torch.dtype, window: int) -> bool:
    """Whether batches of a model of this type are computed here: 16 bits, and an exact window that fits the scratch."""
    return dtype in (torch.float16, torch.bfloat16) and window <= SCRATCH_TOKENS


def scratch_tokens(max_tokens: int, window: int) -> int:
    """Capacity of the scratch: more than one chunk and its window, so that most batches take one pass."""
    return max(SCRATCH_TOKENS, max_tokens + window)


@triton.jit
def _exact_rows(band_token_ptr, own_ptr, mean_ptr, in_band, in_chunk, first, IS_NEAR: tl.constexpr, W: tl.constexpr):
    """W elements of exact rows, rounded to the band's type; far keys without their mean: f32 [N, W]."""
    d = first + tl.arange(0, W)
    old = tl.load(band_token_ptr[:, None] + d[None, :], mask=in_band[:, None], other=0.0)
    new = tl.load(own_ptr[:, None] + d[None, :], mask=in_chunk[:, None], other=0.0)
    exact = tl.where(in_chunk[:, None], new.to(tl.float32).to(old.dtype), old).to(tl.float32)
    if not IS_NEAR:
        exact -= tl.load(mean_ptr + d)[None, :]
    return exact


@triton.jit(
    do_not_specialize=["first_request", "num_pieces", "block_table_stride", "band_table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr", "band_table_ptr", "query_start_ptr", "seq_lens_ptr", "key_bounds_ptr", "key_starts_ptr",
    ],
)  # fmt: skip
def _gather_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    band_ptr,
    block_table_ptr,
    band_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    key_bounds_ptr,
    key_starts_ptr,
    mean_ptr,
    inverse_ptr,
    rotation_ptr,
    table_ptr,
    key_out_ptr,
    value_out_ptr,
    first_request,
    num_pieces,
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
    out_stride_t,
    out_stride_h,
    IS_NEAR: tl.constexpr,
    SINK: tl.constexpr,
    FORMAT: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    L: tl.constexpr = D // 4
    W: tl.constexpr = 64
    tile_number = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    # piece i owns the tiles from key_bounds[i] div N + 2 i on: its keys may begin and end inside a tile
    low = 0
    high = num_pieces
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(key_bounds_ptr + middle) // N + 2 * middle
        low = tl.where(begins <= tile_number, middle, low)
        high = tl.where(begins <= tile_number, high, middle)
    bound = tl.load(key_bounds_ptr + low)
    start = tl.load(key_starts_ptr + low)
    end = start + tl.load(key_bounds_ptr + low + 1) - bound
    tile = (start // N + tile_number - bound // N - 2 * low) * N
    if tile >= end:
        return
    request = (first_request + low).to(tl.int64)
    query_start = tl.load(query_start_ptr + request)
    context = tl.load(seq_lens_ptr + request) - (tl.load(query_start_ptr + request + 1) - query_start)

    j = tile + tile_tokens(N)
    is_wanted = (j >= start) & (j < end)
    if IS_NEAR:
        is_exact = is_wanted
    else:
        is_exact = is_wanted & (j < SINK)
    in_chunk = is_exact & (j >= context)
    in_band = is_exact & (j < context)
    band_row_ptr = band_table_ptr + request * band_table_stride
    band_block = tl.load(band_row_ptr + j // BAND_BLOCK, mask=in_band, other=0).to(tl.int64)
    in_band &= band_block > 0
    is_exact = in_band | in_chunk
    place = (bound + j - start).to(tl.int64)
    key_place_ptr = key_out_ptr + place * out_stride_t + h * out_stride_h
    value_place_ptr = value_out_ptr + place * out_stride_t + h * out_stride_h
    element = key_out_ptr.dtype.element_ty
    d = tl.arange(0, D)

    is_history = is_wanted & (is_exact == 0)
    if tl.max(is_history.to(tl.int32), 0) > 0:
        entry, first = split_position(tile)
        block = tl.load(block_table_ptr + request * block_table_stride + entry).to(tl.int64)
        block_ptr = cache_ptr + block * cache_stride_b + h * cache_stride_h
        places = first + tile_tokens(N)
        rho, s = load_scales(block_ptr, places, is_history, D)
        # k̂ = Σ_i (elements i of all groups) (rows i, i + 4, … of R_K^{-1}); R_K^{-1}[a, b] = R_K^{-T}[b, a]
        words = load_centroid_words(table_ptr + h * L * 256, load_indices(block_ptr, places, L), L)
        inverse_row_ptr = inverse_ptr + h * D * D + 4 * tl.arange(0, L)[:, None] + d[None, :] * D
        key = tl.zeros([N, D], tl.float32)
        for i in tl.static_range(4):
            plane = tl.trans(centroid_element(words, i, FORMAT)).to(tl.float32)
            key = tl.dot(plane, tl.load(inverse_row_ptr + i), key, input_precision="tf32x3")
        key *= rho[:, None]
        if IS_NEAR:
            key += tl.load(mean_ptr + h * D + d)[None, :]
        tl.store(key_place_ptr[:, None] + d[None, :], key.to(element), mask=is_history[:, None])
        # v̂ = s Σ (4 (1 + code/4) − 5.5) R_V^T; R_V^T[a, b] = R_V[b, a]
        rotation_row_ptr = rotation_ptr + h * D * D + tl.arange(0, W)[:, None] + d[None, :] * D
        low_codes, high_codes = unpack_values(load_value_words(block_ptr, first, 0, D, N), N)
        level = tl.trans(low_codes).to(tl.float32) * 4.0 - 5.5
        value = tl.dot(level, tl.load(rotation_row_ptr), input_precision="tf32x3")
        if D >= 128:
            level = tl.trans(high_codes).to(tl.float32) * 4.0 - 5.5
            value = tl.dot(level, tl.load(rotation_row_ptr + W), value, input_precision="tf32x3")
        if D == 256:
            low_codes, high_codes = unpack_values(load_value_words(block_ptr, first, 1, D, N), N)
            level = tl.trans(low_codes).to(tl.float32) * 4.0 - 5.5
            value = tl.dot(level, tl.load(rotation_row_ptr + 2 * W), value, input_precision="tf32x3")
            level = tl.trans(high_codes).to(tl.float32) * 4.0 - 5.5
            value = tl.dot(level, tl.load(rotation_row_ptr + 3 * W), value, input_precision="tf32x3")
        value *= s[:, None]
        tl.store(value_place_ptr[:, None] + d[None, :], value.to(element), mask=is_history[:, None])

    if tl.max(is_exact.to(tl.int32), 0) > 0:
        band_token_ptr = band_ptr + band_block * band_stride_b + h * band_stride_h + (j % BAND_BLOCK) * band_stride_t
        own = (query_start + j - context).to(tl.int64)
        own_key_ptr = key_ptr + own * key_stride_t + h * key_stride_h
        own_value_ptr = value_ptr + own * value_stride_t + h * value_stride_h
        for part in tl.static_range(0, D, W):
            columns = part + tl.arange(0, W)
            key = _exact_rows(band_token_ptr, own_key_ptr, mean_ptr + h * D, in_band, in_chunk, part, IS_NEAR, W)
            tl.store(key_place_ptr[:, None] + columns[None, :], key.to(element), mask=is_exact[:, None])
            value = _exact_rows(band_token_ptr + D, own_value_ptr, mean_ptr, in_band, in_chunk, part, True, W)
            tl.store(value_place_ptr[:, None] + columns[None, :], value.to(element), mask=is_exact[:, None])


@triton.jit(
    do_not_specialize=["num_rows", "log_sum_stride", "part_log_sum_stride"],
    do_not_specialize_on_alignment=["log_sum_ptr", "part_log_sum_ptr"],
)
def _merge_kernel(
    output_ptr,
    log_sum_ptr,
    part_ptr,
    part_log_sum_ptr,
    query_ptr,
    mean_ptr,
    sinks_ptr,
    num_rows,
    scale,
    output_stride_t,
    output_stride_h,
    log_sum_stride,
    part_stride_t,
    part_stride_h,
    part_log_sum_stride,
    query_stride_t,
    query_stride_h,
    HAS_PART: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """Add a far pass to the rows' outputs, or the learned sinks, at the log-sum-exp that each has."""
    token = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    is_row = token < num_rows
    d = tl.arange(0, D)
    ours = tl.load(log_sum_ptr + head * log_sum_stride + token, mask=is_row, other=0.0)
    out_ptr = output_ptr + (token * output_stride_t + head * output_stride_h)[:, None] + d[None, :]
    output = tl.load(out_ptr, mask=is_row[:, None], other=0.0).to(tl.float32)
    if HAS_PART:
        query = tl.load(
            query_ptr + (token * query_stride_t + head * query_stride_h)[:, None] + d[None, :],
            mask=is_row[:, None],
            other=0.0,
        ).to(tl.float32)
        theirs = tl.load(part_log_sum_ptr + head * part_log_sum_stride + token, mask=is_row, other=0.0)
        has_keys = tl.abs(theirs) < float("inf")
        theirs += scale * tl.sum(query * tl.load(mean_ptr + head // G * D + d)[None, :], 1)
        theirs = tl.where(has_keys, theirs, -float("inf"))
        part = tl.load(
            part_ptr + (token * part_stride_t + head * part_stride_h)[:, None] + d[None, :],
            mask=is_row[:, None],
            other=0.0,
        ).to(tl.float32)
        part = tl.where(has_keys[:, None], part, 0.0)
    else:
        theirs = tl.zeros([M], tl.float32) - float("inf")
        part = tl.zeros([M, D], tl.float32)
    if HAS_SINKS:
        theirs = tl.zeros([M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
    top = tl.maximum(ours, theirs)
    our_weight = tl.exp(ours - top)
    their_weight = tl.exp(theirs - top)
    total = our_weight + their_weight
    output = (output * our_weight[:, None] + part * their_weight[:, None]) / total[:, None]
    tl.store(out_ptr, output.to(output_ptr.dtype.element_ty), mask=is_row[:, None])
    tl.store(log_sum_ptr + head * log_sum_stride + token, top + tl.log(total), mask=is_row)


def flash_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sink_tokens: int,
    window: int,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    plan: PrefillPlan,
    workspace: PrefillWorkspace,
    attend: FlashAttention,
) -> None:
    """Causal attention of chunks of prompt tokens, as in `vllm_novakv.ops.prefill.prefill`, for fp16 and bf16 models.

    Args:
        query, key, value, output: ``[num_tokens, heads, head_size]`` fp16 or bf16; ``output`` is contiguous.
        window: exact keys of a row, its own included.
        sinks: ``[num_heads]`` learned sink logits, or None.
        plan: of this batch, made for this window and at most the workspace's capacity.
        workspace: scratch.
        attend: the attention kernel.
        Others as there.

    Raises:
        ValueError: a tensor is not as above.
    """
    for name, tensor in (("query", query), ("output", output)):
        require(tensor.dtype == workspace.key.dtype, name, tensor, f"{workspace.key.dtype}, as the workspace")
    require(output.is_contiguous(), "output", output, "a contiguous tensor")
    for part, (query_bounds, key_bounds, key_starts) in zip(plan.passes, plan.bounds, strict=True):
        _gather(
            part, key_bounds, key_starts, key, value, history, band_cache, history_block_table, band_block_table,
            query_start_loc, seq_lens, sink_tokens, workspace,
        )  # fmt: skip
        rows = part.rows
        target = output[rows] if part.is_near else workspace.partial_output[rows]
        log_sums = attend(
            query[rows],
            workspace.key[: part.num_keys],
            workspace.value[: part.num_keys],
            query_bounds,
            key_bounds,
            max(part.query_lens),
            max(piece.count for piece in part.pieces),
            scale,
            part.is_causal,
            window if part.is_near else None,
            target,
        )
        if part.is_near:
            workspace.log_sums[:, rows] = log_sums
        else:
            _merge(output[rows], workspace.log_sums[:, rows], target, log_sums, query[rows], history, scale)
    if sinks is not None:
        log_sums = workspace.log_sums[:, : query.shape[0]]
        _merge(output, log_sums, None, None, query, history, scale, sinks)


def _gather(
    part: Pass,
    key_bounds: torch.Tensor,
    key_starts: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sink_tokens: int,
    workspace: PrefillWorkspace,
) -> None:
    """Write a pass's keys and values to scratch."""
    tables = history.tables
    num_pieces = len(part.pieces)
    launch = launch_for("gather", workspace.key.device, tables.codec.head_size)
    _gather_kernel[(part.num_keys // launch.tokens + 2 * num_pieces, tables.codec.num_kv_heads)](
        key,
        value,
        history.cache,
        band_cache,
        history_block_table,
        band_block_table,
        query_start_loc,
        seq_lens,
        key_bounds,
        key_starts,
        tables.codec.key_mean,
        tables.folding,
        tables.codec.value_transform,
        tables.centroid_words,
        workspace.key,
        workspace.value,
        part.pieces[0].request,
        num_pieces,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        history.cache.stride(0),
        history.cache.stride(1),
        *band_cache.stride()[:3],
        history_block_table.stride(0),
        band_block_table.stride(0),
        workspace.key.stride(0),
        workspace.key.stride(1),
        IS_NEAR=part.is_near,
        SINK=sink_tokens,
        FORMAT=tables.centroid_format,
        BAND_BLOCK=band_cache.shape[2],
        D=tables.codec.head_size,
        N=launch.tokens,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def _merge(
    output: torch.Tensor,
    log_sums: torch.Tensor,
    part: torch.Tensor | None,
    part_log_sums: torch.Tensor | None,
    query: torch.Tensor,
    history: PackedHistory,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge a far pass, or learned sinks, into output and log-sum-exp."""
    num_rows, num_heads, head_size = output.shape
    codec = history.tables.codec
    other = output if part is None else part
    other_log_sums = log_sums if part_log_sums is None else part_log_sums
    launch = launch_for("merge_pass", output.device, head_size)
    _merge_kernel[(triton.cdiv(num_rows, launch.tokens), num_heads)](
        output,
        log_sums,
        other,
        other_log_sums,
        query,
        codec.key_mean,
        output if sinks is None else sinks,
        num_rows,
        scale,
        output.stride(0),
        output.stride(1),
        log_sums.stride(0),
        other.stride(0),
        other.stride(1),
        other_log_sums.stride(0),
        query.stride(0),
        query.stride(1),
        HAS_PART=part is not None,
        HAS_SINKS=sinks is not None,
        G=num_heads // codec.num_kv_heads,
        D=head_size,
        M=launch.tokens,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
