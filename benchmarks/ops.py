#!/usr/bin/env python3
"""Time of the three operations on a GPU, after checking each against the reference; a JSON record per run.

    python benchmarks/ops.py --out benchmarks/records

Decode's effective bandwidth counts the record bytes of the context, each read once; a copy of the same GPU, bytes read
and written counted, is measured in the same run. The baseline is attention over an uncompressed BF16 cache: vLLM's
FlashAttention 3 where vLLM is installed, PyTorch's SDPA otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from codec_samples import sample_codec, sample_keys, sample_values

from vllm_novakv.evaluation.record import write_record
from vllm_novakv.ops import paged_decode as decode_op
from vllm_novakv.ops import reference
from vllm_novakv.ops.flash_prefill import PrefillWorkspace, flash_prefill, make_plan
from vllm_novakv.ops.paged_decode import DecodeWorkspace, paged_decode
from vllm_novakv.ops.prefill import prefill
from vllm_novakv.ops.store import store
from vllm_novakv.ops.tables import KernelTables, PackedHistory

HEADS, KV_HEADS, SIZE = 32, 8, 128
SINK, RECENT, PROMPT_RECENT, BAND_BLOCK = 64, 256, 1024, 16
DEVICE = torch.device("cuda")
REPEATS = 15
TOLERANCE = 1e-2


def main() -> None:
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--decode", nargs="*", default=["64x30000", "16x30000", "64x8192", "1x32768"])
    parser.add_argument("--prefill", nargs="*", default=["16384+0", "13616+16384"], help="chunk+context")
    parser.add_argument("--store", nargs="*", type=int, default=[1, 128, 16384])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tables = KernelTables.build(sample_codec(KV_HEADS, SIZE, num_centroids=256).to(DEVICE))
    copy = copy_bandwidth()
    results: dict[str, Any] = {"copy_tb_per_s": copy}
    print(f"copy {copy} TB/s")
    for kind, measure, cases in (
        ("decode", measure_decode, arguments.decode),
        ("store", measure_store, arguments.store),
        ("prefill", measure_prefill, arguments.prefill),
    ):
        for case in cases:
            results[f"{kind} {case}"] = measured = measure(case, tables, copy)
            print(kind, case, measured, flush=True)
    if arguments.out:
        settings = {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_size": SIZE,
            "sink": SINK,
            "recent": RECENT,
            "prompt_recent": PROMPT_RECENT,
            "repeats": REPEATS,
        }
        print(write_record(arguments.out, "ops-h200", settings, results, commit=arguments.commit))


def timed(run: Callable[[], Any], in_graph: bool = True, repeats: int = REPEATS) -> dict[str, float]:
    """Median and quartiles in microseconds; small launches are replayed from a CUDA graph, as the server does."""
    run()
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return {"us": round(statistics.median(times), 1), "q1": round(quartiles[0], 1), "q3": round(quartiles[2], 1)}


def copy_bandwidth() -> float:
    """Bytes read and written by a large device-to-device copy, in TB/s."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return round(2 * source.numel() / timed(lambda: target.copy_(source), in_graph=False)["us"] / 1e6, 3)


def random_cache(num_requests: int, length: int, kept_from: int, tables: KernelTables) -> tuple[Any, ...]:
    """A history of random codes, and a band that holds the sink and the tokens from kept_from on."""
    layout, blocks = tables.codec.layout, -(-length // 128)
    heads, size = tables.codec.num_kv_heads, tables.codec.head_size
    cache = torch.randint(
        0, 256, (num_requests * blocks + 1, heads, 128, layout.record_bytes), dtype=torch.uint8, device=DEVICE
    )
    scales = (torch.rand(cache.shape[0], heads, 256, device=DEVICE) / 2 + 0.5).to(torch.bfloat16)
    cache.flatten(2)[..., layout.block_key_scale_start :] = scales.view(torch.uint8)
    order = torch.randperm(num_requests * blocks, device=DEVICE).to(torch.int32) + 1
    starts = torch.arange(-(-length // BAND_BLOCK)) * BAND_BLOCK
    kept = ((starts < SINK) | (starts + BAND_BLOCK > kept_from)).nonzero().flatten().to(DEVICE)
    band_table = torch.zeros(num_requests, len(starts), dtype=torch.int32, device=DEVICE)
    count = num_requests * len(kept)
    band_table[:, kept] = (torch.randperm(count, device=DEVICE).to(torch.int32) + 1).view(num_requests, -1)
    band = torch.randn(count + 1, heads, BAND_BLOCK, 2 * size, device=DEVICE).to(torch.bfloat16)
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device=DEVICE)
    history = PackedHistory(cache, tables.codec, tables)
    return history, band, order.view(num_requests, blocks), band_table, seq_lens


def check(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, which must be small: no number is printed for a wrong operation."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error < TOLERANCE:
        raise SystemExit(f"the operation's error is {error}; it must be below {TOLERANCE}")
    return round(error, 6)


def measure_decode(case: str, tables: KernelTables, copy: float) -> dict[str, Any]:
    """One decode step of `requests x context`."""
    num_requests, length = map(int, case.split("x"))
    history, band, table, band_table, seq_lens = random_cache(num_requests, length, length - RECENT, tables)
    query = torch.randn(num_requests, HEADS, SIZE, device=DEVICE).to(torch.bfloat16)
    output = torch.empty_like(query)
    workspace = DecodeWorkspace.allocate(num_requests, HEADS, KV_HEADS, SIZE, DEVICE)
    prompt_lens = seq_lens - 1
    options = (SIZE**-0.5, SINK, RECENT, PROMPT_RECENT)

    def run(use_cuda: bool) -> None:
        paged_decode(
            query, history, band, table, band_table, seq_lens, prompt_lens, *options, output=output,
            workspace=workspace, use_cuda=use_cuda,
        )  # fmt: skip

    plain = reference.QuantizedHistory(history.cache, tables.codec)
    expected = reference.paged_decode(
        query[:2], plain, band, table[:2], band_table[:2], seq_lens[:2], prompt_lens[:2], *options
    )
    record_bytes = num_requests * length * KV_HEADS * tables.codec.layout.record_bytes
    result: dict[str, Any] = {"splits": decode_op.num_splits(num_requests, KV_HEADS, SIZE, DEVICE)}
    for name, use_cuda in (("triton", False), ("cuda", True)):
        run(use_cuda)
        error = check(output[:2], expected)
        time_us = timed(lambda use_cuda=use_cuda: run(use_cuda))
        rate = record_bytes / time_us["us"] / 1e6
        result[name] = time_us | {"tb_per_s": round(rate, 3), "of_copy": round(rate / copy, 3), "error": error}
    result |= baseline_decode(num_requests, length, query)
    return result


def baseline_decode(num_requests: int, length: int, query: torch.Tensor) -> dict[str, Any]:
    """The same attention over an uncompressed paged cache."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return {}
    blocks = -(-length // 16)
    shape = (num_requests * blocks, 16, KV_HEADS, SIZE)
    table = torch.randperm(num_requests * blocks, device=DEVICE).to(torch.int32).view(num_requests, blocks)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_requests,), length, dtype=torch.int32, device=DEVICE)
    key = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    value = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones(num_requests, KV_HEADS, device=DEVICE)
    result = {}
    for name, dtype in (("bf16_flash_attention_3", torch.bfloat16), ("fp8_flash_attention_3", torch.float8_e4m3fn)):
        q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
        extra = {} if dtype is torch.bfloat16 else {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        run = lambda q=q, k=k, v=v, extra=extra: flash_attn_varlen_func(  # noqa: E731
            q, k, v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=length, seqused_k=lengths, block_table=table,
            softmax_scale=SIZE**-0.5, causal=True, fa_version=3, **extra,
        )  # fmt: skip
        try:
            result[name] = timed(run)
        except Exception as error:
            result[name] = {"error": str(error)[:200]}
    return result


def measure_store(num_tokens: int, tables: KernelTables, copy: float) -> dict[str, Any]:
    """Write `num_tokens` new tokens to both caches."""
    codec = tables.codec
    key = sample_keys(codec.to("cpu"), num_tokens).to(DEVICE)
    value = sample_values(codec.to("cpu"), num_tokens).to(DEVICE)
    slots = torch.randperm(num_tokens, device=DEVICE) + 128
    band_slots = torch.where(torch.arange(num_tokens, device=DEVICE) < RECENT, slots, 0)
    blocks = -(-num_tokens // 128) + 1
    caches = [
        (
            torch.zeros(blocks, KV_HEADS, 128, codec.layout.record_bytes, dtype=torch.uint8, device=DEVICE),
            torch.zeros(-(-(num_tokens + 128) // 16), KV_HEADS, 16, 2 * SIZE, dtype=torch.bfloat16, device=DEVICE),
        )
        for _ in range(2)
    ]
    reference.store(key, value, *caches[0], slots, band_slots, codec)
    store(key, value, *caches[1], slots, band_slots, tables)
    differing = float((caches[0][0] != caches[1][0]).double().mean())
    if differing > 1e-4:
        raise SystemExit(f"{differing:.2%} of the stored bytes differ from the reference's")
    time_us = timed(lambda: store(key, value, *caches[1], slots, band_slots, tables))
    return time_us | {"differing_bytes": round(differing, 9)}


def measure_prefill(case: str, tables: KernelTables, copy: float) -> dict[str, Any]:
    """One chunk of one request behind some context."""
    chunk, context = map(int, case.split("+"))
    length = chunk + context
    history, band, table, band_table, seq_lens = random_cache(1, length, context - PROMPT_RECENT, tables)
    query = torch.randn(chunk, HEADS, SIZE, device=DEVICE).to(torch.bfloat16)
    key = torch.randn(chunk, KV_HEADS, SIZE, device=DEVICE).to(torch.bfloat16)
    value = torch.randn_like(key)
    output = torch.empty_like(query)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE)
    arguments = (band, table, band_table, starts, seq_lens, seq_lens, SIZE**-0.5, SINK, RECENT, PROMPT_RECENT)
    # a later chunk finds this one's tokens in the band
    position = torch.arange(context, length, device=DEVICE)
    band_slots = band_table[0].long()[position // BAND_BLOCK] * BAND_BLOCK + position % BAND_BLOCK
    reference.write_band(key, value, band, band_slots)
    prefill(query, key, value, history, *arguments, output=output)
    # the last tokens of the chunk as a chunk of their own
    last = slice(chunk - 64, chunk)
    band_like = reference.QuantizedHistory(history.cache, tables.codec)
    full = reference.prefill(
        query[-512:], key[-512:], value[-512:], band_like, band, table, band_table,
        torch.tensor([0, 512], dtype=torch.int32), seq_lens, seq_lens, SIZE**-0.5, SINK, RECENT, PROMPT_RECENT,
    )  # fmt: skip
    error = check(output[last], full[-64:])
    time_us = timed(lambda: prefill(query, key, value, history, *arguments, output=output), repeats=5)
    operations = 4 * HEADS * SIZE * (chunk * context + chunk * chunk / 2)
    result: dict[str, Any] = time_us | {"tflop_per_s": round(operations / time_us["us"] / 1e6, 1), "error": error}
    result = {"triton": result}
    try:
        from vllm_novakv.backend.compat import flash_attention
    except ImportError:
        return result
    attend = flash_attention(SIZE)
    assert attend is not None, "vLLM has no FlashAttention on this GPU"
    workspace = PrefillWorkspace.allocate(chunk, PROMPT_RECENT, HEADS, KV_HEADS, SIZE, query.dtype, DEVICE)
    plan = make_plan([chunk], [length], PROMPT_RECENT, workspace.capacity, DEVICE)
    paged = (band, table, band_table, starts, seq_lens)

    def run_flash() -> None:
        flash_prefill(
            query, key, value, history, *paged, SIZE**-0.5, SINK, PROMPT_RECENT, None, output, plan, workspace, attend
        )

    output.fill_(torch.nan)
    run_flash()
    error = check(output[last], full[-64:])
    time_us = timed(run_flash, in_graph=False, repeats=5)
    result["flash"] = time_us | {"tflop_per_s": round(operations / time_us["us"] / 1e6, 1), "error": error}
    dense_key, dense_value = (torch.randn(length, KV_HEADS, SIZE, device=DEVICE).to(query.dtype) for _ in range(2))
    key_bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    baseline = timed(
        lambda: attend(
            query, dense_key, dense_value, starts, key_bounds, chunk, length, SIZE**-0.5, True, None, output
        ),
        in_graph=False,
        repeats=5,
    )
    result["bf16_flash_attention"] = baseline | {"tflop_per_s": round(operations / baseline["us"] / 1e6, 1)}
    return result


if __name__ == "__main__":
    main()
