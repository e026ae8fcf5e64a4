#!/usr/bin/env python3
"""What the decode kernel spends its time on, as Nsight Compute counts it; a JSON record per run.

    python benchmarks/decode_profile.py 64x30000 1x32768 --out benchmarks/records

Needs `ncu` and the right to read the GPU's counters. Cases are written as in ops.py. Times under the profiler are
longer than in a server: caches are cold and launches do not overlap.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ops import DEVICE, PROMPT_RECENT, RECENT, SINK, DecodeCase, random_caches, sample_tables

from vllm_novakv.codec.codebook import CODEBOOK_DTYPES, DEFAULT_DTYPE, CodebookDtype
from vllm_novakv.evaluation.record import write_record
from vllm_novakv.ops.paged_decode import paged_decode

FIGURES = {
    "gpu__time_duration.sum": "duration",
    "sm__cycles_elapsed.max": "cycles",
    "smsp__inst_executed.sum": "warp_instructions",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block_dynamic": "dynamic_shared",
    "dram__bytes_read.sum": "dram_bytes_read",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "shared_load_conflicts",
    "sm__inst_executed_pipe_tensor_op_hmma.sum": "tensor_instructions",
}
"""Metrics by their name in the record; ncu gives them in the units that it likes, which the record keeps."""

KEPT = re.compile(
    r"smsp__issue_active\.avg\.pct_of_peak_sustained_active"
    r"|sm__inst_executed_pipe_\w+\.avg\.pct_of_peak_sustained_active"
    r"|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio"
)
"""Further metrics, under their own names: issue slots and pipes in use, warps that wait per issued instruction."""

KERNEL = "decode_attend"


def main() -> None:
    """Profile every case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["64x30000", "128x8192", "1x32768"])
    parser.add_argument("--codebook-dtype", choices=CODEBOOK_DTYPES, default=DEFAULT_DTYPE)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.cases[0], arguments.codebook_dtype)
        return
    if shutil.which("ncu") is None:
        raise SystemExit("there is no `ncu` on the PATH; it comes with the CUDA toolkit")
    results = {}
    for case in arguments.cases:
        results[case] = figures = profile(case, arguments.codebook_dtype)
        print(case, figures, flush=True)
    if arguments.out:
        settings = {"kernel": KERNEL, "codebook_dtype": arguments.codebook_dtype}
        print(write_record(arguments.out, "decode-profile-h200", settings, results, commit=arguments.commit))


def run(case: str, dtype: CodebookDtype) -> None:
    """Three decode steps; the profiler looks at the second."""
    batch = DecodeCase.parse(case)
    tables = sample_tables(batch.kv_heads, batch.size, dtype)
    history, band, *paged = random_caches(batch.lengths, RECENT, tables)
    query = torch.randn(len(batch.lengths), batch.heads, batch.size, device=DEVICE).to(torch.bfloat16)
    options = (batch.size**-0.5, SINK, RECENT, PROMPT_RECENT)
    for _ in range(3):
        paged_decode(query, history, band, *paged, paged[-1] - 1, *options, use_cuda=True)
    torch.cuda.synchronize()


def profile(case: str, dtype: CodebookDtype) -> dict[str, Any]:
    """The kernel's figures.

    Raises:
        SystemExit: ncu could not read the counters.
    """
    command = [
        "ncu", "--clock-control", "none", "--set", "full", "--csv", "--page", "raw", "-k", f"regex:{KERNEL}",
        "--launch-skip", "1", "--launch-count", "1",
        sys.executable, __file__, case, "--codebook-dtype", dtype, "--run",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in output.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise SystemExit(f"ncu gave no figures:\n{output.stdout[-2000:]}\n{output.stderr[-2000:]}")
    names, units, values = list(csv.reader(io.StringIO("\n".join(lines))))[:3]
    figures = {}
    for name, unit, value in zip(names, units, values, strict=True):
        if name in FIGURES or KEPT.fullmatch(name):
            figures[FIGURES.get(name, name)] = f"{value} {unit}".strip()
    return figures


if __name__ == "__main__":
    main()
