"""A report over runs of `runner.run_items`: tables with intervals and tests in Markdown, a chart as SVG.

Runs belong together by entries of their configuration: "method" (a row) and "suite" (a column); "prompt_tokens" is the
length of a suite's prompts, where they have one, and places it in the chart.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.chart import line_chart_svg
from vllm_novakv.evaluation.runner import read_predictions
from vllm_novakv.evaluation.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_task_mean,
    majority_vote,
    mcnemar_exact,
    paired_bootstrap,
)

CHART_NAME = "accuracy.svg"
REPORT_NAME = "report.md"


@dataclass(frozen=True)
class Run:
    """A finished run, read back from its directory.

    Attributes:
        method: what was measured, e.g. the cache.
        suite: what was asked, e.g. "needles-4096".
        prompt_tokens: length of its prompts; None where they differ.
        identity: what the run was, from its config.json.
        environment: where it ran, from its config.json.
        scores: for each task, for each item id, the scores of its samples.
    """

    method: str
    suite: str
    prompt_tokens: int | None
    identity: dict[str, Any]
    environment: dict[str, Any]
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


def read_run(directory: Path) -> Run:
    """Read a finished run.

    Args:
        directory: of the run.

    Returns:
        The run.

    Raises:
        ValueError: the run is not finished, or its configuration names no method or no suite.
    """
    if not (directory / "scores.json").exists():
        raise ValueError(f"{directory} holds no finished run (no scores.json); run it again to continue it")
    config = json.loads((directory / "config.json").read_text())
    settings = config["identity"]["config"]
    try:
        method, suite = str(settings["method"]), str(settings["suite"])
    except KeyError as error:
        raise ValueError(f"the configuration of {directory} needs 'method' and 'suite'") from error
    scores: dict[str, dict[str, list[float]]] = {}
    for prediction in read_predictions(directory / "predictions.jsonl"):
        scores.setdefault(prediction.task, {}).setdefault(prediction.item_id, []).append(prediction.score)
    return Run(method, suite, settings.get("prompt_tokens"), config["identity"], config["environment"], scores)


def write_report(runs: Sequence[Run], reference: str, directory: Path) -> Path:
    """Write report.md, and accuracy.svg if suites have a length, into a directory.

    Args:
        runs: finished runs, at most one per method and suite.
        reference: method that the others are compared with.
        directory: created if missing.

    Returns:
        Path of the Markdown file.

    Raises:
        ValueError: no runs, two of one method and suite, no run of the reference, or a report is there already.
    """
    if (directory / REPORT_NAME).exists() or (directory / CHART_NAME).exists():
        raise ValueError(f"{directory} holds a report already; choose another directory")
    text = describe_runs(runs, reference)
    directory.mkdir(parents=True, exist_ok=True)
    series = {
        method: sorted(
            (float(run.prompt_tokens), 100 * bootstrap_task_mean(run.item_means).estimate)
            for run in runs
            if run.method == method and run.prompt_tokens is not None
        )
        for method in _methods(runs, reference)
    }
    if _have_lengths(runs):
        chart = line_chart_svg("mean of the tasks, %", "prompt tokens", series, is_log_x=True, top=100.0)
        (directory / CHART_NAME).write_text(chart, encoding="utf-8")
    path = directory / REPORT_NAME
    path.write_text(text, encoding="utf-8")
    return path


def describe_runs(runs: Sequence[Run], reference: str) -> str:
    """The report as Markdown: means, differences to the reference, tasks, and what ran where.

    Args:
        runs: finished runs, at most one per method and suite.
        reference: method that the others are compared with.

    Returns:
        Markdown.

    Raises:
        ValueError: no runs, two of one method and suite, no run of the reference, or methods that were not asked the
            same items.
    """
    table = _by_place(runs)
    if not any(method == reference for method, _ in table):
        raise ValueError(f"no run of the reference {reference!r} among {sorted({run.method for run in runs})}")
    methods = _methods(runs, reference)
    suites = [suite for _, suite in sorted({(run.prompt_tokens or 0, run.suite) for run in runs})]
    parts = [
        "# Evaluation report",
        "Scores are percentages; brackets hold 95 % bootstrap intervals over items (10,000 resamples).",
        "## Mean of the tasks",
        _table(
            ["method", *suites],
            [[method, *(_mean_cell(table.get((method, suite))) for suite in suites)] for method in methods],
        ),
    ]
    if _have_lengths(runs):
        parts.append(f"![Mean of the tasks over the prompt length]({CHART_NAME})")
    others = [method for method in methods if method != reference]
    if others:
        parts += [
            f"## Difference to {reference}",
            "In points, paired over items; p is the exact two-sided McNemar test on majority votes (an item counts as "
            "solved if all of it is right), without correction for the number of tests.",
            _table(
                ["method", *suites],
                [
                    [m, *(_difference_cell(table.get((m, suite)), table.get((reference, suite))) for suite in suites)]
                    for m in others
                ],
            ),
        ]
    for suite in suites:
        present = [table[method, suite] for method in methods if (method, suite) in table]
        tasks = sorted({task for run in present for task in run.scores})
        rows = [[task, *(_task_cell(run, task) for run in present)] for task in tasks]
        parts += [f"## Tasks of {suite}", _table(["task", *(run.method for run in present)], rows)]
    parts += ["## Runs", *(_settings(table[place]) for place in sorted(table))]
    return "\n\n".join(parts) + "\n"


def _by_place(runs: Sequence[Run]) -> dict[tuple[str, str], Run]:
    if not runs:
        raise ValueError("no runs to report; give at least one directory of a finished run")
    table = {(run.method, run.suite): run for run in runs}
    if len(table) != len(runs):
        raise ValueError("two runs have the same method and suite; leave one out")
    return table


def _have_lengths(runs: Sequence[Run]) -> bool:
    return any(run.prompt_tokens is not None for run in runs)


def _methods(runs: Sequence[Run], reference: str) -> list[str]:
    names = sorted({run.method for run in runs})
    return [name for name in names if name == reference] + [name for name in names if name != reference]


def _interval_cell(interval: Interval, sign: str = "") -> str:
    low, high = (f"{100 * value:{sign}.1f}" for value in (interval.low, interval.high))
    return f"{100 * interval.estimate:{sign}.1f} [{low}, {high}]"


def _mean_cell(run: Run | None) -> str:
    return "–" if run is None else _interval_cell(bootstrap_task_mean(run.item_means))


def _task_cell(run: Run, task: str) -> str:
    if task not in run.scores:
        return "–"
    return _interval_cell(bootstrap_mean([sum(samples) / len(samples) for samples in run.scores[task].values()]))


def _difference_cell(run: Run | None, reference: Run | None) -> str:
    if run is None or reference is None:
        return "–"
    # the digest covers every prompt and gold answer
    if run.identity["items_sha256"] != reference.identity["items_sha256"]:
        raise ValueError(f"{run.method} and {reference.method} were not asked the same items; the comparison is paired")
    difference = paired_bootstrap(run.item_means, reference.item_means)
    names = sorted(run.votes)
    test = mcnemar_exact([run.votes[name] for name in names], [reference.votes[name] for name in names])
    return f"{_interval_cell(difference, '+')}, p = {test.p_value:.2g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _settings(run: Run) -> str:
    commit = run.environment.get("commit", "unknown")
    shown = json.dumps({key: value for key, value in run.identity.items() if key != "items_sha256"}, sort_keys=True)
    return f"- {run.method}, {run.suite}, commit {commit}: `{shown}`"
