"""Line charts as SVG documents, for reports that need no plotting library."""

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 540, 40, 360
"""Edges of the drawing area, in pixels from the upper left corner."""

COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22", "#e377c2")
NUM_GRID_LINES = 5

Point = tuple[float, float]
"""(x, y)."""


def line_chart_svg(
    title: str, x_label: str, series: Mapping[str, Sequence[Point]], is_log_x: bool = False, top: float | None = None
) -> str:
    """One line per series, from y = 0 to the largest y.

    Args:
        title: what y is, with its unit.
        x_label: what x is, with its unit.
        series: points of each line by its name, in ascending x.
        is_log_x: logarithmic x axis; every x is above 0.
        top: y at the upper edge; None takes the largest y of all points.

    Returns:
        An SVG document.

    Raises:
        ValueError: there is no point, or a value is not finite, or x is not above 0 on a logarithmic axis.
    """
    points = [point for line in series.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise ValueError(f"chart {title!r} needs at least one point, and finite values")
    if is_log_x and min(x for x, _ in points) <= 0:
        raise ValueError(f"chart {title!r} has an x that is not above 0 on a logarithmic axis")
    scale = math.log if is_log_x else float
    ticks = sorted({x for x, _ in points})
    first, last = scale(ticks[0]), scale(ticks[-1])
    highest = max(y for _, y in points) if top is None else top
    highest = highest if highest > 0 else 1.0

    def place(x: float, y: float) -> Point:
        share = (scale(x) - first) / (last - first) if last > first else 0.5
        return LEFT + (RIGHT - LEFT) * share, BOTTOM - (BOTTOM - TOP) * y / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 16, title),
        _text((LEFT + RIGHT) / 2, BOTTOM + 40, x_label, "middle"),
    ]
    for step in range(NUM_GRID_LINES + 1):
        y = highest * step / NUM_GRID_LINES
        height = place(ticks[0], y)[1]
        parts += [_line(LEFT, height, RIGHT, height, "#dddddd"), _text(LEFT - 8, height + 4, f"{y:.4g}", "end")]
    # at most eight labels, the first always
    for x in ticks[:: max(1, math.ceil(len(ticks) / 8))]:
        parts.append(_text(place(x, 0)[0], BOTTOM + 18, f"{x:,.6g}", "middle"))
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        places = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        legend = TOP + 10 + 20 * number
        parts += [_line(RIGHT + 15, legend, RIGHT + 40, legend, color), _text(RIGHT + 46, legend + 4, name)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
