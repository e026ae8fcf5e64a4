#!/usr/bin/env python3
"""Turn records into the tables of README.md and docs/choices.md, and the plots beside them.

    python benchmarks/report.py            # rewrites the marked parts of both pages, and docs/plots/*.png
    python benchmarks/report.py --check    # fails if a page says anything else than the records

A part of a page between `<!-- records: NAME -->` and `<!-- end -->` belongs to this script. Each NAME is a table
below; it is made from the newest record of its kind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from choices_tables import COLUMNS, alternatives_table, exact_layers_table, layers_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "choices.md", ROOT / "docs" / "decode-kernel.md")
RECORDS = ROOT / "benchmarks" / "records"
PLOTS = ROOT / "docs" / "plots"
MARKED = re.compile(r"(<!-- records: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CACHE_NAMES = {
    "novakv": "2-bit",
    "bf16": "BF16, FlashAttention 3",
    "fp8": "FP8, FlashAttention 3",
    "stock": "vLLM's own, model's type",
}
KIND_NAMES = {
    "attention": "attention",
    "gemm": "matrix products",
    "store": "writing the cache",
    "other": "other kernels",
}
CHOICES_RECORDS = {
    "SmolLM2": r".*codec-choices-smollm2-135m",
    "Qwen": r".*codec-choices-qwen2.5-coder-0.5b",
}
CACHE_COLOURS = {"novakv": "#1b7f5c", "bf16": "#8a8f98", "fp8": "#c9803a"}


@dataclass(frozen=True)
class Record:
    """One file of benchmarks/records.

    Args:
        path: the file.
        date: ISO time of the run.
        results: what was measured.
        settings: what was chosen.
    """

    path: Path
    date: str
    results: dict[str, Any]
    settings: dict[str, Any]

    @property
    def link(self) -> str:
        """A link to the file, as README.md writes it."""
        return f"[record]({self.path.relative_to(ROOT)})"


def newest(pattern: str, directory: Path = RECORDS) -> Record:
    """The newest record whose file name matches.

    Args:
        pattern: of the file name, a regular expression that matches from its start.
        directory: where the records are.

    Raises:
        SystemExit: there is none.
    """
    found = []
    for path in directory.glob("*.json"):
        if not re.match(pattern, path.name):
            continue
        content = json.loads(path.read_text())
        found.append(Record(path, content["date"], content["results"], content["settings"]))
    if not found:
        raise SystemExit(f"{directory} has no record {pattern}")
    return max(found, key=lambda record: (record.date, record.path.name))


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def thousands(shape: str) -> str:
    """ "16x30000" as "16 x 30,000", "63x1000+1x128000" as "63 x 1,000 and 1 x 128,000"."""
    parts = (part.split("x") for part in shape.split("+"))
    return " and ".join(f"{count} x {int(length):,}" for count, length in parts)


def operations_table() -> str:
    """Microseconds of decode, store and prefill beside FlashAttention's."""
    record = newest(r".*ops-h200")
    rows = []
    for name, figures in record.results.items():
        kind, _, case = name.partition(" ")
        if kind == "decode":
            ours, bf16, fp8 = (figures.get(k, {}) for k in ("cuda", "bf16_flash_attention_3", "fp8_flash_attention_3"))
            model, _, batch = case.rpartition(":")
            heads, _, size = model.partition("x")
            label = f"decode, {thousands(batch)} tokens" + (f", {heads} heads of {size}" if model else "")
            rate = f"{ours['tb_per_s']:.2f} TB/s, {ours['of_copy']:.0%} of a copy's"
            added = f"{figures['store']['adds_us']:.1f}"
            rows.append([label, f"{ours['us']:,.0f}", added, microseconds(bf16), microseconds(fp8), rate])
        elif kind == "prefill":
            chunk, context = (int(part) for part in case.split("+"))
            label = f"prefill, {chunk:,} tokens" + (f" after {context:,}" if context else "")
            ours, bf16 = figures["flash"], figures["bf16_flash_attention"]
            rate = f"{ours['tflop_per_s']:.0f} TFLOP/s, BF16 {bf16['tflop_per_s']:.0f}"
            rows.append([label, microseconds(ours), "-", microseconds(bf16), "-", rate])
        elif kind == "store":
            tokens = "token" if case == "1" else "tokens"
            rows.append([f"store, {int(case):,} {tokens}", microseconds(figures), "-", "-", "-", ""])
    heads = f"{record.settings['heads']}/{record.settings['kv_heads']} heads of {record.settings['head_size']} dims"
    caption = (
        f"Microseconds on an H200, {heads} ({record.link}); the store of a step's tokens overlaps with its decode, "
        "and adds the time that a graph of both takes longer; a rate of decode counts the bytes of the records:\n\n"
    )
    ours, bf16, fp8 = (CACHE_NAMES[cache] for cache in ("novakv", "bf16", "fp8"))
    return caption + table(["operation", ours, "its store adds", bf16, fp8, "2-bit rate"], rows)


def microseconds(figures: Mapping[str, Any]) -> str:
    """A time, or a dash where there is none."""
    return f"{figures['us']:,.0f}" if "us" in figures else "-"


def engine_table() -> str:
    """Decode steps, prefill, pool and throughput inside the server's engine."""
    record = newest(r".*engine-h200")
    caches = [cache for cache in CACHE_NAMES if cache in record.results]
    shapes = record.settings["shapes"]

    def row(label: str, shape: str, name: str, form: str) -> list[str]:
        return [label, *(figure(record.results[cache].get(shape, {}), name, form) for cache in caches)]

    def decode_row(shape: str) -> list[str]:
        return row(f"decode step, {thousands(shape)} tokens, ms", shape, "decode_step_ms", ".2f")

    rows = [decode_row(shape) for shape in shapes]
    rows += [
        row(f"prefill of {thousands(shape)} tokens, tokens/s", shape, "prefill_tokens_per_s", ",.0f")
        for shape in shapes
    ]
    rows.append(["pool, tokens", *(figure(record.results[cache], "pool_tokens", ",") for cache in caches)])
    if fill := record.settings.get("fill"):
        batch = f"fill {fill}"
        rows.append(row(f"requests of {fill:,} tokens in the pool at once", batch, "requests", ","))
        rows.append(row("of which preempted", batch, "preemptions", ","))
        rows.append(row("tokens/s decoding them", batch, "tokens_per_s", ",.0f"))
    for shape in record.settings["profile"]:
        rows.append(decode_row(shape))
        kinds = [record.results[cache].get(shape, {}).get("gpu_ms_by_kind", {}) for cache in caches]
        rows += [
            [f"of which {title}, ms", *(figure(k, kind, ".2f") for k in kinds)] for kind, title in KIND_NAMES.items()
        ]
    caption = (
        "vLLM 0.32 on one H200, a model of Qwen3-8B's shape with random weights, chunks of "
        f"{record.settings['chunk']:,} tokens, {record.settings['memory']:.0%} of the memory ({record.link}):\n\n"
    )
    return caption + table(["", *(CACHE_NAMES[cache] for cache in caches)], rows)


def figure(figures: Mapping[str, Any], name: str, form: str) -> str:
    """A number in its form, or a dash where there is none."""
    return format(figures[name], form) if name in figures else "-"


def accuracy_table() -> str:
    """Perplexity and needles of every model, newest record each."""
    blocks = []
    for pattern, title in (
        (r".*accuracy-smollm2-cpu", "SmolLM2-135M-Instruct, fp32, CPU"),
        (r".*accuracy-smollm2-h200-fp32", "SmolLM2-135M-Instruct, fp32, H200"),
        (r".*accuracy-qwen2.5-coder-0.5b-h200", "Qwen2.5-Coder-0.5B-Instruct, BF16, H200"),
    ):
        try:
            record = newest(pattern)
        except SystemExit:
            continue
        caches = [cache for cache in ("stock", "fp8", "novakv") if cache in record.results]
        window, count = record.settings["window_tokens"], record.settings["num_windows"]
        label = f"perplexity, {count} windows of {window:,} tokens of essays"
        rows = [[label, *(f"{record.results[cache]['perplexity']:.3f}" for cache in caches)]]
        for length in record.settings["needle_lengths"]:
            needles = [record.results[cache]["needles"][str(length)] for cache in caches]
            label = f"one number hidden in {length:,} tokens, {needles[0]['asked']} prompts"
            rows.append([label, *(f"{needle['found']} found" for needle in needles)])
        names = [CACHE_NAMES[cache] if cache != "fp8" else "FP8" for cache in caches]
        blocks.append(table([f"{title} ({record.link})", *names], rows))
    return "\n".join(blocks)


def plot_decode_steps(path: Path) -> None:
    """Bars of decode steps inside the engine by shape and cache."""
    from matplotlib import pyplot

    record = newest(r".*engine-h200")
    shapes = record.settings["shapes"]
    caches = [cache for cache in CACHE_COLOURS if cache in record.results]
    figure_, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    width = 0.8 / len(caches)
    for i, cache in enumerate(caches):
        values = [record.results[cache].get(shape, {}).get("decode_step_ms", 0.0) for shape in shapes]
        places = [place + (i - (len(caches) - 1) / 2) * width for place in range(len(shapes))]
        bars = axes.bar(places, values, width, label=CACHE_NAMES[cache], color=CACHE_COLOURS[cache])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(shapes)), [f"{thousands(shape)}" for shape in shapes])
    axes.set_xlabel("requests x context tokens")
    axes.set_ylabel("decode step, ms")
    axes.legend(frameon=False)
    figure_.savefig(path, dpi=150)
    pyplot.close(figure_)


def plot_decode_operation(path: Path) -> None:
    """Bars of the decode operation's time by shape and cache."""
    from matplotlib import pyplot

    record = newest(r".*ops-h200")
    # of the record's own shape of heads
    cases = {
        name.partition(" ")[2]: figures
        for name, figures in record.results.items()
        if name.startswith("decode ") and ":" not in name
    }
    keys = {"novakv": "cuda", "bf16": "bf16_flash_attention_3", "fp8": "fp8_flash_attention_3"}
    figure_, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for i, (cache, key) in enumerate(keys.items()):
        values = [figures.get(key, {}).get("us", 0.0) for figures in cases.values()]
        bars = axes.bar(
            [place + (i - 1) * 0.27 for place in range(len(cases))],
            values,
            0.27,
            label=CACHE_NAMES[cache],
            color=CACHE_COLOURS[cache],
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(cases)), [thousands(case).replace(" and ", "\n") for case in cases], fontsize=8)
    axes.set_xlabel("requests x context tokens")
    axes.set_ylabel("attention of one layer, µs")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    figure_.savefig(path, dpi=150)
    pyplot.close(figure_)


def profile_table() -> str:
    """What Nsight Compute says of the decode kernel."""
    record = newest(r".*decode-profile-h200")
    # "1,234 byte": a number and its unit
    cases = {
        case: {name: float(text.split()[0].replace(",", "")) for name, text in figures.items()}
        for case, figures in record.results.items()
    }

    def row(title: str, form: str, value: Callable[[Mapping[str, float]], float]) -> list[str]:
        return [title, *(format(value(figures), form) for figures in cases.values())]

    def share(title: str, name: str) -> list[str]:
        return row(f"{title}, %", ".0f", lambda figures: figures[f"{name}.avg.pct_of_peak_sustained_active"])

    def stall(title: str, name: str) -> list[str]:
        key = f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
        return row(f"of which {title}", ".2f", lambda figures: figures[key])

    def latency(figures: Mapping[str, float]) -> float:
        return sum(value for name, value in figures.items() if "_issue_stalled_" in name)

    rows = [
        row("duration, µs", ".0f", lambda figures: figures["duration"] / 1e3),
        row("read from memory, TB/s", ".2f", lambda figures: figures["dram_bytes_read"] / figures["duration"] / 1e3),
        row("instructions of warps, millions", ".1f", lambda figures: figures["warp_instructions"] / 1e6),
        share("issue slots in use", "smsp__issue_active"),
        share("pipe of integers, logic, comparisons in use", "sm__inst_executed_pipe_alu"),
        share("pipe of loads and shared memory in use", "sm__inst_executed_pipe_lsu"),
        share("pipe of multiplications in use", "sm__inst_executed_pipe_fma"),
        share("pipe of conversions and exponentials in use", "sm__inst_executed_pipe_xu"),
        share("tensor cores in use", "sm__inst_executed_pipe_tensor_op_hmma"),
        row("cycles from a warp's instruction to its next", ".2f", latency),
        stall("fixed, by the kind of instruction", "wait"),
        stall("its own issue", "selected"),
        stall("other warps' turns", "not_selected"),
        stall("a pipe in use", "math_pipe_throttle"),
        stall("global memory", "long_scoreboard"),
        stall("shared memory", "short_scoreboard"),
        stall("a barrier", "barrier"),
    ]
    return table(["*attend*", *(f"{thousands(case)} tokens" for case in cases)], rows)


def choices_table(family: str) -> str:
    """Alternatives to a choice of the codec, all models side by side."""
    models = {name: newest(pattern).results for name, pattern in CHOICES_RECORDS.items()}
    return table(*(exact_layers_table(models) if family == "exact" else alternatives_table(models, family)))


def choices_layers_table(model: str) -> str:
    """The default's errors in every layer of one model."""
    return table(*layers_table(newest(CHOICES_RECORDS[model]).results))


TABLES: dict[str, Callable[[], str]] = {
    "operations": operations_table,
    "engine": engine_table,
    "accuracy": accuracy_table,
    "profile": profile_table,
    **{f"choices-{family}": partial(choices_table, family) for family in (*COLUMNS, "exact")},
    **{f"choices-layers-{model.lower()}": partial(choices_layers_table, model) for model in ("SmolLM2", "Qwen")},
}
PLOT_FILES: dict[str, Callable[[Path], None]] = {
    "decode-operation.png": plot_decode_operation,
    "decode-step.png": plot_decode_steps,
}


def rewritten(text: str) -> str:
    """A page with every marked part made anew.

    Raises:
        SystemExit: a part has a name that no table has.
    """

    def part(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"a page has a part {name!r}; the tables are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[name]()}\n{match[3]}"

    return MARKED.sub(part, text)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    arguments = parser.parse_args()
    texts = {page: page.read_text() for page in PAGES}
    fresh = {page: rewritten(text) for page, text in texts.items()}
    if arguments.check:
        different = [page.name for page in PAGES if fresh[page] != texts[page]]
        for name in different:
            print(f"{name} differs from the records: run benchmarks/report.py", file=sys.stderr)
        return int(bool(different))
    for page, text in fresh.items():
        page.write_text(text)
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOT_FILES.items():
        # only what a page shows
        if any(name in text for text in texts.values()):
            plot(PLOTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
