"""What a report consists of: sections of Markdown, and the plots that they show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "–"

RunType = TypeVar("RunType", bound="ComparedRun")


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        paragraphs: Markdown blocks.
        plots: figures by file name; a paragraph shows each.
    """

    paragraphs: list[str]
    plots: dict[str, Figure] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The section as Markdown."""
        return "\n\n".join(self.paragraphs) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
        head: column names.
        rows: cells; bars in them are escaped.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def ordered_methods(methods: Iterable[str], reference: str) -> list[str]:
    """The reference first, the others by name."""
    return sorted(set(methods), key=lambda name: (name != reference, name))


def bits_cell(bits: Iterable[float | None]) -> str:
    """Bits per element of a method's runs; a dash where no engine told them."""
    known = sorted({value for value in bits if value is not None})
    return ", ".join(f"{value:.4g}" for value in known) or MISSING


class ComparedRun(Protocol):
    """What a comparison needs of a run."""

    @property
    def method(self) -> str: ...
    @property
    def suite(self) -> str: ...
    @property
    def bits_per_element(self) -> float | None: ...


def compared_runs(
    runs: Sequence[RunType], reference: str, kind: str = "run"
) -> tuple[dict[tuple[str, str], RunType], dict[str, str]]:
    """Runs by method and suite, and the table cell of each method's bits per element, the reference first.

    Args:
        runs: finished runs.
        reference: method that the others are compared with.
        kind: of the runs, for the error.

    Raises:
        ValueError: two runs of one method and suite, or no run of the reference.
    """
    by_place = {(run.method, run.suite): run for run in runs}
    if len(by_place) != len(runs):
        raise ValueError("two runs have the same method and suite; leave one out")
    methods = ordered_methods((run.method for run in runs), reference)
    if methods[0] != reference:
        raise ValueError(f"no {kind} of the reference {reference!r} among {methods}")
    bits = {method: bits_cell(run.bits_per_element for run in runs if run.method == method) for method in methods}
    return by_place, bits


def settings_line(method: str, suite: str, identity: dict[str, object], environment: dict[str, object]) -> str:
    """What ran where, as one item of a list."""
    # the checksums of prompts and windows tell a reader nothing
    shown = {key: value for key, value in identity.items() if not key.endswith("_sha256")}
    commit = environment.get("commit", "unknown")
    return f"- {method}, {suite}, commit {commit}: `{json.dumps(shown, sort_keys=True)}`"
