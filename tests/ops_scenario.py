"""Paged batches in poisoned memory, and plain dense attention over them: what the operations are tested against."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from codec_samples import generator, sample_codec, sample_keys, sample_values

from vllm_novakv.codec.layout import BLOCK_TOKENS, record_byte_offsets
from vllm_novakv.codec.quantizer import decode_keys, decode_values, encode_keys, encode_values, unpack_records
from vllm_novakv.ops import reference

BAND_BLOCK = 16
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
REAL = {"sink": 64, "recent": 256, "prompt_recent": 1024}
GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="real sizes need a GPU; the tiny cases run in Triton's interpreter"),
]


@contextmanager
def interpreted_without_gpu() -> Iterator[None]:
    """Kernels imported here run in Triton's interpreter where there is no GPU.

    Triton decides when a kernel is decorated (see conftest.py); other tests of this process must not see it.
    """
    if not HAS_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if not HAS_GPU:
            del os.environ["TRITON_INTERPRET"]


@dataclass(frozen=True)
class Scenario:
    """A batch to attend over. `layout` is LBHNC (a layer's blocks are adjacent) or BLHNC (layers inside a block);
    `page_padding` bytes follow each page. `drop_band` requests have lost their recent band blocks before the chunk.
    `prompt_lens`: by default a chunk is all prompt, and a single query the first generated token."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    prompt_lens: tuple[int, ...] = ()
    num_kv_heads: int = 2
    group: int = 4
    head_size: int = 64
    sink: int = 8
    recent: int = 24
    prompt_recent: int = 40
    layout: str = "LBHNC"
    page_padding: int = 0
    drop_band: tuple[int, ...] = ()
    cap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    book: str = "float8_e4m3fn"
    device: str = "cpu"


@dataclass
class Batch:
    """A scenario laid out in memory, with the plain tensors it was made of."""

    scenario: Scenario
    codec: object
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    history_cache: torch.Tensor
    band_cache: torch.Tensor
    history_table: torch.Tensor
    band_table: torch.Tensor
    seq_lens: torch.Tensor
    prompt_lens: torch.Tensor
    query_start_loc: torch.Tensor
    sinks: torch.Tensor | None
    requests: list = field(default_factory=list)

    @property
    def scale(self):
        return self.scenario.head_size**-0.5

    @property
    def options(self):
        s = self.scenario
        return (self.scale, s.sink, s.recent, s.prompt_recent, s.cap, self.sinks)


def poisoned_pages(num_blocks, heads, tokens, content, layout, padding, dtype, device):
    """[num_blocks, heads, tokens, content] inside memory where every byte is 0xFF: a NaN in every float type."""
    layers, layer = (3, 1) if layout == "BLHNC" else (1, 0)
    page = heads * tokens * content * dtype.itemsize + padding
    stride = page * layers
    memory = torch.full((num_blocks * stride,), 255, dtype=torch.uint8, device=device).view(dtype)
    size = dtype.itemsize
    return memory.as_strided(
        (num_blocks, heads, tokens, content), (stride // size, tokens * content, content, 1), layer * page // size
    )


def block_tables(counts, num_free, seed):
    """Distinct permuted blocks from 1 on, one row per request, zeros behind; and how many blocks exist."""
    total = sum(counts)
    order = (torch.randperm(total + num_free, generator=generator(seed)) + 1).tolist()
    width = max(max(counts), 1)
    rows = [[order.pop() for _ in range(count)] + [0] * (width - count) for count in counts]
    return torch.tensor(rows, dtype=torch.int32), total + num_free + 1


def build(scenario, seed=0):
    """Write every token of the scenario with the reference store; the chunk's tokens are in the history too."""
    s, device = scenario, scenario.device
    query_lens = s.query_lens or (1,) * len(s.seq_lens)
    prompt_lens = s.prompt_lens or (s.seq_lens if s.query_lens else tuple(n - 1 for n in s.seq_lens))
    codec = sample_codec(s.num_kv_heads, s.head_size, book=s.book, num_centroids=64).to(device)
    history_table, history_blocks = block_tables([-(-n // BLOCK_TOKENS) for n in s.seq_lens], 3, seed)
    band_table, band_blocks = block_tables([-(-n // BAND_BLOCK) for n in s.seq_lens], 5, seed + 1)
    layer = (s.num_kv_heads, s.layout, s.page_padding)
    history_cache = poisoned_pages(
        history_blocks, layer[0], BLOCK_TOKENS, codec.layout.record_bytes, layer[1], layer[2], torch.uint8, device
    )
    band_cache = poisoned_pages(
        band_blocks, layer[0], BAND_BLOCK, 2 * s.head_size, layer[1], layer[2], torch.bfloat16, device
    )
    tokens = [sample_keys(codec.to("cpu"), n, seed=100 + i) for i, n in enumerate(s.seq_lens)]
    values = [sample_values(codec.to("cpu"), n, seed=200 + i) for i, n in enumerate(s.seq_lens)]
    batch_keys, batch_values, requests = [], [], []
    for i, (length, query_len) in enumerate(zip(s.seq_lens, query_lens, strict=True)):
        key, value = tokens[i].to(device, s.dtype), values[i].to(device, s.dtype)
        position = torch.arange(length)
        context = length - query_len
        # what the engine's band manager keeps: sink blocks and blocks that reach into the window of the chunk's start
        window = s.prompt_recent if context < prompt_lens[i] else s.recent
        first_kept = max(0, context - window + 1) // BAND_BLOCK
        blocks = torch.arange(band_table.shape[1])
        is_kept = (blocks * BAND_BLOCK < s.sink) | (blocks >= first_kept)
        if i in s.drop_band:
            is_kept &= (blocks * BAND_BLOCK < s.sink) | ((blocks + 1) * BAND_BLOCK > context)
        band_table[i] = torch.where(is_kept, band_table[i], 0)
        slots = history_table[i].long()[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        band_slots = band_table[i].long()[position // BAND_BLOCK] * BAND_BLOCK + position % BAND_BLOCK
        reference.store(key, value, history_cache, band_cache, slots.to(device), band_slots.to(device), codec)
        held = band_table[i][position // BAND_BLOCK] > 0
        requests.append((key, value, (held | (position >= context)).to(device), context, prompt_lens[i]))
        batch_keys.append(key[context:])
        batch_values.append(value[context:])
    num_heads = s.num_kv_heads * s.group
    total = sum(query_lens)
    query = torch.randn(total, num_heads, s.head_size, generator=generator(seed + 7)).to(device, s.dtype)
    sinks = torch.randn(num_heads, generator=generator(seed + 8)).to(device) if s.has_sinks else None
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return Batch(
        s,
        codec,
        query,
        torch.cat(batch_keys),
        torch.cat(batch_values),
        history_cache,
        band_cache,
        history_table.to(device),
        band_table.to(device),
        torch.tensor(s.seq_lens, dtype=torch.int32, device=device),
        torch.tensor(prompt_lens, dtype=torch.int32, device=device),
        starts.to(device),
        sinks,
        requests,
    )


def dense_attention(batch, dtype):
    """The module docstring of ops/reference.py in plain words, one request at a time, in `dtype`."""
    codec = batch.codec
    output = torch.empty(batch.query.shape, dtype=dtype, device=batch.query.device)
    starts = batch.query_start_loc.tolist()
    for (key, value, *state), start, end in zip(batch.requests, starts, starts[1:], strict=False):
        band = [x.to(torch.bfloat16).to(dtype) for x in (key, value)]
        r = decode_keys(*encode_keys(key, codec), codec.codebook).to(dtype)
        w = decode_values(*encode_values(value, codec.value_transform)).to(dtype)
        # few rows at a time: a test must not need all of a GPU's memory
        for first in range(start, end, 256):
            rows = slice(first, min(first + 256, end))
            output[rows] = dense_rows(batch, dtype, batch.query[rows], first - start, (*band, r, w), *state)
    return output


def dense_rows(batch, dtype, rows, first, sources, held, context, prompt_len):
    """Attention of some of a request's rows, the chunk's `first` and following."""
    s, codec = batch.scenario, batch.codec
    length = context + first + rows.shape[0]
    band_key, band_value, r, w = (x[:length] for x in sources)
    held = held[:length]
    # [H, G, T, d]
    query = rows.to(dtype).view(rows.shape[0], s.num_kv_heads, s.group, -1).permute(1, 2, 0, 3)
    folded = (query.double() @ codec.key_transform_inv_t.double()[:, None]).to(dtype)
    offset = (query.double() * codec.key_mean.double()[:, None, None]).sum(-1, keepdim=True).to(dtype)
    p = torch.arange(context + first, length, device=rows.device)[:, None]
    j = torch.arange(length, device=rows.device)[None, :]
    window = torch.where(p < prompt_len, s.prompt_recent, s.recent)
    is_exact = ((j < s.sink) | (j > p - window)) & held
    exact = query @ band_key.permute(1, 2, 0)[:, None]
    coded = folded @ r.permute(1, 2, 0)[:, None] + offset
    logits = torch.where(is_exact, exact, coded) * batch.scale
    if s.cap:
        logits = s.cap * torch.tanh(logits / s.cap)
    logits = logits.masked_fill(j > p, -torch.inf)
    if batch.sinks is not None:
        sink = batch.sinks.to(dtype).view(s.num_kv_heads, s.group, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, -1)[..., :length]
    from_band = torch.where(is_exact, weights, 0) @ band_value.transpose(0, 1)[:, None]
    from_history = torch.where(is_exact, 0, weights) @ w.transpose(0, 1)[:, None]
    rotated = from_history @ codec.value_transform.to(dtype).mT[:, None]
    return (from_band + rotated).permute(2, 0, 1, 3).flatten(1, 2)


def relative_error(actual, expected):
    """‖actual − expected‖ / ‖expected‖ in f64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def on(device, scenario):
    """The scenario on another device."""
    return replace(scenario, device=device)


def read_records(cache, slots, layout):
    """Index bytes, key scales, value codes and value scales of slots, [num_slots, num_kv_heads, ...] each."""
    offsets = record_byte_offsets(layout).to(cache.device)
    blocks = cache.flatten(2)[slots // BLOCK_TOKENS]
    index = offsets[slots % BLOCK_TOKENS][:, None, :].expand(-1, cache.shape[1], -1)
    return unpack_records(blocks.gather(2, index), layout)
