"""The reference operations against a plain float64 computation that knows nothing of pages, tiles or online softmax."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from codec_samples import sample_codec, sample_keys, sample_values

from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.codec.quantizer import LayerCodec, decode_keys, decode_values, encode_keys, encode_values
from vllm_novakv.ops.exact import ExactHistory, store_exact
from vllm_novakv.ops.reference import QuantizedHistory, paged_decode, prefill, store

BAND_BLOCK = 16
SINK, RECENT, PROMPT_RECENT = 32, 64, 112
TOLERANCE = 2e-5


@dataclass
class Sequence:
    """One request: all its keys and values, how many tokens its prompt has, and where its blocks are."""

    key: torch.Tensor
    value: torch.Tensor
    prompt_len: int
    history_blocks: torch.Tensor
    band_blocks: torch.Tensor

    @property
    def length(self) -> int:
        return self.key.shape[0]

    def window(self, position: int) -> int:
        return PROMPT_RECENT if position < self.prompt_len else RECENT

    def slots(self, start: int, blocks: torch.Tensor, block_tokens: int) -> torch.Tensor:
        positions = torch.arange(start, self.length)
        return blocks[positions // block_tokens].long() * block_tokens + positions % block_tokens


@dataclass
class Batch:
    """Requests in paged caches whose unwritten bytes are poison (0xFF is NaN in every float type used)."""

    codec: LayerCodec
    sequences: list[Sequence]
    history_cache: torch.Tensor
    band_cache: torch.Tensor

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.nn.utils.rnn.pad_sequence([s.history_blocks for s in self.sequences], batch_first=True),
            torch.nn.utils.rnn.pad_sequence([s.band_blocks for s in self.sequences], batch_first=True),
        )

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.tensor([s.length for s in self.sequences], dtype=torch.int32),
            torch.tensor([s.prompt_len for s in self.sequences], dtype=torch.int32),
        )


def make_batch(
    lengths: list[int],
    head_size: int = 64,
    num_kv_heads: int = 2,
    chunk_start: list[int] | None = None,
    missing: tuple[int, ...] = (),
    is_padded: bool = False,
    prompt_lens: list[int] | None = None,
) -> Batch:
    """Store sequences of the given lengths; the band holds sink and window, but no block in `missing`.

    By default a chunk is all prompt, and a single query the first generated token.
    """
    codec = sample_codec(num_heads=num_kv_heads, head_size=head_size, num_centroids=64)
    record = codec.layout.record_bytes
    num_history = sum(-(-n // BLOCK_TOKENS) for n in lengths) + 1
    num_band = sum(-(-n // BAND_BLOCK) for n in lengths) + 1
    order = torch.randperm(num_history - 1, generator=torch.Generator().manual_seed(1)) + 1
    band_order = torch.randperm(num_band - 1, generator=torch.Generator().manual_seed(2)) + 1
    history_pad, band_pad = (160, 96) if is_padded else (0, 0)
    history_page, band_page = (num_kv_heads * BLOCK_TOKENS * record, num_kv_heads * BAND_BLOCK * head_size * 4)
    raw = torch.full((num_history * (history_page + history_pad),), 0xFF, dtype=torch.uint8)
    history_cache = raw.as_strided(
        (num_history, num_kv_heads, BLOCK_TOKENS, record),
        (history_page + history_pad, BLOCK_TOKENS * record, record, 1),
    )
    raw = torch.full((num_band * (band_page + band_pad),), 0xFF, dtype=torch.uint8)
    band_cache = raw.as_strided(
        (num_band, num_kv_heads, BAND_BLOCK, head_size * 4),
        (band_page + band_pad, BAND_BLOCK * head_size * 4, head_size * 4, 1),
    ).view(torch.bfloat16)
    sequences = []
    for i, length in enumerate(lengths):
        num_blocks, num_band_blocks = -(-length // BLOCK_TOKENS), -(-length // BAND_BLOCK)
        history_blocks, order = order[:num_blocks], order[num_blocks:]
        band_blocks, band_order = band_order[:num_band_blocks].clone(), band_order[num_band_blocks:]
        prompt_len = prompt_lens[i] if prompt_lens else length if chunk_start else length - 1
        keys, values = sample_keys(codec, length, seed=10 + i), sample_values(codec, length, seed=50 + i)
        sequence = Sequence(keys, values, prompt_len, history_blocks.int(), band_blocks.int())
        first_query = chunk_start[i] if chunk_start else length - 1
        first_read = first_query - sequence.window(first_query) + 1
        for block in range(num_band_blocks):
            is_hole = block * BAND_BLOCK >= SINK and (block + 1) * BAND_BLOCK <= first_read
            if is_hole or block in missing:
                sequence.band_blocks[block] = 0
        sequences.append(sequence)
        store(
            sequence.key,
            sequence.value,
            history_cache,
            band_cache,
            sequence.slots(0, sequence.history_blocks, BLOCK_TOKENS),
            sequence.slots(0, sequence.band_blocks, BAND_BLOCK),
            codec,
        )
    return Batch(codec, sequences, history_cache, band_cache)


def oracle(
    sequence: Sequence,
    codec: LayerCodec | None,
    query: torch.Tensor,
    positions: range,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    chunk_start: int | None = None,
) -> torch.Tensor:
    """Attention in float64, key by key: `query` is [num_queries, num_heads, head_size]."""
    key, value = sequence.key.double(), sequence.value.double()
    num_heads, head_size = query.shape[1:]
    group = num_heads // key.shape[1]
    if codec is None:
        restored_key, restored_value = key, value
    else:
        # k̂ = k̄ + r̂ R_K^{-1} and v̂ = ŵ R_V^T
        r = decode_keys(*encode_keys(sequence.key, codec), codec.codebook).double()
        w = decode_values(*encode_values(sequence.value, codec.value_transform)).double()
        inverse = codec.key_transform_inv_t.double().transpose(1, 2)
        restored_key = torch.einsum("thd,hde->the", r, inverse) + codec.key_mean.double()
        restored_value = torch.einsum("thd,hed->the", w, codec.value_transform.double())
    outputs = []
    for row, position in enumerate(positions):
        keys, values = restored_key[: position + 1].clone(), restored_value[: position + 1].clone()
        for j in range(position + 1):
            in_chunk = chunk_start is not None and j >= chunk_start
            is_held = in_chunk or sequence.band_blocks[j // BAND_BLOCK] > 0
            if (j < SINK or j > position - sequence.window(position)) and is_held:
                keys[j], values[j] = key[j], value[j]
        logits = torch.einsum("hgd,jhd->hgj", query[row].double().view(-1, group, head_size), keys) * head_size**-0.5
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().view(-1, group, 1)], -1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        outputs.append(torch.einsum("hgj,jhd->hgd", logits.softmax(-1), values).flatten(0, 1))
    return torch.stack(outputs)


def queries(num_tokens: int, num_heads: int, head_size: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, head_size, generator=torch.Generator().manual_seed(seed)) * 2


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.isfinite().all()
    assert (actual.double() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("lengths", "num_heads", "head_size", "options"),
    [
        pytest.param([1], 2, 64, {}, id="tok1-g1-hs64"),
        pytest.param([SINK, SINK + 1, 63, 64], 8, 64, {}, id="band-only-g4-hs64"),
        pytest.param([1, 97, 130, 641, 700], 14, 64, {}, id="ragged-g7-hs64"),
        pytest.param([129, 300], 12, 128, {"is_padded": True}, id="padded-pages-g6-hs128"),
        pytest.param([260], 2, 256, {}, id="tok260-g1-hs256"),
        pytest.param([400, 200], 4, 64, {"missing": (0, 22, 23)}, id="missing-band-blocks-g2-hs64"),
        pytest.param([400, 300], 4, 64, {"prompt_lens": [400, 299]}, id="still-in-the-prompt-g2-hs64"),
    ],
)
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.0, False), (5.0, True)], ids=["plain", "cap-sinks"])
def test_paged_decode_equals_the_float64_computation(
    lengths: list[int], num_heads: int, head_size: int, options: dict[str, object], soft_cap: float, has_sinks: bool
) -> None:
    batch = make_batch(lengths, head_size=head_size, **options)  # type: ignore[arg-type]
    query = queries(len(lengths), num_heads, head_size)
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(3)) if has_sinks else None
    actual = paged_decode(
        query,
        QuantizedHistory(batch.history_cache, batch.codec),
        batch.band_cache,
        *batch.tables(),
        *batch.lengths(),
        head_size**-0.5,
        SINK,
        RECENT,
        PROMPT_RECENT,
        soft_cap,
        sinks,
    )
    for i, sequence in enumerate(batch.sequences):
        position = sequence.length - 1
        expected = oracle(sequence, batch.codec, query[i : i + 1], range(position, position + 1), soft_cap, sinks)
        assert_close(actual[i : i + 1], expected)


@pytest.mark.parametrize(
    ("lengths", "chunk_start", "num_heads", "options"),
    [
        pytest.param([150], [0], 8, {}, id="fresh-g4"),
        pytest.param([330, 40, 200], [200, 0, 199], 4, {}, id="mixed-fresh-continuation-g2"),
        pytest.param([300], [120], 14, {"missing": (5, 6)}, id="missing-band-blocks-g7"),
        pytest.param([700], [10], 2, {"is_padded": True}, id="chunk-crosses-sink-padded-g1"),
        pytest.param([300, 260], [90, 180], 4, {"prompt_lens": [200, 181]}, id="past-the-prompt-g2"),
    ],
)
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.0, False), (5.0, True)], ids=["plain", "cap-sinks"])
def test_prefill_equals_the_float64_computation(
    lengths: list[int],
    chunk_start: list[int],
    num_heads: int,
    options: dict[str, object],
    soft_cap: float,
    has_sinks: bool,
) -> None:
    batch = make_batch(lengths, chunk_start=chunk_start, **options)  # type: ignore[arg-type]
    counts = [length - start for length, start in zip(lengths, chunk_start, strict=True)]
    query = queries(sum(counts), num_heads, 64)
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(3)) if has_sinks else None
    chunks = [(s.key[start:], s.value[start:]) for s, start in zip(batch.sequences, chunk_start, strict=True)]
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    actual = prefill(
        query,
        torch.cat([key for key, _ in chunks]),
        torch.cat([value for _, value in chunks]),
        QuantizedHistory(batch.history_cache, batch.codec),
        batch.band_cache,
        *batch.tables(),
        bounds,
        *batch.lengths(),
        64**-0.5,
        SINK,
        RECENT,
        PROMPT_RECENT,
        soft_cap,
        sinks,
    )
    for i, (sequence, start) in enumerate(zip(batch.sequences, chunk_start, strict=True)):
        rows = slice(int(bounds[i]), int(bounds[i + 1]))
        expected = oracle(
            sequence, batch.codec, query[rows], range(start, sequence.length), soft_cap, sinks, chunk_start=start
        )
        assert_close(actual[rows], expected)


def test_prefill_does_not_depend_on_where_chunks_begin() -> None:
    query = queries(500, 4, 64)
    outputs = []
    for start in (0, 130, 437):
        batch = make_batch([500], chunk_start=[start], prompt_lens=[470])
        sequence = batch.sequences[0]
        outputs.append(
            prefill(
                query[start:],
                sequence.key[start:],
                sequence.value[start:],
                QuantizedHistory(batch.history_cache, batch.codec),
                batch.band_cache,
                *batch.tables(),
                torch.tensor([0, 500 - start]),
                *batch.lengths(),
                64**-0.5,
                SINK,
                RECENT,
                PROMPT_RECENT,
            )[-50:]
        )
    for output in outputs[1:]:
        assert torch.allclose(output, outputs[0], atol=1e-5, rtol=1e-5)


def test_a_window_longer_than_the_sequence_costs_no_more_than_the_sequence() -> None:
    batch = make_batch([60, 75], prompt_lens=[60, 75])
    query = queries(2, 4, 64)
    history = QuantizedHistory(batch.history_cache, batch.codec)
    caches = (history, batch.band_cache, *batch.tables(), *batch.lengths(), 64**-0.5, SINK, RECENT)
    # 2^20 positions would not be read within the test's time limit
    assert torch.equal(paged_decode(query, *caches, 1 << 20), paged_decode(query, *caches, 75))


def test_store_skips_padding_and_tokens_that_a_cache_does_not_hold() -> None:
    batch = make_batch([40])
    history, band = batch.history_cache.clone(), batch.band_cache.view(torch.uint8).clone()
    key, value = sample_keys(batch.codec, 5, seed=90), sample_values(batch.codec, 5, seed=91)
    nowhere = torch.tensor([-1, 0, 15, -1, 7])
    store(key, value, batch.history_cache, batch.band_cache, nowhere, nowhere, batch.codec)
    assert torch.equal(batch.history_cache, history)
    assert torch.equal(batch.band_cache.view(torch.uint8), band)


def test_exact_history_reads_back_what_was_stored() -> None:
    key = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(1))
    value = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(2))
    history, band = torch.zeros(4, 2, BLOCK_TOKENS, 128), torch.zeros(20, 2, BAND_BLOCK, 128)
    blocks = torch.tensor([3, 1])
    positions = torch.arange(200)
    slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    store_exact(key, value, history, band, slots, torch.full_like(slots, -1))
    keys, values = ExactHistory(history).read(blocks[None])
    assert torch.equal(keys[0, :, :200], key.transpose(0, 1))
    assert torch.equal(values[0, :, :200], value.transpose(0, 1))
    assert not band.any()
