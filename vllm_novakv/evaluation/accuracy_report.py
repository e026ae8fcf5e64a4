"""The report's section on answers: means with intervals, paired differences and tests, accuracy against context.

Runs belong together by entries of their configuration: "method" (a row) and "suite" (a column); "prompt_tokens" is the
length of a suite's prompts, where they have one, and places it in the plot.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.plots import line_figure
from vllm_novakv.evaluation.report_section import MISSING, Section, compared_runs, settings_line, table
from vllm_novakv.evaluation.run_directory import CONFIG_NAME, read_engine
from vllm_novakv.evaluation.runner import PREDICTIONS_NAME, read_predictions
from vllm_novakv.evaluation.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_task_mean,
    majority_vote,
    mcnemar_exact,
    paired_bootstrap,
)

PLOT_NAME = "accuracy.png"


@dataclass(frozen=True)
class Run:
    """A finished run, read back from its directory.

    Attributes:
        method: what was measured, e.g. the cache.
        suite: what was asked, e.g. "needles-4096".
        prompt_tokens: length of its prompts; None where they differ.
        identity: what the run was, from its config.json.
        environment: where it ran, from its config.json.
        bits_per_element: of the cache, as its engine said; None for a run over an endpoint.
        scores: for each task, for each item id, the scores of its samples.
    """

    method: str
    suite: str
    prompt_tokens: int | None
    identity: dict[str, Any]
    environment: dict[str, Any]
    bits_per_element: float | None
    scores: dict[str, dict[str, list[float]]]

    @cached_property
    def item_means(self) -> list[list[float]]:
        """For each task, the mean score of each item; tasks and items by name."""
        return [
            [sum(samples) / len(samples) for _, samples in sorted(items.items())]
            for _, items in sorted(self.scores.items())
        ]

    @cached_property
    def votes(self) -> dict[str, bool]:
        """Whether most samples of an item are entirely right."""
        return {
            name: majority_vote([score == 1.0 for score in samples])
            for items in self.scores.values()
            for name, samples in items.items()
        }


def read_answers(directory: Path) -> Run:
    """Read a finished run.

    Args:
        directory: of the run, finished.

    Returns:
        The run.

    Raises:
        KeyError: its configuration names no method or no suite.
    """
    config = json.loads((directory / CONFIG_NAME).read_text())
    settings = config["identity"]["config"]
    scores: dict[str, dict[str, list[float]]] = {}
    for prediction in read_predictions(directory / PREDICTIONS_NAME):
        scores.setdefault(prediction.task, {}).setdefault(prediction.item_id, []).append(prediction.score)
    return Run(
        str(settings["method"]),
        str(settings["suite"]),
        settings.get("prompt_tokens"),
        config["identity"],
        config["environment"],
        read_engine(directory).get("bits_per_element"),
        scores,
    )


def describe_answers(runs: Sequence[Run], reference: str) -> Section:
    """Means, differences to the reference, tasks, and what ran where.

    Args:
        runs: finished runs, at most one per method and suite.
        reference: method that the others are compared with.

    Returns:
        The section, with a plot where suites have a length.

    Raises:
        ValueError: two runs of one method and suite, no run of the reference, or methods that were not asked the same
            items.
        ModuleNotFoundError: matplotlib is needed and not installed.
    """
    by_place, bits = compared_runs(runs, reference)
    methods = list(bits)
    suites = [suite for _, suite in sorted({(run.prompt_tokens or 0, run.suite) for run in runs})]
    parts = [
        "## Mean of the tasks",
        "Scores are percentages; brackets hold 95 % bootstrap intervals over items (10,000 resamples). Bits per "
        "element are those of the history, without the exact band.",
        table(
            ["method", "bits/element", *suites],
            [[m, bits[m], *(_mean_cell(by_place.get((m, suite))) for suite in suites)] for m in methods],
        ),
    ]
    plots = {}
    if any(run.prompt_tokens is not None for run in runs):
        parts.append(f"![Mean of the tasks over the prompt length]({PLOT_NAME})")
        series = {method: _points(runs, method) for method in methods}
        plots[PLOT_NAME] = line_figure(
            "mean of the tasks, %", "prompt tokens", series, is_log_x=True, y_range=(-2.0, 102.0)
        )
    if methods[1:]:
        rows = [
            [m, *(_difference_cell(by_place.get((m, suite)), by_place.get((reference, suite))) for suite in suites)]
            for m in methods[1:]
        ]
        parts += [
            f"## Difference to {reference}",
            "In points, paired over items; p is the exact two-sided McNemar test on majority votes (an item counts as "
            "solved if all of it is right), without correction for the number of tests.",
            table(["method", *suites], rows),
        ]
    for suite in suites:
        present = [by_place[method, suite] for method in methods if (method, suite) in by_place]
        tasks = sorted({task for run in present for task in run.scores})
        rows = [[task, *(_task_cell(run, task) for run in present)] for task in tasks]
        parts += [f"## Tasks of {suite}", table(["task", *(run.method for run in present)], rows)]
    lines = [settings_line(run.method, run.suite, run.identity, run.environment) for _, run in sorted(by_place.items())]
    return Section([*parts, "## Runs with answers", "\n".join(lines)], plots)


def _points(runs: Sequence[Run], method: str) -> list[tuple[float, float]]:
    return sorted(
        (float(run.prompt_tokens), 100 * bootstrap_task_mean(run.item_means).estimate)
        for run in runs
        if run.method == method and run.prompt_tokens is not None
    )


def _interval_cell(interval: Interval, sign: str = "") -> str:
    low, high = (f"{100 * value:{sign}.1f}" for value in (interval.low, interval.high))
    return f"{100 * interval.estimate:{sign}.1f} [{low}, {high}]"


def _mean_cell(run: Run | None) -> str:
    return MISSING if run is None else _interval_cell(bootstrap_task_mean(run.item_means))


def _task_cell(run: Run, task: str) -> str:
    if task not in run.scores:
        return MISSING
    return _interval_cell(bootstrap_mean([sum(samples) / len(samples) for samples in run.scores[task].values()]))


def _difference_cell(run: Run | None, reference: Run | None) -> str:
    if run is None or reference is None:
        return MISSING
    # the digest covers every prompt and gold answer
    if run.identity["items_sha256"] != reference.identity["items_sha256"]:
        raise ValueError(f"{run.method} and {reference.method} were not asked the same items; the comparison is paired")
    difference = paired_bootstrap(run.item_means, reference.item_means)
    names = sorted(run.votes)
    test = mcnemar_exact([run.votes[name] for name in names], [reference.votes[name] for name in names])
    return f"{_interval_cell(difference, '+')}, p = {test.p_value:.2g}"
