#!/usr/bin/env python3
"""Time of the three operations on a GPU, after checking each against the reference; a JSON record per run.

    python benchmarks/ops.py --out benchmarks/records

Decode's effective bandwidth counts the record bytes of the context, each read once; a copy of the same GPU, bytes read
and written counted, is measured in the same run. As in a server, where every layer has a cache of its own, several
calls follow each other in one CUDA graph, over caches that together are twice the L2 cache, and a call's time is the
graph's over their number. The baseline is vLLM's FlashAttention 3 over uncompressed BF16 and FP8 caches, timed alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from codec_samples import sample_codec, sample_keys, sample_values

from vllm_novakv.codec.codebook import CODEBOOK_DTYPES, DEFAULT_DTYPE, CodebookDtype
from vllm_novakv.evaluation.record import write_record
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
DECODE_CASES = [
    "64x30000", "128x8192", "16x30000", "4x90000", "64x8192", "1x131072", "1x32768", "63x1000+1x128000",
    "14/2x64:64x30000", "12/2x128:64x30000", "64/8x64:16x30000", "4/1x256:64x30000",
]  # fmt: skip
CALLS = 8
"""Calls in a graph, at least."""

TOLERANCE = 1e-2


@dataclass(frozen=True)
class DecodeCase:
    """A decode step, written `[HEADS/KV_HEADSxSIZE:]REQUESTSxCONTEXT[+REQUESTSxCONTEXT…]`.

    >>> DecodeCase.parse("14/2x64:2x1000+1x9000")
    DecodeCase(heads=14, kv_heads=2, size=64, lengths=(1000, 1000, 9000))
    """

    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> DecodeCase:
        """The case that a text describes."""
        model, _, batch = text.rpartition(":")
        heads, kv_heads, size = HEADS, KV_HEADS, SIZE
        if model:
            counts, size = model.split("x")[0], int(model.split("x")[1])
            heads, kv_heads = map(int, counts.split("/"))
        parts = [tuple(map(int, part.split("x"))) for part in batch.split("+")]
        return cls(heads, kv_heads, size, tuple(length for count, length in parts for _ in range(count)))


def main() -> None:
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--codebook-dtype", choices=CODEBOOK_DTYPES, default=DEFAULT_DTYPE, help="of the centroids")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--decode", nargs="*", default=DECODE_CASES)
    parser.add_argument("--prefill", nargs="*", default=["16384+0", "13616+16384"], help="chunk+context")
    parser.add_argument("--store", nargs="*", type=int, default=[1, 16, 128, 256, 512, 16384])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tables = sample_tables(KV_HEADS, SIZE, arguments.codebook_dtype)
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
            "calls": CALLS,
            "codebook_dtype": arguments.codebook_dtype,
        }
        print(write_record(arguments.out, "ops-h200", settings, results, commit=arguments.commit))


def sample_tables(kv_heads: int, size: int, dtype: CodebookDtype) -> KernelTables:
    """Tables of a codec with centroids of a type."""
    return KernelTables.build(sample_codec(kv_heads, size, num_centroids=256, book=dtype).to(DEVICE))


def timed(run: Callable[[], Any], in_graph: bool = True, repeats: int = REPEATS, calls: int = 1) -> dict[str, float]:
    """Median and quartiles in microseconds of a call; small launches are replayed from a CUDA graph, as in a server.

    Args:
        run: what is timed.
        in_graph: whether a CUDA graph holds it.
        repeats: how often.
        calls: how many calls of the operation are in it.
    """
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
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    quartiles = statistics.quantiles(times, n=4)
    return {"us": round(statistics.median(times), 1), "q1": round(quartiles[0], 1), "q3": round(quartiles[2], 1)}


def copies_beyond_l2(num_bytes: int) -> int:
    """Caches of this size that together are at least twice the L2 cache."""
    return max(1, -(-2 * torch.cuda.get_device_properties(DEVICE).L2_cache_size // num_bytes))


def timed_over(runs: Sequence[Callable[[], Any]]) -> dict[str, float]:
    """Time of one call, where calls follow each other, each with the next of several caches."""
    calls = list(islice(cycle(runs), max(CALLS, len(runs))))
    return timed(lambda: [call() for call in calls], calls=len(calls))


def copy_bandwidth() -> float:
    """Bytes read and written by a large device-to-device copy, in TB/s."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return round(2 * source.numel() / timed(lambda: target.copy_(source), in_graph=False)["us"] / 1e6, 3)


def random_cache(num_requests: int, length: int, kept_from: int, tables: KernelTables) -> tuple[Any, ...]:
    """A history of random codes, and a band that holds the sink and the tokens from kept_from on."""
    return random_caches([length] * num_requests, length - kept_from, tables)


def random_caches(lengths: Sequence[int], num_kept: int, tables: KernelTables) -> tuple[Any, ...]:
    """A history of random codes, and a band that holds the sink and the latest tokens of every request.

    Args:
        lengths: of the requests.
        num_kept: latest tokens that the band holds.
        tables: of the codec.
    """
    layout, heads, size = tables.codec.layout, tables.codec.num_kv_heads, tables.codec.head_size
    blocks = [-(-length // 128) for length in lengths]
    cache = torch.randint(0, 256, (sum(blocks) + 1, heads, 128, layout.record_bytes), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(cache.shape[0], heads, 256, device=DEVICE) / 2 + 0.5).to(torch.bfloat16)
    cache.flatten(2)[..., layout.block_key_scale_start :] = scales.view(torch.uint8)
    history_table = table_of([torch.arange(count) for count in blocks])
    held = []
    for length in lengths:
        starts = torch.arange(-(-length // BAND_BLOCK)) * BAND_BLOCK
        held.append(((starts < SINK) | (starts + BAND_BLOCK > length - num_kept)).nonzero().flatten())
    band_table = table_of(held)
    band = torch.randn(sum(map(len, held)) + 1, heads, BAND_BLOCK, 2 * size, device=DEVICE).to(torch.bfloat16)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return PackedHistory(cache, tables.codec, tables), band, history_table, band_table, seq_lens


def table_of(entries: Sequence[torch.Tensor]) -> torch.Tensor:
    """A block table whose requests hold blocks at these entries, in random order from block 1 on; the others are 0."""
    order = iter((torch.randperm(sum(map(len, entries))) + 1).split(list(map(len, entries))))
    table = torch.zeros(len(entries), max(int(e[-1]) for e in entries) + 1, dtype=torch.int32)
    for row, places in zip(table, entries, strict=True):
        row[places] = next(order).to(torch.int32)
    return table.to(DEVICE)


def check(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, which must be small: no number is printed for a wrong operation."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error < TOLERANCE:
        raise SystemExit(f"the operation's error is {error}; it must be below {TOLERANCE}")
    return round(error, 6)


def measure_decode(case: str, tables: KernelTables, copy: float) -> dict[str, Any]:
    """One decode step."""
    batch = DecodeCase.parse(case)
    num_requests = len(batch.lengths)
    if (batch.kv_heads, batch.size) != (KV_HEADS, SIZE):
        tables = sample_tables(batch.kv_heads, batch.size, CODEBOOK_DTYPES[tables.centroid_format])
    record_bytes = sum(batch.lengths) * batch.kv_heads * tables.codec.layout.record_bytes
    caches = [random_caches(batch.lengths, RECENT, tables) for _ in range(copies_beyond_l2(record_bytes))]
    query = torch.randn(num_requests, batch.heads, batch.size, device=DEVICE).to(torch.bfloat16)
    output = torch.empty_like(query)
    workspace = DecodeWorkspace.allocate(num_requests, batch.heads, batch.kv_heads, batch.size, DEVICE)
    prompt_lens = caches[0][-1] - 1
    options = (batch.size**-0.5, SINK, RECENT, PROMPT_RECENT)

    def call(use_cuda: bool, history: PackedHistory, band: torch.Tensor, *paged: torch.Tensor) -> torch.Tensor:
        return paged_decode(
            query, history, band, *paged, prompt_lens, *options, output=output, workspace=workspace, use_cuda=use_cuda
        )

    history, band, *paged = caches[0]
    # the first and the last: the reference is slow
    checked = torch.tensor([0, num_requests - 1], device=DEVICE)
    expected = reference.paged_decode(
        query[checked], reference.QuantizedHistory(history.cache, tables.codec), band,
        *(x[checked] for x in (*paged, prompt_lens)), *options,
    )  # fmt: skip
    result: dict[str, Any] = {}
    for name, use_cuda in (("triton", False), ("cuda", True)):
        runs = [partial(call, use_cuda, *cache) for cache in caches]
        runs[0]()
        error = check(output[checked], expected)
        time_us = timed_over(runs)
        rate = record_bytes / time_us["us"] / 1e6
        result[name] = time_us | {"tb_per_s": round(rate, 3), "of_copy": round(rate / copy, 3), "error": error}
    result["store"] = measure_added_store([partial(call, True, *cache) for cache in caches], caches, tables)
    del caches, history, band, paged, runs
    return result | baseline_decode(batch, query)


def measure_added_store(
    decodes: Sequence[Callable[[], Any]], caches: Sequence[tuple[Any, ...]], tables: KernelTables
) -> dict[str, float]:
    """What storing a step's tokens adds to its decode: they overlap, and follow the kernel that wrote the keys.

    Args:
        decodes: a decode for each of the caches.
        caches: as `random_caches` makes them.
        tables: of the codec.
    """
    codec = tables.codec
    *_, history_table, band_table, seq_lens = caches[0]
    new_key, value = (
        sample(codec.to("cpu"), len(seq_lens)).to(DEVICE, torch.bfloat16) for sample in (sample_keys, sample_values)
    )
    key = torch.empty_like(new_key)

    def step(is_stored: bool, decode: Callable[[], Any], history: PackedHistory, band: torch.Tensor) -> None:
        key.copy_(new_key)
        if is_stored:
            store(key, value, history.cache, band, *slots, tables)
        decode()

    slots = [slots_of(table, seq_lens - 1, block) for table, block in ((history_table, 128), (band_table, BAND_BLOCK))]
    times = [
        timed_over([partial(step, s, decode, *cache[:2]) for decode, cache in zip(decodes, caches, strict=True)])["us"]
        for s in (False, True)
    ]
    return {"us": times[1], "without_us": times[0], "adds_us": round(times[1] - times[0], 1)}


def slots_of(table: torch.Tensor, positions: torch.Tensor, block: int) -> torch.Tensor:
    """The slot of one token of each request: block times its size, and the place in it."""
    entries = table.gather(1, (positions // block).long()[:, None]).flatten()
    return entries.long() * block + positions % block


def baseline_decode(batch: DecodeCase, query: torch.Tensor) -> dict[str, Any]:
    """The same attention over an uncompressed paged cache."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return {}
    num_requests = len(batch.lengths)
    blocks = [-(-length // 16) for length in batch.lengths]
    shape = (sum(blocks) + 1, 16, batch.kv_heads, batch.size)
    table = table_of([torch.arange(count) for count in blocks])
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=DEVICE)
    ones = torch.ones(num_requests, batch.kv_heads, device=DEVICE)
    result = {}
    for name, dtype in (("bf16_flash_attention_3", torch.bfloat16), ("fp8_flash_attention_3", torch.float8_e4m3fn)):
        num_bytes = 2 * sum(batch.lengths) * batch.kv_heads * batch.size * dtype.itemsize
        caches = [
            [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).to(dtype) for _ in range(2)]
            for _ in range(copies_beyond_l2(num_bytes))
        ]
        q = query.to(dtype)
        extra = {} if dtype is torch.bfloat16 else {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        runs = [
            partial(
                flash_attn_varlen_func, q, k, v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=max(batch.lengths),
                seqused_k=lengths, block_table=table, softmax_scale=batch.size**-0.5, causal=True, fa_version=3,
                **extra,
            )
            for k, v in caches
        ]  # fmt: skip
        try:
            result[name] = timed_over(runs)
        except Exception as error:
            result[name] = {"error": str(error)[:200]}
        del caches, runs
    return result


def measure_store(num_tokens: int, tables: KernelTables, copy: float) -> dict[str, Any]:
    """Write `num_tokens` new tokens to both caches."""
    codec = tables.codec
    key = sample_keys(codec.to("cpu"), num_tokens).to(DEVICE)
    value = sample_values(codec.to("cpu"), num_tokens).to(DEVICE)
    slots = torch.randperm(num_tokens, device=DEVICE) + 128
    band_slots = torch.where(torch.arange(num_tokens, device=DEVICE) < RECENT, slots, 0)
    blocks = -(-num_tokens // 128) + 1
    pages = [
        (
            torch.zeros(blocks, KV_HEADS, 128, codec.layout.record_bytes, dtype=torch.uint8, device=DEVICE),
            torch.zeros(-(-(num_tokens + 128) // 16), KV_HEADS, 16, 2 * SIZE, dtype=torch.bfloat16, device=DEVICE),
        )
        for _ in range(CALLS)
    ]
    reference.store(key, value, *pages[0], slots, band_slots, codec)
    store(key, value, *pages[1], slots, band_slots, tables)
    differing = float((pages[0][0] != pages[1][0]).double().mean())
    if differing > 1e-4:
        raise SystemExit(f"{differing:.2%} of the stored bytes differ from the reference's")
    # as in a server: rows of 16 bits, other blocks in every call
    key, value = key.to(torch.bfloat16), value.to(torch.bfloat16)
    time_us = timed_over([partial(store, key, value, *page, slots, band_slots, tables) for page in pages])
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
