"""The Triton operations against the reference and dense f64 attention: interpreted on the CPU, compiled on a GPU."""

import pytest
import torch
from codec_samples import sample_codec, sample_keys, sample_values
from ops_scenario import (
    BAND_BLOCK,
    DEVICE,
    GPU_MARKS,
    HAS_GPU,
    REAL,
    Scenario,
    block_tables,
    build,
    dense_attention,
    interpreted_without_gpu,
    on,
    poisoned_pages,
    read_records,
    relative_error,
)

from vllm_novakv.codec.layout import BLOCK_TOKENS, record_byte_offsets
from vllm_novakv.ops import reference

pytest.importorskip("triton", reason="Triton is not installed")
with interpreted_without_gpu():
    from vllm_novakv.ops import decode_cuda
    from vllm_novakv.ops import paged_decode as decode_op
    from vllm_novakv.ops import prefill as prefill_op
    from vllm_novakv.ops import store as store_op
    from vllm_novakv.ops.tables import KernelTables, PackedHistory

# Error against f64 is at most twice that of the same computation in the model's type, plus this.
FLOOR = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-3}

DECODE = {
    "mixed-lengths": Scenario((1, 17, 130, 300)),
    "band-only-and-empty-history": Scenario((1, 8, 24, 32)),
    "gqa1": Scenario((150,), group=1),
    "gqa6-hs128": Scenario((150, 33), num_kv_heads=1, group=6, head_size=128),
    "gqa7-hs256": Scenario((140,), num_kv_heads=1, group=7, head_size=256),
    "gqa16": Scenario((140,), num_kv_heads=1, group=16),
    "block-outermost-padded": Scenario((131, 260), layout="BLHNC", page_padding=256),
    "missing-band-blocks": Scenario((200, 150), drop_band=(0,)),
    "cap-and-sinks": Scenario((150, 40), cap=20.0, has_sinks=True),
    "fp16-e5m2": Scenario((150, 40), dtype=torch.float16, book="float8_e5m2"),
    "int8-hs128": Scenario((150, 40), num_kv_heads=1, book="int8", head_size=128),
    "fp32": Scenario((150, 40), dtype=torch.float32),
    "no-sink-part": Scenario((150,), sink=0, recent=16),
    "still-in-the-prompt": Scenario((150, 200, 30), prompt_lens=(150, 199, 31)),
}
PREFILL = {
    "fresh": Scenario((45,), (45,)),
    "fresh-longer-than-window": Scenario((170,), (170,), num_kv_heads=1),
    "mixed-fresh-and-continued": Scenario((40, 200, 150), (40, 9, 33)),
    "gqa1-hs128": Scenario((140,), (30,), num_kv_heads=1, group=1, head_size=128),
    "gqa6": Scenario((150, 20), (20, 20), num_kv_heads=1, group=6),
    "gqa7-hs256": Scenario((140,), (20,), num_kv_heads=1, group=7, head_size=256),
    "block-outermost-padded": Scenario((131, 160), (40, 10), layout="BLHNC", page_padding=256),
    "missing-band-blocks": Scenario((200,), (20,), drop_band=(0,)),
    "cap-and-sinks": Scenario((150,), (30,), cap=20.0, has_sinks=True),
    "fp16-e5m2": Scenario((150,), (30,), dtype=torch.float16, book="float8_e5m2"),
    "int8": Scenario((150,), (30,), book="int8"),
    "one-token": Scenario((150, 30), (1, 5)),
    "past-the-prompt": Scenario((200, 180), (60, 30), (160, 140)),
}
GPU_DECODE = {
    "hs128-gqa4": Scenario((1, 63, 320, 321, 5000, 33000), num_kv_heads=8, head_size=128, **REAL),
    "hs64-gqa3": Scenario((4097, 1, 900), num_kv_heads=3, group=3, head_size=64, **REAL),
    "hs256-gqa2": Scenario((4097, 900), num_kv_heads=2, group=2, head_size=256, **REAL),
    "hs128-gqa7-fp16-sinks": Scenario(
        (2000, 9000), group=7, head_size=128, dtype=torch.float16, has_sinks=True, **REAL
    ),
    "hs64-gqa8-cap-block-outermost": Scenario(
        (2000, 700), group=8, cap=30.0, has_sinks=True, layout="BLHNC", page_padding=4096, **REAL
    ),
    "131072-tokens": Scenario((131_072, 70_001), head_size=128, **REAL),
    "hs64-gqa7-long-among-many": Scenario((24_000, 21_003, *range(30, 1500, 14)), group=7, **REAL),
    "hs128-gqa4-int8": Scenario((1, 63, 320, 5000, 33000), num_kv_heads=8, book="int8", head_size=128, **REAL),
    "hs64-gqa7-int8": Scenario((4097, 900), group=7, book="int8", **REAL),
    "256-requests": Scenario(tuple(1 + 37 * i % 1500 for i in range(256)), head_size=128, **REAL),
}
GPU_PREFILL = {
    "hs128-gqa4": Scenario((1500, 3000, 700), (1500, 500, 1), num_kv_heads=8, head_size=128, **REAL),
    "hs64-gqa3": Scenario((1700, 2200), (1000, 700), (1700, 1700), num_kv_heads=3, group=3, **REAL),
    "hs256-gqa2": Scenario((900,), (500,), group=2, head_size=256, **REAL),
    "131072-tokens": Scenario((131_072,), (200,), num_kv_heads=1, head_size=128, **REAL),
    "hs128-gqa7-fp16-sinks": Scenario(
        (2000, 900), (100, 900), group=7, head_size=128, dtype=torch.float16, has_sinks=True, **REAL
    ),
    "hs64-gqa8-cap-block-outermost": Scenario(
        (2000, 700), (900, 70), group=8, cap=30.0, has_sinks=True, layout="BLHNC", page_padding=4096, **REAL
    ),
}


def cases(tiny, real):
    return [pytest.param(s, id=name) for name, s in tiny.items()] + [
        pytest.param(s, id=f"gpu-{name}", marks=GPU_MARKS) for name, s in real.items()
    ]


def packed(batch):
    return PackedHistory(batch.history_cache, batch.codec, KernelTables.build(batch.codec))


def poisoned_output(query):
    return torch.full(query.shape, torch.nan, dtype=torch.float32, device=query.device)


def assert_as_precise_as_pytorch(actual, batch):
    exact = dense_attention(batch, torch.float64)
    assert torch.isfinite(actual).all()
    type_error = relative_error(dense_attention(batch, batch.scenario.dtype), exact)
    assert relative_error(actual, exact) <= 2 * type_error + FLOOR[batch.scenario.dtype]


@pytest.mark.parametrize("use_cuda", [False, pytest.param(True, marks=GPU_MARKS)], ids=["triton", "cuda"])
@pytest.mark.parametrize("scenario", cases(DECODE, GPU_DECODE))
def test_decode_equals_dense_attention(scenario, use_cuda):
    if use_cuda and scenario.group > decode_cuda.MAX_GROUP:
        pytest.skip("the CUDA kernel serves up to 8 query heads per KV head")
    batch = build(on(DEVICE, scenario))
    arguments = (
        batch.band_cache,
        batch.history_table,
        batch.band_table,
        batch.seq_lens,
        batch.prompt_lens,
        *batch.options,
    )
    output = poisoned_output(batch.query)
    splits = None if HAS_GPU else 3
    decode_op.paged_decode(batch.query, packed(batch), *arguments, output=output, splits=splits, use_cuda=use_cuda)
    assert_as_precise_as_pytorch(output, batch)
    expected = reference.paged_decode(
        batch.query, reference.QuantizedHistory(batch.history_cache, batch.codec), *arguments
    )
    assert relative_error(output, expected) < 4e-3


def test_decode_skips_padded_rows():
    batch = build(on(DEVICE, Scenario((150, 20))))
    query = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)])
    tables = [torch.cat([table, torch.zeros_like(table)]) for table in (batch.history_table, batch.band_table)]
    seq_lens, prompt_lens = (
        torch.cat([lengths, torch.zeros_like(lengths)]) for lengths in (batch.seq_lens, batch.prompt_lens)
    )
    output = decode_op.paged_decode(
        query,
        packed(batch),
        batch.band_cache,
        *tables,
        seq_lens,
        prompt_lens,
        *batch.options,
        output=poisoned_output(query),
        splits=2,
    )
    alone = decode_op.paged_decode(
        batch.query,
        packed(batch),
        batch.band_cache,
        batch.history_table,
        batch.band_table,
        batch.seq_lens,
        batch.prompt_lens,
        *batch.options,
        splits=2,
    )
    assert torch.equal(output[:2], alone)
    assert (output[2:] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="launches overlap on a GPU alone")
@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_decode_sees_what_was_stored_just_before(num_requests):
    """Launches that begin before the one ahead of them has ended must wait for what they read."""
    batch = build(on(DEVICE, Scenario((500, 3000, 37)[:num_requests] * max(1, num_requests // 3), group=7, **REAL)))
    history = packed(batch)
    heads, size = batch.codec.num_kv_heads, batch.codec.head_size
    last = batch.seq_lens.long() - 1
    requests = torch.arange(len(last), device=DEVICE)
    history_slots = batch.history_table[requests, last // BLOCK_TOKENS].long() * BLOCK_TOKENS + last % BLOCK_TOKENS
    band_slots = batch.band_table[requests, last // BAND_BLOCK].long() * BAND_BLOCK + last % BAND_BLOCK
    steps = 16
    keys, values = torch.randn(2, steps, len(last), heads, size, device=DEVICE).to(torch.bfloat16)
    workspace = decode_op.DecodeWorkspace.allocate(len(last), 7 * heads, heads, size, torch.device(DEVICE))
    tables = (batch.band_cache, batch.history_table, batch.band_table, batch.seq_lens, batch.prompt_lens)

    def run(outputs, after_each=lambda: None):
        for key, value, output in zip(keys, values, outputs, strict=True):
            store_op.store(key, value, batch.history_cache, batch.band_cache, history_slots, band_slots, history.tables)
            after_each()
            decode_op.paged_decode(batch.query, history, *tables, *batch.options, output=output, workspace=workspace)
            after_each()
        return outputs

    shape = (steps, *batch.query.shape)
    expected = run(torch.full(shape, torch.nan, device=DEVICE), torch.cuda.synchronize)
    outputs = run(torch.full(shape, torch.nan, device=DEVICE))
    assert torch.equal(outputs, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(outputs)
    for _ in range(20):
        outputs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outputs, expected)


@pytest.mark.parametrize("scenario", cases(PREFILL, GPU_PREFILL))
def test_prefill_equals_dense_attention(scenario):
    batch = build(on(DEVICE, scenario))
    arguments = (
        batch.band_cache,
        batch.history_table,
        batch.band_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.prompt_lens,
        *batch.options,
    )
    output = poisoned_output(batch.query)
    prefill_op.prefill(batch.query, batch.key, batch.value, packed(batch), *arguments, output=output)
    assert_as_precise_as_pytorch(output, batch)
    history = reference.QuantizedHistory(batch.history_cache, batch.codec)
    expected = reference.prefill(batch.query, batch.key, batch.value, history, *arguments)
    assert relative_error(output, expected) < 4e-3


STORE = [
    pytest.param(19, 2, 64, torch.bfloat16, "int8", "LBHNC", id="tok19-kv2-hs64-int8"),
    pytest.param(9, 1, 128, torch.float16, "float8_e5m2", "BLHNC", id="tok9-kv1-hs128-fp16-e5m2"),
    pytest.param(7, 1, 256, torch.float32, "float8_e4m3fn", "LBHNC", id="tok7-kv1-hs256-fp32"),
    pytest.param(5000, 8, 128, torch.bfloat16, "float8_e4m3fn", "LBHNC", id="gpu-tok5000-kv8-hs128", marks=GPU_MARKS),
    pytest.param(2049, 3, 64, torch.float16, "float8_e5m2", "BLHNC", id="gpu-tok2049-kv3-hs64", marks=GPU_MARKS),
    pytest.param(700, 2, 256, torch.bfloat16, "float8_e4m3fn", "LBHNC", id="gpu-tok700-kv2-hs256", marks=GPU_MARKS),
]


@pytest.mark.parametrize("use_cuda", [False, pytest.param(True, marks=GPU_MARKS)], ids=["triton", "cuda"])
@pytest.mark.parametrize(("num_tokens", "heads", "size", "dtype", "book", "layout"), STORE)
def test_store_writes_the_reference_s_codes(num_tokens, heads, size, dtype, book, layout, use_cuda):
    codec = sample_codec(heads, size, book=book, num_centroids=250 if HAS_GPU else 30).to(DEVICE)
    key = sample_keys(codec.to("cpu"), num_tokens).to(DEVICE, dtype)
    value = sample_values(codec.to("cpu"), num_tokens).to(DEVICE, dtype)
    # rows of a fused projection: not contiguous
    key, value = torch.cat([key, value], 1).split(heads, dim=1)
    table, num_blocks = block_tables([-(-num_tokens // BLOCK_TOKENS)], 2, 3)
    position = torch.arange(num_tokens)
    slots = (table[0].long()[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS).to(DEVICE)
    band_slots = (position + BAND_BLOCK).to(DEVICE)
    slots[3], band_slots[3] = -1, -1
    slots[4], band_slots[5] = 5, 3
    caches = [
        (
            poisoned_pages(num_blocks, heads, 128, codec.layout.record_bytes, layout, 256, torch.uint8, DEVICE),
            poisoned_pages(num_tokens // 16 + 3, heads, 16, 2 * size, layout, 256, torch.bfloat16, DEVICE),
        )
        for _ in range(2)
    ]
    reference.store(key, value, *caches[0], slots, band_slots, codec)
    store_op.store(key, value, *caches[1], slots, band_slots, KernelTables.build(codec), use_cuda=use_cuda)
    assert torch.equal(caches[0][1].view(torch.uint8), caches[1][1].view(torch.uint8))

    is_stored = slots >= BLOCK_TOKENS
    expected = read_records(caches[0][0], slots[is_stored], codec.layout)
    actual = read_records(caches[1][0], slots[is_stored], codec.layout)
    assert_indices_equal_unless_tied(actual[0], expected[0], key[is_stored], codec)
    assert_value_codes_equal_unless_tied(actual[2], expected[2], value[is_stored], expected[3], codec)
    is_same = (actual[0] == expected[0]).all(-1)
    for a, e in ((actual[1], expected[1]), (actual[3], expected[3])):
        difference = (a.view(torch.int16).int() - e.view(torch.int16).int()).abs()
        assert difference[is_same].max() <= 1
        assert (difference[is_same] > 0).double().mean() < 2e-3
    # nothing else was written
    untouched = [cache.clone() for cache, _ in caches]
    offsets = record_byte_offsets(codec.layout).to(DEVICE)
    kept = slots[is_stored]
    for cache in untouched:
        flat = cache.flatten(2)
        index = offsets[kept % BLOCK_TOKENS]
        flat[
            (kept // BLOCK_TOKENS)[:, None, None], torch.arange(heads, device=DEVICE)[None, :, None], index[:, None]
        ] = 0
        cache.copy_(flat.view_as(cache))
    assert torch.equal(*untouched)


def assert_indices_equal_unless_tied(actual, expected, key, codec):
    r = torch.einsum("thi,hij->thj", key.double() - codec.key_mean.double(), codec.key_transform.double())
    x = (r / r.square().mean(-1, keepdim=True).sqrt()).unflatten(-1, (codec.num_groups, 4))
    codebook = codec.codebook.double()
    heads = torch.arange(codec.num_kv_heads, device=key.device)[:, None]
    groups = torch.arange(codec.num_groups, device=key.device)
    distances = [(x - codebook[heads, groups, indices.long()]).square().sum(-1) for indices in (actual, expected)]
    # equal, or as near within f32's rounding of the scores
    assert (distances[0] <= distances[1] + 1e-5 * (1 + x.square().sum(-1))).all()
    assert (actual != expected).double().mean() < 1e-3


def assert_value_codes_equal_unless_tied(actual, expected, value, value_scale, codec):
    w = torch.einsum("thi,hij->thj", value.double(), codec.value_transform.double()) / value_scale.double()[..., None]
    is_tied = (w - w.round()).abs() < 1e-4
    assert ((actual == expected) | is_tied).all()
    assert (actual != expected).double().mean() < 1e-3


def test_tables_refuse_other_group_sizes():
    with pytest.raises(NotImplementedError, match="read groups of 4; refit the model with `novakv fit`"):
        KernelTables.build(sample_codec(1, 64, group_size=8))


def test_decode_refuses_a_wrong_block_table_type():
    batch = build(on(DEVICE, Scenario((20,))))
    with pytest.raises(ValueError, match=r"history_block_table is torch\.int64"):
        decode_op.paged_decode(
            batch.query,
            packed(batch),
            batch.band_cache,
            batch.history_table.long(),
            batch.band_table,
            batch.seq_lens,
            batch.prompt_lens,
            *batch.options,
        )
