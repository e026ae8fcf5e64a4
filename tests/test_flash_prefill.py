"""Prefill by way of a FlashAttention kernel: its plan by hand, its kernels against dense attention."""

import doctest

import pytest
import torch
from ops_scenario import (
    DEVICE,
    GPU_MARKS,
    REAL,
    Scenario,
    build,
    dense_attention,
    interpreted_without_gpu,
    on,
    relative_error,
)

pytest.importorskip("triton", reason="Triton is not installed")
with interpreted_without_gpu():
    from vllm_novakv.ops import flash_prefill as flash_op
    from vllm_novakv.ops import prefill as prefill_op
    from vllm_novakv.ops.flash_prefill import Pass, Piece, plan_passes
    from vllm_novakv.ops.tables import KernelTables, PackedHistory

SCENARIOS = {
    "fresh": Scenario((45,), (45,)),
    "fresh-longer-than-window": Scenario((170,), (170,), num_kv_heads=1),
    "mixed-fresh-and-continued": Scenario((40, 200, 150), (40, 9, 33)),
    "gqa1-hs128": Scenario((140,), (30,), num_kv_heads=1, group=1, head_size=128),
    "gqa6": Scenario((150, 20), (20, 20), num_kv_heads=1, group=6),
    "gqa7-hs256": Scenario((140,), (20,), num_kv_heads=1, group=7, head_size=256),
    "block-outermost-padded": Scenario((131, 160), (40, 10), layout="BLHNC", page_padding=256),
    "missing-band-blocks": Scenario((200,), (20,), drop_band=(0,)),
    "sinks": Scenario((150,), (30,), has_sinks=True),
    "fp16-e5m2": Scenario((150,), (30,), dtype=torch.float16, book="float8_e5m2"),
    "int8": Scenario((150,), (30,), book="int8"),
    "past-the-prompt": Scenario((200, 180), (60, 30), (160, 140)),
    "no-sink-part": Scenario((150,), (40,), sink=0),
}
GPU_SCENARIOS = {
    "hs128-gqa4": Scenario((1500, 3000, 700), (1500, 500, 2), num_kv_heads=8, head_size=128, **REAL),
    "hs64-gqa3": Scenario((1700, 2200), (1000, 700), (1700, 1700), num_kv_heads=3, group=3, **REAL),
    "hs256-gqa2": Scenario((1900,), (500,), group=2, head_size=256, **REAL),
    "131072-tokens": Scenario((131_072,), (200,), num_kv_heads=1, head_size=128, **REAL),
    "hs64-gqa7-short-chunks-of-long-prompts": Scenario(
        (24_000, 21_000, 20_500, 9000), (50, 2, 300, 8000), group=7, **REAL
    ),
    "hs128-gqa7-fp16-sinks": Scenario(
        (2000, 900), (100, 900), group=7, head_size=128, dtype=torch.float16, has_sinks=True, **REAL
    ),
}


def dense_flash(query, key, value, query_bounds, key_bounds, max_query, max_key, scale, is_causal, window, output):
    """FlashAttention's contract in plain PyTorch."""
    group = query.shape[1] // key.shape[1]
    log_sums = torch.full((query.shape[1], query.shape[0]), torch.inf, device=query.device)
    q_bounds, k_bounds = query_bounds.tolist(), key_bounds.tolist()
    for q0, q1, k0, k1 in zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False):
        assert q1 - q0 <= max_query
        assert k1 - k0 <= max_key
        k, v = (x[k0:k1].float().repeat_interleave(group, 1) for x in (key, value))
        logits = torch.einsum("thd,nhd->htn", query[q0:q1].float(), k) * scale
        last = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=query.device)[:, None]
        j = torch.arange(k1 - k0, device=query.device)[None]
        if is_causal:
            logits = logits.masked_fill(j > last, -torch.inf)
        if window is not None:
            logits = logits.masked_fill(j <= last - window, -torch.inf)
        sums = logits.logsumexp(-1)
        weights = torch.exp(logits - sums.masked_fill(sums == -torch.inf, 0)[..., None])
        output[q0:q1] = torch.einsum("htn,nhd->thd", weights, v).to(output.dtype)
        log_sums[:, q0:q1] = sums.masked_fill(sums == -torch.inf, torch.inf)
    return log_sums


@pytest.mark.parametrize("use_library", [False, pytest.param(True, marks=GPU_MARKS)], ids=["pytorch", "library"])
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, id=name) for name, s in SCENARIOS.items()]
    + [pytest.param(s, id=f"gpu-{name}", marks=GPU_MARKS) for name, s in GPU_SCENARIOS.items()],
)
@pytest.mark.parametrize("is_tight", [False, True], ids=["one-pass", "many-passes"])
def test_flash_prefill_equals_dense_attention(scenario, is_tight, use_library):
    batch = build(on(DEVICE, scenario))
    s = batch.scenario
    attend = dense_flash
    if use_library:
        compat = pytest.importorskip("vllm_novakv.backend.compat")
        attend = compat.flash_attention(s.head_size)
        if attend is None:
            pytest.skip("vLLM has no FlashAttention here")
    history = PackedHistory(batch.history_cache, batch.codec, KernelTables.build(batch.codec))
    heads = (s.num_kv_heads * s.group, s.num_kv_heads, s.head_size)
    workspace = flash_op.PrefillWorkspace.allocate(sum(s.query_lens), s.prompt_recent, *heads, s.dtype, DEVICE)
    capacity = max(s.query_lens) + s.prompt_recent if is_tight else workspace.capacity
    plan = flash_op.make_plan(s.query_lens, s.seq_lens, s.prompt_recent, capacity, torch.device(DEVICE))
    output = torch.full_like(batch.query, torch.nan)
    tables = (batch.band_cache, batch.history_table, batch.band_table, batch.query_start_loc, batch.seq_lens)
    arguments = (batch.query, batch.key, batch.value, history, *tables)
    for scratch in (workspace.key, workspace.value, workspace.partial_output, workspace.log_sums):
        scratch.fill_(torch.nan)
    flash_op.flash_prefill(
        *arguments, batch.scale, s.sink, s.prompt_recent, batch.sinks, output, plan, workspace, attend
    )
    prefill_op.prefill(*arguments, batch.prompt_lens, *batch.options, output=output, skip_prompt=True)
    exact = dense_attention(batch, torch.float64)
    assert torch.isfinite(output).all()
    # every pass rounds the output to the model's type once more
    factor = 3 if is_tight else 2
    assert relative_error(output, exact) <= factor * relative_error(dense_attention(batch, s.dtype), exact) + 1e-3


def test_plan_covers_every_far_key_once():
    query_lens, seq_lens, window, capacity = [5, 0, 20, 7, 1], [60, 9, 20, 300, 31], 10, 40
    passes = plan_passes(query_lens, seq_lens, window, capacity)
    assert all(part.num_keys <= capacity for part in passes)
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for row in range(query_len):
            position = seq_len - query_len + row
            near, far = [], []
            for part in passes:
                for piece in part.pieces:
                    if piece.request != request:
                        continue
                    stop = piece.start + piece.count
                    if part.is_causal:
                        stop -= query_len - 1 - row
                    start = max(piece.start, stop - window) if part.is_near else piece.start
                    (near if part.is_near else far).extend(range(start, stop))
            assert near == list(range(max(0, position - window + 1), position + 1))
            assert sorted(far) == list(range(max(0, position - window + 1)))


def test_plan_packs_requests_side_by_side():
    first, second = plan_passes([2, 3], [10, 5], window=4, capacity=100)
    assert first == Pass(True, True, (Piece(0, 5, 5), Piece(1, 0, 5)), (2, 3), 0)
    # the second request has one key more than its last row's window
    assert second == Pass(False, True, (Piece(0, 0, 6), Piece(1, 0, 1)), (2, 3), 0)
    assert second.rows == slice(0, 5)


def test_plan_refuses_a_chunk_larger_than_the_scratch():
    with pytest.raises(ValueError, match="a chunk of 50 tokens and a window of 10 do not fit 20"):
        plan_passes([50], [50], window=10, capacity=20)


def test_docstring_example():
    assert doctest.testmod(flash_op).attempted == 1
    assert doctest.testmod(flash_op).failed == 0
