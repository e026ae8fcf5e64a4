#!/usr/bin/env python3
"""Measure launch settings of the Triton kernels on this GPU and write its rows into vllm_novakv/ops/launch.json.

    python benchmarks/tune_launch.py --jobs 12

Every candidate is compiled first, by several processes at a time, then timed alone as part of the operation that it
belongs to; candidates that do not compile or do not fit the GPU are left out. Rows of other architectures stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from ops import PROMPT_RECENT, RECENT, SINK, random_cache, timed
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from codec_samples import sample_codec

from vllm_novakv.ops import flash_prefill, launch, paged_decode, prefill, store
from vllm_novakv.ops.launch import Launch, Row
from vllm_novakv.ops.tables import KernelTables

KV_HEADS = 8
LARGEST_BATCH = 1 << 30
CANDIDATES = {
    "fold": [Launch(n, 0, 4, stages) for n, stages in itertools.product((16, 32, 64), (1, 2))],
    "history": [Launch(n, 0, warps, 1) for n, warps in itertools.product((32, 64, 128), (4, 8))],
    "merge": [Launch(n, 0, warps, 2) for n, warps in itertools.product((32, 64), (4, 8))],
    "prefill": [Launch(m, n, w, 1) for m, n, w in itertools.product((64, 128), (32, 64), (4, 8))],
    "store": [Launch(n, 0, warps, 2) for n, warps in itertools.product((8, 16, 32, 64), (4, 8))],
    "gather": [Launch(n, 0, warps, 1) for n, warps in itertools.product((32, 64, 128), (4, 8))],
    "merge_pass": [Launch(n, 0, 4, 1) for n in (16, 32, 64)],
}
BATCHES = {
    "fold": (4, 32, LARGEST_BATCH),
    "history": (4, 32, LARGEST_BATCH),
    "merge": (4, 32, LARGEST_BATCH),
    "prefill": (LARGEST_BATCH,),
    "store": (512, LARGEST_BATCH),
    "gather": (LARGEST_BATCH,),
    "merge_pass": (LARGEST_BATCH,),
}
DECODE_SHAPES = {4: (1, 32_768), 32: (16, 8192), LARGEST_BATCH: (128, 4096)}
"""Requests and context that stand for a batch band."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size: the fields of `vllm_novakv.ops.launch.Row`."""

    operation: str
    head_size: int
    query_rows: int
    max_batch: int


@contextmanager
def using(operation: str, candidate: Launch) -> Iterator[None]:
    """Launch one kernel with these settings, the others as the table says."""

    def launch_for(asked: str, *arguments: object, **options: object) -> Launch:
        return candidate if asked == operation else launch.launch_for(asked, *arguments, **options)

    with (
        patch.object(paged_decode, "launch_for", launch_for),
        patch.object(prefill, "launch_for", launch_for),
        patch.object(store, "launch_for", launch_for),
        patch.object(flash_prefill, "launch_for", launch_for),
    ):
        yield


def operation_of(case: Case, is_small: bool = False) -> Callable[[], object]:
    """The call that a case times; ``is_small`` only compiles the same kernel."""
    device = torch.device("cuda")
    size, heads = case.head_size, KV_HEADS * (16 if case.query_rows == 16 else 4)
    tables = KernelTables.build(sample_codec(KV_HEADS, size, num_centroids=256).to(device))

    def normal(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, size, device=device).to(torch.bfloat16)

    if case.operation == "store":
        count = min(case.max_batch, 16_384)
        key, value = normal(count, KV_HEADS), normal(count, KV_HEADS)
        slots = torch.randperm(count, device=device) + 128
        band_slots = torch.where(torch.arange(count, device=device) < RECENT, slots, 0)
        history, band, *_ = random_cache(1, count + 128, 0, tables)
        return lambda: store.store(key, value, history.cache, band, slots, band_slots, tables, use_cuda=False)
    if case.operation in ("fold", "history", "merge"):
        count, length = DECODE_SHAPES[case.max_batch]
        if is_small:
            length = 1024
        history, band, table, band_table, seq_lens = random_cache(count, length, length - RECENT, tables)
        query = normal(count, heads)
        output = torch.empty_like(query)
        workspace = paged_decode.DecodeWorkspace.allocate(count, heads, KV_HEADS, size, device)
        use_cuda = False if case.operation == "history" else None
        return lambda: paged_decode.paged_decode(
            query, history, band, table, band_table, seq_lens, seq_lens - 1, size**-0.5, SINK, RECENT, PROMPT_RECENT,
            output=output, workspace=workspace, use_cuda=use_cuda,
        )  # fmt: skip
    chunk, context = (256, 2048) if is_small else (2048, 8192)
    history, band, table, band_table, seq_lens = random_cache(1, chunk + context, context - PROMPT_RECENT, tables)
    query, key, value = normal(chunk, heads), normal(chunk, KV_HEADS), normal(chunk, KV_HEADS)
    output = torch.empty_like(query)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    paged = (band, table, band_table, starts, seq_lens)
    windows = (SINK, RECENT, PROMPT_RECENT)
    if case.operation == "prefill":
        return lambda: prefill.prefill(
            query, key, value, history, *paged, seq_lens, size**-0.5, *windows, output=output
        )
    from vllm_novakv.backend.compat import flash_attention

    attend = flash_attention(size)
    assert attend is not None, "vLLM has no FlashAttention on this GPU"
    workspace = flash_prefill.PrefillWorkspace.allocate(
        chunk, PROMPT_RECENT, heads, KV_HEADS, size, query.dtype, device
    )
    plan = flash_prefill.make_plan([chunk], [chunk + context], PROMPT_RECENT, workspace.capacity, device)
    return lambda: flash_prefill.flash_prefill(
        query, key, value, history, *paged, size**-0.5, SINK, PROMPT_RECENT, None, output, plan, workspace, attend
    )


def compile_candidate(case: Case, candidate: Launch) -> bool:
    """Fill Triton's cache on disk; whether the candidate runs at all. Any error but Triton's own ends the run."""
    try:
        with using(case.operation, candidate):
            operation_of(case, is_small=True)()
        torch.cuda.synchronize()
    except (OutOfResources, CompilationError) as error:
        print(f"{case} {candidate}: {str(error).splitlines()[0][:100]}", flush=True)
        return False
    return True


def main() -> None:
    """Compile, time, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--head-sizes", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile")
    parser.add_argument("--out", type=Path, default=launch.TABLE, help="the table to write")
    arguments = parser.parse_args()
    cases = [
        Case(operation, size, rows, batch)
        for operation in arguments.operations
        for size in arguments.head_sizes
        for rows in ((8, 16) if operation in ("fold", "history", "merge") else (0,))
        for batch in BATCHES[operation]
    ]
    # a batch band compiles nothing of its own, but small decode batches have other kernels than large ones
    compiled = [case for case in cases if case.max_batch in (BATCHES[case.operation][0], LARGEST_BATCH)]
    trials = [(case, candidate) for case in compiled for candidate in CANDIDATES[case.operation]]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(compile_candidate, *zip(*trials, strict=True), chunksize=4))
    broken = {
        (case.operation, case.head_size, case.query_rows, candidate)
        for (case, candidate), is_usable in zip(trials, runs, strict=True)
        if not is_usable
    }
    architecture = launch.architecture_of(torch.device("cuda"))
    measured = []
    for case in cases:
        run = operation_of(case)
        times = {}
        for candidate in CANDIDATES[case.operation]:
            if (case.operation, case.head_size, case.query_rows, candidate) in broken:
                continue
            with using(case.operation, candidate):
                times[candidate] = timed(run, in_graph=case.operation not in ("gather", "merge_pass"))["us"]
        best = min(times, key=lambda candidate: times[candidate])
        print(case, best, times[best], "us; slowest", max(times.values()), flush=True)
        measured.append(Row(case.operation, architecture, case.head_size, case.query_rows, case.max_batch, best))
    write_table(arguments.out, measured)


def write_table(path: Path, measured: list[Row]) -> None:
    """Replace the rows of the measured kernels; one row a line."""

    def key(row: Row) -> tuple[str, int, int, int]:
        return (row.operation, row.architecture, row.head_size, row.query_rows)

    fresh = {key(row) for row in measured}
    rows = sorted(
        [row for row in launch.read_table() if key(row) not in fresh] + measured,
        key=lambda row: (*key(row), row.max_batch),
    )
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
