"""PyTorch reference of the three cache operations; the CPU path, and what every kernel is tested against.

Key j of a sequence is *exact* for the query at position p when j < sink or p - window < j <= p, and the band (or,
inside a prefill chunk, the chunk itself) holds it; the window is wider for tokens of the prompt than for generated
ones. Every other key up to p is read from the history:

    logit(p, j) = scale * (q_p · k_j)                                   exact
    logit(p, j) = scale * ((q_p R_K^{-T}) · r̂_j + q_p · k̄)              history, r̂_j = ρ_j ĉ_j
    o_p         = Σ_exact w_j v_j + (Σ_history w_j v̂_j) R_V^T,  w = softmax over all keys (and the learned sink)

Keys are visited in tiles with an online softmax, so memory does not grow with the context; everything is vectorised
over requests and heads. Arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_novakv.codec.layout import BLOCK_TOKENS, record_byte_offsets
from vllm_novakv.codec.quantizer import (
    LayerCodec,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    pack_records,
    unpack_records,
)

TILE_BLOCKS = 4
ROW_TILE = 512


class History(Protocol):
    """Reads one layer's history and knows the basis in which its keys and values come."""

    def fold_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[R, H, M, d]`` → queries in the key basis, same shape, and the offsets q · k̄ ``[R, H, M]``."""

    def read(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks ``[R, n]`` → keys and values ``[R, H, n * 128, d]`` float32 in their bases."""

    def unfold_output(self, output: torch.Tensor) -> torch.Tensor:
        """Weighted values ``[R, H, M, d]`` → the model's basis, same shape."""


@dataclass(frozen=True)
class QuantizedHistory:
    """The packed history of one layer.

    Args:
        cache: ``[num_blocks, num_kv_heads, 128, record_bytes]`` uint8; the last two dimensions are contiguous.
        codec: the layer's fitted tensors.
    """

    cache: torch.Tensor
    codec: LayerCodec

    def fold_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q R_K^{-T} and q · k̄."""
        return query @ self.codec.key_transform_inv_t, torch.einsum("rhmd,hd->rhm", query, self.codec.key_mean)

    def read(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look centroids and value levels up."""
        codec = self.codec
        num_requests, num_blocks = block_ids.shape
        layout = codec.layout
        offsets = record_byte_offsets(layout).to(self.cache.device)
        # [R, n, H, 128 * record_bytes] -> [R * n * 128, H, record_bytes]
        blocks = self.cache.flatten(2)[block_ids]
        records = blocks[..., offsets.flatten()].unflatten(-1, offsets.shape).transpose(2, 3).flatten(0, 2)
        indices, key_scale, codes, value_scale = unpack_records(records, layout)
        # Bytes that no token wrote may name a centroid that a smaller codebook does not have.
        indices = indices.clamp(max=codec.num_centroids - 1)
        keys = decode_keys(indices, key_scale, codec.codebook)
        values = decode_values(codes, value_scale)
        shape = (num_requests, num_blocks * BLOCK_TOKENS, codec.num_kv_heads, codec.head_size)
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def unfold_output(self, output: torch.Tensor) -> torch.Tensor:
        """o R_V^T."""
        return output @ self.codec.value_transform.transpose(1, 2)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    history_cache: torch.Tensor,
    band_cache: torch.Tensor,
    history_slot_mapping: torch.Tensor,
    band_slot_mapping: torch.Tensor,
    codec: LayerCodec,
) -> None:
    """Write tokens to both caches: history record = Q((k - k̄) R_K), Q(v R_V); band = (k, v).

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_size]``, any float type; rows past the slots are padding.
        history_cache: ``[num_blocks, num_kv_heads, 128, record_bytes]`` uint8.
        band_cache: ``[num_blocks, num_kv_heads, 16, 2 * head_size]`` BF16.
        history_slot_mapping, band_slot_mapping: ``[num_slots]`` int64, block * block size + offset; -1 is padding, and
            a slot in block 0 (vLLM's null block) means that this cache does not hold the token.
        codec: the layer's fitted tensors.
    """
    num_slots = history_slot_mapping.shape[0]
    key, value = key[:num_slots], value[:num_slots]
    write_band(key, value, band_cache, band_slot_mapping)

    is_stored = history_slot_mapping >= BLOCK_TOKENS
    slots = history_slot_mapping[is_stored]
    indices, key_scale = encode_keys(key[is_stored], codec)
    codes, value_scale = encode_values(value[is_stored], codec.value_transform)
    records = pack_records(indices, key_scale, codes, value_scale, codec.layout)
    offsets = record_byte_offsets(codec.layout).to(history_cache.device)
    heads = torch.arange(codec.num_kv_heads, device=history_cache.device)
    history_cache.flatten(2)[
        (slots // BLOCK_TOKENS)[:, None, None], heads[None, :, None], offsets[slots % BLOCK_TOKENS][:, None, :]
    ] = records


def write_band(key: torch.Tensor, value: torch.Tensor, band_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values of the tokens that the band holds, rounded to its type; arguments as in `store`."""
    block_tokens = band_cache.shape[2]
    is_held = slot_mapping >= block_tokens
    slots = slot_mapping[is_held]
    band_cache[slots // block_tokens, :, slots % block_tokens] = torch.cat([key[is_held], value[is_held]], -1).to(
        band_cache.dtype
    )


def paged_decode(
    query: torch.Tensor,
    history: History,
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
) -> torch.Tensor:
    """Attention of one query token per request over its cached tokens, its own included (module docstring).

    Args:
        query: ``[num_requests, num_heads, head_size]``, any float type.
        history: the layer's history.
        band_cache: ``[num_blocks, num_kv_heads, 16, 2 * head_size]``.
        history_block_table, band_block_table: ``[num_requests, max_blocks]`` int; band entries of 0 are not held.
        seq_lens: ``[num_requests]`` int, tokens including the query's own.
        prompt_lens: ``[num_requests]`` int, tokens of the prompt; a shorter sequence is still in its prompt.
        scale: factor of the logits.
        sink_tokens: first tokens that are exact.
        recent_tokens, prompt_recent_tokens: window of a generated token and of a prompt token.
        logits_soft_cap: c of c·tanh(logit / c); 0 for none.
        sinks: ``[num_heads]`` learned sink logits, added to the softmax's denominator.

    Returns:
        ``[num_requests, num_heads, head_size]`` float32.
    """
    num_requests, num_heads, head_size = query.shape
    num_kv_heads = band_cache.shape[1]
    positions = (seq_lens.long() - 1)[:, None]
    rows = query.float().view(num_requests, num_kv_heads, -1, 1, head_size)
    band = _BandReader(band_cache, band_block_table.long(), first_chunk_position=None)
    windows = exact_windows(positions, prompt_lens[:, None], recent_tokens, prompt_recent_tokens)
    state = _OnlineSoftmax(rows, positions, windows, sink_tokens, history, scale, logits_soft_cap)
    _attend_history(state, history_block_table, band)

    # Exact keys of every request: [R, sink + window]; a position may be past the sequence or listed twice.
    device = query.device
    sink = torch.arange(sink_tokens, device=device).expand(num_requests, -1)
    num_recent = min(int(windows.max()), int(seq_lens.max()))
    recent = positions - torch.arange(num_recent - 1, -1, -1, device=device)
    key_positions = torch.cat([sink, recent], 1)
    is_listed_once = torch.cat([sink >= 0, recent >= sink_tokens], 1)
    keys, values = band.read(key_positions)
    state.add_exact(keys, values, key_positions, is_listed_once & band.is_held(key_positions))
    return state.finish(sinks).reshape(num_requests, num_heads, head_size)


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    history: History,
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
) -> torch.Tensor:
    """Causal attention of chunks of query tokens; the chunks' own tokens are in the history already.

    Exact keys inside a chunk come from ``key`` and ``value`` (rounded to the band's type, so that the answer does not
    depend on where chunks begin), those before it from the band.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, the requests' chunks one after the other.
        key, value: ``[num_tokens, num_kv_heads, head_size]``, the chunks' own.
        query_start_loc: ``[num_requests + 1]`` int, where each chunk begins, in tokens.
        seq_lens: ``[num_requests]`` int, tokens up to the end of the chunk; it may reach past the prompt.
        Others as in `paged_decode`.

    Returns:
        ``[num_tokens, num_heads, head_size]`` float32.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = band_cache.shape[1]
    output = torch.empty(num_tokens, num_heads, head_size, device=query.device)
    bounds = query_start_loc.tolist()
    for request, (start, end, seq_len) in enumerate(zip(bounds, bounds[1:], seq_lens.tolist(), strict=False)):
        if end == start:
            continue
        context = seq_len - (end - start)
        # [1, H, G, T, d]
        rows = query[start:end].float().view(1, end - start, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
        positions = torch.arange(context, seq_len, device=query.device)[None]
        band = _BandReader(band_cache, band_block_table[request : request + 1].long(), first_chunk_position=context)
        windows = exact_windows(positions, prompt_lens[request], recent_tokens, prompt_recent_tokens)
        state = _OnlineSoftmax(rows, positions, windows, sink_tokens, history, scale, logits_soft_cap)
        _attend_history(state, history_block_table[request : request + 1], band)
        _attend_chunk(state, key[start:end], value[start:end], band, context)
        # [1, H, G, T, d] -> [T, H * G, d]
        output[start:end] = state.finish(sinks)[0].permute(2, 0, 1, 3).flatten(1, 2)
    return output


def exact_windows(
    positions: torch.Tensor, prompt_lens: torch.Tensor, recent_tokens: int, prompt_recent_tokens: int
) -> torch.Tensor:
    """Tokens, its own included, that the query at each position reads exactly: wider inside the prompt."""
    return torch.where(positions < prompt_lens, prompt_recent_tokens, recent_tokens)


def _attend_history(state: _OnlineSoftmax, block_table: torch.Tensor, band: _BandReader) -> None:
    """Visit all history tiles; a key that is exact for a row is masked for that row."""
    num_blocks = (int(state.positions.max()) + BLOCK_TOKENS) // BLOCK_TOKENS
    for first in range(0, num_blocks, TILE_BLOCKS):
        block_ids = block_table[:, first : min(first + TILE_BLOCKS, num_blocks)].long()
        key_positions = torch.arange(
            first * BLOCK_TOKENS, (first + block_ids.shape[1]) * BLOCK_TOKENS, device=block_table.device
        ).expand(block_table.shape[0], -1)
        keys, values = state.history.read(block_ids)
        state.add_history(keys, values, key_positions, band.is_held(key_positions))


def _attend_chunk(
    state: _OnlineSoftmax,
    key: torch.Tensor,
    value: torch.Tensor,
    band: _BandReader,
    context: int,
) -> None:
    """Exact keys of one request's chunk: [sink and window from the band | the chunk], by tiles of rows."""
    device, sink_tokens, widest = key.device, state.sink_tokens, int(state.windows.max())
    before = torch.cat(
        [
            torch.arange(min(sink_tokens, context), device=device),
            torch.arange(min(max(context - widest + 1, sink_tokens), context), context, device=device),
        ]
    )[None]
    band_keys, band_values = band.read(before)
    own_keys = key.to(band.cache.dtype).float().transpose(0, 1)[None]
    own_values = value.to(band.cache.dtype).float().transpose(0, 1)[None]
    own = torch.arange(context, context + key.shape[0], device=device)[None]
    is_held = band.is_held(before)
    for first in range(0, key.shape[0], ROW_TILE):
        rows = slice(first, min(first + ROW_TILE, key.shape[0]))
        window = slice(max(0, first - widest + 1), rows.stop)
        sink = slice(0, min(max(sink_tokens - context, 0), window.start))
        for part in (sink, window):
            positions = own[:, part]
            state.add_exact(
                own_keys[:, :, part],
                own_values[:, :, part],
                positions,
                torch.ones_like(positions, dtype=torch.bool),
                rows,
            )
        state.add_exact(band_keys, band_values, before, is_held, rows)


@dataclass(frozen=True)
class _BandReader:
    """The band of some requests; positions from ``first_chunk_position`` on are held by the chunk itself."""

    cache: torch.Tensor
    block_table: torch.Tensor
    first_chunk_position: int | None

    def _block_ids(self, positions: torch.Tensor) -> torch.Tensor:
        numbers = (positions // self.cache.shape[2]).clamp(0, self.block_table.shape[1] - 1)
        return self.block_table.gather(1, numbers)

    def is_held(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether the band (or the chunk) holds each position ``[R, n]``; the null block's id is 0."""
        held = self._block_ids(positions) > 0
        if self.first_chunk_position is not None:
            held |= positions >= self.first_chunk_position
        return held

    def read(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[R, H, n, d]`` float32 at ``[R, n]``; arbitrary where a position is not held."""
        entries = self.cache[self._block_ids(positions), :, positions % self.cache.shape[2]]
        keys, values = entries.float().transpose(1, 2).chunk(2, dim=-1)
        return keys, values


class _OnlineSoftmax:
    """Running softmax of rows ``[R, H, G, T]`` over tiles of keys, one accumulator per basis."""

    def __init__(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        windows: torch.Tensor,
        sink_tokens: int,
        history: History,
        scale: float,
        logits_soft_cap: float,
    ) -> None:
        self.query = query  # [R, H, G, T, d]
        self.positions = positions  # [R, T]
        self.windows = windows  # [R, T], exact tokens up to each position
        self.sink_tokens = sink_tokens
        self.history = history
        self.scale = scale
        self.logits_soft_cap = logits_soft_cap
        folded, offset = history.fold_query(query.flatten(2, 3))
        self.folded_query = folded.view_as(query)
        self.offset = offset.view(query.shape[:-1])
        self.max = torch.full(query.shape[:-1], -torch.inf, device=query.device)
        self.sum = torch.zeros(query.shape[:-1], device=query.device)
        self.history_output = torch.zeros_like(query)
        self.exact_output = torch.zeros_like(query)

    def add_history(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_positions: torch.Tensor,
        is_held: torch.Tensor,
    ) -> None:
        """Add keys in the history's basis, for the rows to which they are not exact."""
        num_rows = self.positions.shape[1]
        first_key = int(key_positions.min())
        for first in range(0, num_rows, ROW_TILE):
            rows = slice(first, min(first + ROW_TILE, num_rows))
            p, j = self.positions[:, rows, None], key_positions[:, None, :]
            if first_key > int(p.max()):
                continue
            is_exact = self._is_near(key_positions, rows) & is_held[:, None, :]
            self._add(
                self.folded_query[..., rows, :],
                keys,
                values,
                (j <= p) & ~is_exact,
                self.history_output,
                rows,
                self.offset[..., rows],
            )

    def add_exact(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_positions: torch.Tensor,
        is_held: torch.Tensor,
        rows: slice = slice(None),
    ) -> None:
        """Add keys in the model's basis, for the rows to which they are exact."""
        if key_positions.shape[1] == 0:
            return
        p, j = self.positions[:, rows, None], key_positions[:, None, :]
        is_exact = self._is_near(key_positions, rows) & is_held[:, None, :] & (j >= 0)
        self._add(self.query[..., rows, :], keys, values, (j <= p) & is_exact, self.exact_output, rows, None)

    def _is_near(self, key_positions: torch.Tensor, rows: slice) -> torch.Tensor:
        """Whether each key is in the sink or in the row's window: ``[R, T, n]``."""
        j = key_positions[:, None, :]
        return (j < self.sink_tokens) | (j > (self.positions - self.windows)[:, rows, None])

    def _add(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        is_visible: torch.Tensor,
        output: torch.Tensor,
        rows: slice,
        offset: torch.Tensor | None,
    ) -> None:
        if not is_visible.any():
            return
        # [R, H, G, T, n]
        logits = torch.einsum("rhgtd,rhnd->rhgtn", query, keys)
        if offset is not None:
            logits += offset[..., None]
        logits *= self.scale
        if self.logits_soft_cap:
            logits = self.logits_soft_cap * torch.tanh(logits / self.logits_soft_cap)
        logits.masked_fill_(~is_visible[:, None, None], -torch.inf)
        # Bytes that no token wrote may decode to NaN, and 0 · NaN is NaN: clear values that no row sees.
        values = values.masked_fill(~is_visible.any(1)[:, None, :, None], 0.0)

        new_max = torch.maximum(self.max[..., rows], logits.amax(-1))
        safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
        decay = torch.exp(self.max[..., rows] - safe_max)
        weights = torch.exp(logits - safe_max[..., None])
        self.sum[..., rows] = self.sum[..., rows] * decay + weights.sum(-1)
        for accumulator in (self.history_output, self.exact_output):
            accumulator[..., rows, :] *= decay[..., None]
        output[..., rows, :] += torch.einsum("rhgtn,rhnd->rhgtd", weights, values)
        self.max[..., rows] = new_max

    def finish(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """Outputs ``[R, H, G, T, d]`` in the model's basis; the learned sink joins once, here."""
        shape = self.query.shape
        output = self.exact_output + self.history.unfold_output(self.history_output.flatten(2, 3)).view(shape)
        if sinks is not None:
            sink = sinks.float().view(1, shape[1], shape[2], 1)
            new_max = torch.maximum(self.max, sink)
            decay = torch.exp(self.max - new_max)
            self.sum = self.sum * decay + torch.exp(sink - new_max)
            output = output * decay[..., None]
        return output / self.sum[..., None]
