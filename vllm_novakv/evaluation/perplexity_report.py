"""The report's section on perplexity: totals, paired changes, and a plot by position."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.perplexity_run import (
    WINDOWS_NAME,
    WindowLosses,
    read_windows,
    sum_by_position,
    total_perplexity,
)
from vllm_novakv.evaluation.plots import line_figure
from vllm_novakv.evaluation.report_section import MISSING, Section, compared_runs, settings_line, table
from vllm_novakv.evaluation.run_directory import CONFIG_NAME, read_engine
from vllm_novakv.evaluation.statistics import paired_perplexity_ratio


@dataclass(frozen=True)
class PerplexityRun:
    """A finished perplexity run, read back from its directory.

    Attributes:
        method: what was measured, e.g. the cache.
        suite: what was predicted, e.g. "perplexity-4096".
        identity: what the run was, from its config.json.
        environment: where it ran, from its config.json.
        bits_per_element: of the cache, as its engine said; None for a run over an endpoint.
        windows: in order.
    """

    method: str
    suite: str
    identity: dict[str, Any]
    environment: dict[str, Any]
    bits_per_element: float | None
    windows: tuple[WindowLosses, ...]


def read_perplexity(directory: Path) -> PerplexityRun:
    """Read a finished run.

    Args:
        directory: of the run, finished.

    Raises:
        KeyError: its configuration names no method or no suite.
    """
    config = json.loads((directory / CONFIG_NAME).read_text())
    settings = config["identity"]["config"]
    windows = sorted(read_windows(directory / WINDOWS_NAME), key=lambda losses: losses.window)
    return PerplexityRun(
        str(settings["method"]),
        str(settings["suite"]),
        config["identity"],
        config["environment"],
        read_engine(directory).get("bits_per_element"),
        tuple(windows),
    )


def describe_perplexity(runs: Sequence[PerplexityRun], reference: str) -> Section:
    """Perplexities, their change against the reference, one plot per suite, and what ran where.

    Args:
        runs: finished runs, at most one per method and suite.
        reference: method that the others are compared with.

    Returns:
        The section.

    Raises:
        ValueError: two runs of one method and suite, no run of the reference, or other windows than the reference's.
        ModuleNotFoundError: matplotlib is not installed.
    """
    by_place, bits = compared_runs(runs, reference, "perplexity run")
    methods = list(bits)
    suites = sorted({run.suite for run in runs}, key=lambda suite: (len(suite), suite))
    cells = {place: f"{total_perplexity(run.windows):.3f}" for place, run in by_place.items()}
    rows = [[m, bits[m], *(cells.get((m, suite), MISSING) for suite in suites)] for m in methods]
    parts = ["## Perplexity", table(["method", "bits/element", *suites], rows)]
    if methods[1:]:
        rows = [
            [m, *(_change_cell(by_place.get((m, suite)), by_place.get((reference, suite))) for suite in suites)]
            for m in methods[1:]
        ]
        parts += [
            f"Change against {reference}, with 95 % bootstrap intervals over windows, paired (10,000 resamples). The "
            "tokens of a window are a prompt's: each sees the prompt's exact window.",
            table(["method", *suites], rows),
        ]
    plots = {}
    for suite in suites:
        series = {
            method: [
                (float(part.last + 1), part.perplexity) for part in sum_by_position(by_place[method, suite].windows)
            ]
            for method in methods
            if (method, suite) in by_place
        }
        plots[f"{suite}.png"] = line_figure(suite, "tokens up to", series)
        parts.append(f"![Perplexity by position]({suite}.png)")
    lines = [settings_line(run.method, run.suite, run.identity, run.environment) for _, run in sorted(by_place.items())]
    return Section([*parts, "## Perplexity runs", "\n".join(lines)], plots)


def _change_cell(run: PerplexityRun | None, reference: PerplexityRun | None) -> str:
    if run is None or reference is None:
        return MISSING
    if run.identity["windows_sha256"] != reference.identity["windows_sha256"]:
        raise ValueError(
            f"{run.method} and {reference.method} did not predict the same windows; the comparison is paired"
        )
    losses = [[window.nll for window in one.windows] for one in (reference, run)]
    ratio = paired_perplexity_ratio(losses[0], losses[1], [window.num_tokens for window in run.windows])
    change, low, high = (f"{100 * (value - 1):+.2f}" for value in (ratio.estimate, ratio.low, ratio.high))
    return f"{change} % [{low}, {high}]"
