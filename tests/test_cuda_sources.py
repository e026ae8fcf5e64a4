"""The CUDA C++ kernels on a CPU, at tiny sizes; on a GPU, test_triton_ops.py runs them for real."""

import pytest
import torch
from codec_samples import sample_codec, sample_keys, sample_values
from cuda_emulator import emulated_cuda  # noqa: F401
from ops_scenario import (
    BAND_BLOCK,
    HAS_GPU,
    Scenario,
    build,
    dense_attention,
    interpreted_without_gpu,
    poisoned_pages,
    read_records,
    relative_error,
)

from vllm_novakv.codec.layout import BLOCK_TOKENS, record_byte_offsets
from vllm_novakv.ops import decode_cuda, nvrtc, reference, store_cuda

pytest.importorskip("triton", reason="Triton is not installed")
with interpreted_without_gpu():
    from vllm_novakv.ops import paged_decode as decode_op
    from vllm_novakv.ops import store as store_op
    from vllm_novakv.ops.tables import KernelTables, PackedHistory

pytestmark = [
    pytest.mark.usefixtures("emulated_cuda"),
    pytest.mark.skipif(HAS_GPU, reason="the kernels are run for real on a GPU"),
]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario((1, 17, 130, 300), num_kv_heads=1), id="mixed-lengths"),
        pytest.param(Scenario((*range(1, 90, 4), 700, 5), num_kv_heads=1), id="short-among-long"),
        # a worker that begins where a request has no history to read, and goes on with the next one's
        pytest.param(Scenario((5, 100) * 30, num_kv_heads=1), id="all-band-before-longer"),
        pytest.param(Scenario((520,), num_kv_heads=1, group=3, head_size=128), id="gqa3-hs128"),
        pytest.param(Scenario((140,), num_kv_heads=1, group=7, head_size=256), id="gqa7-hs256"),
        pytest.param(Scenario((131, 260), num_kv_heads=1, layout="BLHNC", page_padding=256), id="block-outermost"),
        pytest.param(Scenario((200, 150), num_kv_heads=1, drop_band=(0,)), id="missing-band-blocks"),
        pytest.param(Scenario((150, 40), num_kv_heads=1, cap=20.0, has_sinks=True), id="cap-and-sinks"),
        pytest.param(
            Scenario((150, 40), num_kv_heads=1, dtype=torch.float16, book="float8_e5m2", head_size=128), id="fp16-e5m2"
        ),
        pytest.param(Scenario((1, 150, 300), num_kv_heads=1, book="int8"), id="int8-hs64"),
        pytest.param(Scenario((290,), num_kv_heads=1, group=6, book="int8", head_size=128), id="int8-gqa6-hs128"),
    ],
)
def test_decode_equals_dense_attention(scenario):
    batch = build(scenario)
    history = PackedHistory(batch.history_cache, batch.codec, KernelTables.build(batch.codec))
    arguments = (
        batch.band_cache, batch.history_table, batch.band_table, batch.seq_lens, batch.prompt_lens, *batch.options
    )  # fmt: skip
    output = torch.full(batch.query.shape, torch.nan)
    decode_op.paged_decode(batch.query, history, *arguments, output=output, splits=2, use_cuda=True)
    exact = dense_attention(batch, torch.float64)
    type_error = relative_error(dense_attention(batch, scenario.dtype), exact)
    assert torch.isfinite(output).all()
    assert relative_error(output, exact) <= 2 * type_error + 1e-3
    plain = reference.QuantizedHistory(batch.history_cache, batch.codec)
    assert relative_error(output, reference.paged_decode(batch.query, plain, *arguments)) < 4e-3


@pytest.mark.parametrize("ctas", [1, 3, 9])
def test_decode_skips_padded_rows(ctas):
    batch = build(Scenario((150, 20), num_kv_heads=1))
    history = PackedHistory(batch.history_cache, batch.codec, KernelTables.build(batch.codec))
    tables, lengths = (batch.history_table, batch.band_table), (batch.seq_lens, batch.prompt_lens)

    def run(query, tables, lengths):
        output = torch.full(query.shape, torch.nan)
        arguments = (batch.band_cache, *tables, *lengths, *batch.options)
        return decode_op.paged_decode(query, history, *arguments, output=output, splits=ctas, use_cuda=True)

    # before, between and after the requests
    rows = torch.tensor([1, 3])
    padded = [x.new_zeros(5, *x.shape[1:]) for x in (*tables, *lengths)]
    for target, source in zip(padded, (*tables, *lengths), strict=True):
        target[rows] = source
    query = torch.full((5, *batch.query.shape[1:]), torch.nan, dtype=batch.query.dtype)
    query[rows] = batch.query
    output = run(query, padded[:2], padded[2:])
    torch.testing.assert_close(output[rows], run(batch.query, tables, lengths), rtol=1e-4, atol=1e-6)
    assert (output[[0, 2, 4]] == 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "heads", "size", "dtype", "book", "is_few"),
    [
        pytest.param(19, 2, 128, torch.bfloat16, "float8_e4m3fn", True, id="few-tok19-kv2-hs128"),
        pytest.param(5, 1, 64, torch.float16, "float8_e5m2", True, id="few-tok5-kv1-hs64-fp16"),
        pytest.param(3, 1, 256, torch.float32, "float8_e4m3fn", True, id="few-tok3-kv1-hs256-fp32"),
        pytest.param(70, 1, 64, torch.bfloat16, "int8", False, id="many-tok70-kv1-hs64-int8"),
        pytest.param(70, 1, 128, torch.float16, "float8_e5m2", False, id="many-tok70-kv1-hs128-fp16"),
        pytest.param(35, 1, 256, torch.bfloat16, "float8_e4m3fn", False, id="many-tok35-kv1-hs256"),
    ],
)
def test_store_writes_the_reference_s_records(monkeypatch, num_tokens, heads, size, dtype, book, is_few):
    monkeypatch.setattr(store_cuda, "FEW_TOKENS", 256 if is_few else 0)
    codec = sample_codec(heads, size, book=book, num_centroids=200)
    key = sample_keys(codec, num_tokens).to(dtype)
    value = sample_values(codec, num_tokens).to(dtype)
    # rows of a fused projection: not contiguous
    key, value = torch.cat([key, value], 1).split(heads, dim=1)
    slots = torch.randperm(2 * BLOCK_TOKENS, generator=torch.Generator().manual_seed(0))[:num_tokens] + BLOCK_TOKENS
    band_slots = torch.arange(num_tokens) + BAND_BLOCK
    slots[1], band_slots[1], band_slots[2] = -1, -1, 3
    slots[num_tokens - 1] = 7
    caches = [
        (
            poisoned_pages(3, heads, BLOCK_TOKENS, codec.layout.record_bytes, "BLHNC", 256, torch.uint8, "cpu"),
            poisoned_pages(num_tokens // 16 + 3, heads, 16, 2 * size, "BLHNC", 256, torch.bfloat16, "cpu"),
        )
        for _ in range(2)
    ]
    reference.store(key, value, *caches[0], slots, band_slots, codec)
    store_op.store(key, value, *caches[1], slots, band_slots, KernelTables.build(codec), use_cuda=True)
    assert torch.equal(caches[0][1].view(torch.int16), caches[1][1].view(torch.int16))
    is_stored = slots >= BLOCK_TOKENS
    expected, actual = (read_records(cache, slots[is_stored], codec.layout) for cache, _ in caches)
    for a, e in zip(actual, expected, strict=True):
        # f32 sums in another order: a value on a code's border, or a scale between two bf16 numbers
        assert (a != e).double().mean() < 2e-3
    # nothing else was written
    offsets = record_byte_offsets(codec.layout)
    for cache, _ in caches:
        for slot in slots[is_stored].tolist():
            cache.flatten(2)[slot // BLOCK_TOKENS, :, offsets[slot % BLOCK_TOKENS]] = 0
    assert torch.equal(caches[0][0], caches[1][0])


@pytest.mark.parametrize("size", [64, 128, 256])
def test_kernels_fit_little_shared_memory(monkeypatch, size):
    # what a block may have on capability 8.6, 8.9 and 12.0
    limit, device = 99 * 1024, torch.device("cpu")
    monkeypatch.setattr(nvrtc, "shared_limit", lambda _: limit)
    monkeypatch.setattr(nvrtc, "is_available", lambda *_: True)
    decode_cuda._num_copies.cache_clear()
    try:
        # one copy of the codebook of the largest heads does not fit: Triton's kernels run
        assert decode_cuda.is_supported(device, size, 4, 0) == (size < 256)
    finally:
        decode_cuda._num_copies.cache_clear()
    for num_tokens in (1, store_cuda.FEW_TOKENS + 1):
        assert store_cuda._shared_bytes(size, store_cuda.shape_for(size, num_tokens)) <= limit
