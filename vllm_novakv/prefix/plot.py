"""The hit rates of an analysis as an SVG picture, one curve per policy over the size of the cache."""

import math

from vllm_novakv.prefix.analyze import OPTIMUM, Analysis
from vllm_novakv.prefix.policy import policy_names

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 560, 30, 370
"""Edges of the drawing area, in pixels from the upper left corner."""

COLORS = {"lru": "#777777", "lfu": "#1f77b4", "gdsf": "#9467bd", "expected-reuse": "#d62728", OPTIMUM: "#2ca02c"}
NUM_LINES = 5


def hit_rate_svg(analysis: Analysis) -> str:
    """Draw token hit rate over capacity, the capacities on a logarithmic scale; a dashed line is an unlimited cache.

    Args:
        analysis: see `analyze.analyze_file`.

    Returns:
        An SVG document.
    """
    capacities = list(analysis.token_hit_rate)
    top = max(analysis.sharing, *(max(rates.values()) for rates in analysis.token_hit_rate.values()), 0.01)

    def x(capacity: int) -> float:
        if len(capacities) == 1:
            return (LEFT + RIGHT) / 2
        span = math.log(capacities[-1] / capacities[0])
        return LEFT + (RIGHT - LEFT) * math.log(capacity / capacities[0]) / span

    def y(rate: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 12, "hit rate, share of the prompt tokens"),
    ]
    for step in range(NUM_LINES + 1):
        rate = top * step / NUM_LINES
        parts += [_line(LEFT, y(rate), RIGHT, y(rate), "#dddddd"), _text(LEFT - 8, y(rate) + 4, f"{rate:.0%}", "end")]
    for capacity in capacities:
        parts.append(_text(x(capacity), BOTTOM + 18, f"{capacity:,}", "middle"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 38, f"blocks of {analysis.block_tokens} tokens", "middle"))
    parts.append(_line(LEFT, y(analysis.sharing), RIGHT, y(analysis.sharing), "#2ca02c", "4 4"))
    for number, name in enumerate((*policy_names(), OPTIMUM)):
        rates = [(x(capacity), y(analysis.token_hit_rate[capacity][name])) for capacity in capacities]
        points = " ".join(f"{left:.1f},{height:.1f}" for left, height in rates)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{left:.1f}" cy="{height:.1f}" r="3" fill="{COLORS[name]}"/>' for left, height in rates]
        legend = TOP + 20 + 20 * number
        parts += [_line(RIGHT + 15, legend, RIGHT + 40, legend, COLORS[name]), _text(RIGHT + 46, legend + 4, name)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashes: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-dasharray="{dashes}"/>'
