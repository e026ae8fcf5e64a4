"""The report's section on a codec-level study: distortion by layer, group volumes, the rate law."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.plots import histogram_figure, line_figure
from vllm_novakv.evaluation.report_section import Section, table

STUDY_NAME = "study.json"

PLOTTED_PAIRS = (("oscar", "fixed-sq"), ("ours", "fixed-sq"), ("oscar", "vq"), ("ours", "vq"))
"""Basis and quantizer of the lines in the plot by layer.

Source: arXiv 2608.04074, table 4.
"""


@dataclass(frozen=True)
class Study:
    """A study.json.

    Attributes:
        settings: what was chosen.
        environment: where it ran.
        heads: comparisons of each layer and KV head.
        rate_law: constants and measured points.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    heads: list[dict[str, Any]]
    rate_law: dict[str, Any]


def read_study(directory: Path) -> Study:
    """Read a study.

    Args:
        directory: where `novakv eval codec` wrote it.
    """
    return Study(**json.loads((directory / STUDY_NAME).read_text()))


def describe_study(study: Study, name: str) -> Section:
    """Tables and plots of one study.

    Args:
        study: see `read_study`.
        name: begins the names of its plots.

    Returns:
        The section.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    bits = float(study.settings["bits"])
    names = {kind: f"{name}-{kind}.png" for kind in ("distortion", "volumes", "rates")}
    commit = study.environment.get("commit", "unknown")
    places = ", ".join(f"({head['layer']}, {head['head']})" for head in study.heads)
    parts = [
        f"## Codec study of {study.settings['model']}",
        f"Heads (layer, KV head): {places}; commit {commit}: `{json.dumps(study.settings, sort_keys=True)}`",
        "Distortion of keys as logits see it, relative to keys that all become the mean; means over heads, on held-out "
        "text.",
        table(["basis", "quantizer", "bits/element", "distortion", "top-1 agreement"], _basis_rows(study)),
        f"![Distortion by layer]({names['distortion']})",
        f"Partitions at {bits:g} bits: error per coordinate, its prediction Ĉ 2^(-2b) mean v^(1/g), and dependence in "
        "a group (0 is none).",
        table(["partition", "distortion", "predicted", "total correlation, bits"], _partition_rows(study, bits)),
        f"![Volumes of the groups]({names['volumes']})",
        f"Rate law: Ĉ = {study.rate_law['constant']:.3f}, α = {study.rate_law['exponent']:.3f} (2 at high resolution), "
        f"between neighbouring rates {', '.join(f'{value:.3f}' for value in study.rate_law['local_exponents'])}.",
        f"![Distortion over the rate]({names['rates']})",
    ]
    plots = {
        names["distortion"]: line_figure(
            "relative distortion of the logits", "layer", distortion_by_layer(study), is_log_y=True
        ),
        names["volumes"]: histogram_figure(
            "groups by volume", "log10 of the volume over that of an equal partition", _volumes(study)
        ),
        names["rates"]: line_figure("distortion over v^(1/g)", "bits per element", _rates(study), is_log_y=True),
    }
    return Section(parts, plots)


def distortion_by_layer(study: Study) -> dict[str, list[tuple[float, float]]]:
    """Relative distortion of each plotted pair over the layers, averaged over a layer's heads."""
    layers = sorted({head["layer"] for head in study.heads})
    lines = {}
    for basis, quantizer in PLOTTED_PAIRS:
        lines[f"{basis}, {quantizer}"] = [
            (
                float(layer),
                statistics.fmean(_relative(head, basis, quantizer) for head in study.heads if head["layer"] == layer),
            )
            for layer in layers
        ]
    return lines


def _relative(head: Mapping[str, Any], basis: str, quantizer: str) -> float:
    row = next(row for row in head["bases"] if (row["basis"], row["quantizer"]) == (basis, quantizer))
    return float(row["query_weighted"] / head["energy"])


def _basis_rows(study: Study) -> list[list[str]]:
    rows = []
    for pattern in study.heads[0]["bases"]:
        pair = pattern["basis"], pattern["quantizer"]
        same = [row for head in study.heads for row in head["bases"] if (row["basis"], row["quantizer"]) == pair]
        distortion = statistics.fmean(_relative(head, *pair) for head in study.heads)
        means = [statistics.fmean(row[key] for row in same) for key in ("bits_per_element", "top1_agreement")]
        rows.append([*pair, f"{means[0]:.3f}", f"{distortion:.4g}", f"{means[1]:.3f}"])
    return rows


def _partition_rows(study: Study, bits: float) -> list[list[str]]:
    rows = []
    for name, parts in _by_partition(study).items():
        measured, root, dependence = (
            statistics.fmean(part[key] for part in parts)
            for key in ("test_distortion", "mean_volume_root", "total_correlation_bits")
        )
        predicted = study.rate_law["constant"] * 2 ** (-2 * bits) * root
        rows.append([name, f"{measured:.4g}", f"{predicted:.4g}", f"{dependence:.3f}"])
    return rows


def _by_partition(study: Study) -> dict[str, list[dict[str, Any]]]:
    names = [part["name"] for part in study.heads[0]["partitions"]]
    return {name: [p for head in study.heads for p in head["partitions"] if p["name"] == name] for name in names}


def _volumes(study: Study) -> dict[str, Sequence[float]]:
    return {
        name: [value for part in parts for value in part["log10_volumes"]]
        for name, parts in _by_partition(study).items()
    }


def _rates(study: Study) -> dict[str, list[tuple[float, float]]]:
    measured = [(float(bits), float(value)) for bits, value in study.rate_law["measured"]]
    constant = float(study.rate_law["constant"])
    return {
        "measured, held out": measured,
        f"{constant:.3f} · 2^(-2b)": [(bits, constant * 2 ** (-2 * bits)) for bits, _ in measured],
    }
