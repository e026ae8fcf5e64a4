"""Plots of a report, drawn by matplotlib, which the optional extra `report` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH_INCHES, _HEIGHT_INCHES, _DPI = 7.2, 4.2, 144
_NUM_BINS = 40

Point = tuple[float, float]
"""(x, y)."""


def line_figure(
    title: str,
    x_label: str,
    series: Mapping[str, Sequence[Point]],
    is_log_x: bool = False,
    is_log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Figure:
    """One line per series, marked where it was measured.

    Args:
        title: what y is, with its unit.
        x_label: what x is, with its unit.
        series: points of each line by its name, in ascending x; empty ones are left out.
        is_log_x: x by powers of two.
        is_log_y: y by powers of ten.
        y_range: ends of the y axis; None fits the points.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _new_figure(_HEIGHT_INCHES)
    axes = figure.subplots()
    for name, points in series.items():
        if points:
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    if is_log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    if is_log_y:
        axes.set_yscale("log")
    if y_range is not None:
        axes.set_ylim(*y_range)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def histogram_figure(title: str, x_label: str, samples: Mapping[str, Sequence[float]]) -> Figure:
    """One panel of counts per name, over one x axis.

    Args:
        title: of the figure.
        x_label: what x is, with its unit.
        samples: values of each panel by its name; at least one value in all.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _new_figure(1.6 * len(samples) + 1)
    values = [value for part in samples.values() for value in part]
    limits = (min(values), max(values))
    panels = figure.subplots(len(samples), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, part) in zip(panels, samples.items(), strict=True):
        axes.hist(part, bins=_NUM_BINS, range=limits)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_title(title)
    panels[-1].set_xlabel(x_label)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=_DPI, format="png")


def require_matplotlib() -> type[Figure]:
    """matplotlib's figures.

    Raises:
        ModuleNotFoundError: it is not installed; the text names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the report's plots need matplotlib; install the extra: pip install 'vllm-novakv[report]'"
        ) from error
    return Figure


def _new_figure(height_inches: float) -> Figure:
    return require_matplotlib()(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
