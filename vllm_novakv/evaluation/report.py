"""A report over finished runs: one Markdown file and its plots, in a folder that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from vllm_novakv.evaluation.accuracy_report import Run, describe_answers, read_answers
from vllm_novakv.evaluation.perplexity_report import PerplexityRun, describe_perplexity, read_perplexity
from vllm_novakv.evaluation.perplexity_run import WINDOWS_NAME
from vllm_novakv.evaluation.plots import save_figure
from vllm_novakv.evaluation.report_section import Section
from vllm_novakv.evaluation.run_directory import SCORES_NAME
from vllm_novakv.evaluation.study_report import STUDY_NAME, Study, describe_study, read_study

REPORT_NAME = "report.md"

Readable = Run | PerplexityRun | Study


def read_run(directory: Path) -> Readable:
    """Read a finished run, whatever it measured.

    Args:
        directory: of the run.

    Returns:
        The run.

    Raises:
        ValueError: the run is not finished, or its configuration names no method or no suite.
    """
    if (directory / STUDY_NAME).exists():
        return read_study(directory)
    if not (directory / SCORES_NAME).exists():
        raise ValueError(f"{directory} holds no finished run (no {SCORES_NAME}); run it again to continue it")
    read = read_perplexity if (directory / WINDOWS_NAME).exists() else read_answers
    try:
        return read(directory)
    except KeyError as error:
        raise ValueError(f"the configuration of {directory} needs 'method' and 'suite'") from error


def describe_runs(runs: Sequence[Readable], reference: str | None) -> list[Section]:
    """Sections on answers, perplexity and codec studies, as far as there are runs of each.

    Args:
        runs: finished runs, at most one per method and suite.
        reference: method that the others are compared with; studies have no use for it.

    Returns:
        At least one section.

    Raises:
        ValueError: no runs, no reference where one is needed, or runs that cannot be compared.
        ModuleNotFoundError: matplotlib is needed and not installed.
    """
    if not runs:
        raise ValueError("no runs to report; give at least one directory of a finished run")
    answers = [run for run in runs if isinstance(run, Run)]
    perplexities = [run for run in runs if isinstance(run, PerplexityRun)]
    studies = [run for run in runs if isinstance(run, Study)]
    if reference is None and (answers or perplexities):
        raise ValueError("--reference is missing: the method that the others are compared with, such as bf16")
    sections = []
    if answers and reference is not None:
        sections.append(describe_answers(answers, reference))
    if perplexities and reference is not None:
        sections.append(describe_perplexity(perplexities, reference))
    return [*sections, *(describe_study(study, f"study{i}") for i, study in enumerate(studies, start=1))]


def write_report(runs: Sequence[Readable], reference: str | None, directory: Path) -> Path:
    """Write report.md and its plots into a directory.

    Args:
        runs, reference: see `describe_runs`.
        directory: created if missing; it holds no report yet.

    Returns:
        Path of the Markdown file.

    Raises:
        ValueError: see `describe_runs`, or a report or a plot is there already.
        ModuleNotFoundError: matplotlib is needed and not installed.
    """
    sections = describe_runs(runs, reference)
    path = directory / REPORT_NAME
    plots = {name: figure for section in sections for name, figure in section.plots.items()}
    if any((directory / name).exists() for name in (REPORT_NAME, *plots)):
        raise ValueError(f"{directory} holds a report already; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in plots.items():
        save_figure(figure, directory / name)
    path.write_text("\n".join(["# Evaluation report\n", *(section.text for section in sections)]), encoding="utf-8")
    return path
