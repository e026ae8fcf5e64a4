"""Tables of docs/choices.md from the results of codec_choices.py, one column block per model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""The results of one record: family, alternative, figures."""

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "values": {"value_error": "V", "output_error_of_values": "output, values alone", "output_error": "output"},
    "keys": {
        "logit_error": "logits",
        "top1_agreement": "top-1",
        "output_error_of_keys": "output, keys alone",
        "output_error": "output",
    },
    "pairs": {"logit_error": "logits", "top1_agreement": "top-1", "output_error": "output"},
    "codebooks": {"logit_error": "logits", "top1_agreement": "top-1", "output_error_of_keys": "output, keys alone"},
    "bands": {
        "history_mass": "read from history",
        "logit_error": "logits",
        "top1_agreement": "top-1",
        "output_error": "output",
    },
}
"""Figures of each family's table with their headings; the last one is compared with the default's."""

EXACT_LAYERS = (0, 1, 2, 4, 8)
"""How many layers the table of exact layers leaves uncompressed."""

_EXACT_BITS = 16.0
_BAND_CONTEXT = "32768"


def alternatives_table(models: Mapping[str, Results], family: str) -> tuple[list[str], list[list[str]]]:
    """Means over layers of every alternative, and the change of the last figure against the default's.

    The change is the geometric mean over layers, so that every layer counts alike.

    Args:
        models: results by the model's short name.
        family: one of `COLUMNS`.

    Returns:
        Header and rows; a model without the alternative has dashes.
    """
    columns = COLUMNS[family]
    header = [family, "bits" if family != "bands" else f"bits of {int(_BAND_CONTEXT):,} tokens"]
    for model in models:
        header += [f"{model}: {heading}" for heading in columns.values()] + ["change"]
    rows = []
    for name in dict.fromkeys(name for results in models.values() for name in results[family]):
        measured = [results[family].get(name) for results in models.values()]
        bits = next(entry for entry in measured if entry)["bits_per_element"]
        row = [name, f"{bits[_BAND_CONTEXT] if family == 'bands' else bits:.3f}"]
        for results, entry in zip(models.values(), measured, strict=True):
            if entry is None:
                row += ["-"] * (len(columns) + 1)
                continue
            layers = entry["layers"].values()
            row += [f"{statistics.fmean(figures[key] for figures in layers):.4f}" for key in columns]
            row.append(_percent(change(results, family, name, list(columns)[-1])))
        rows.append(row)
    return header, rows


def change(results: Results, family: str, name: str, figure: str) -> float:
    """Geometric mean over layers of an alternative's figure over the default's, less 1.

    The default is the first of the family; the paper's pair is compared with the default of the values.

    Example: 2 and 1 where the default has 1 and 2 are no change.
    """
    family_of_default = "values" if family == "pairs" else family
    default = next(iter(results[family_of_default].values()))["layers"]
    layers = results[family][name]["layers"]
    return statistics.geometric_mean(layers[i][figure] / default[i][figure] for i in layers) - 1


def layers_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """The default's errors in every layer."""
    figures = ("history_mass", "logit_error", "output_error_of_keys", "output_error_of_values", "output_error")
    header = ["layer", "read from history", "logits", "output, keys alone", "output, values alone", "output"]
    default = next(iter(results["bands"].values()))["layers"]
    return header, [[layer, *(f"{values[key]:.4f}" for key in figures)] for layer, values in default.items()]


def exact_layers_table(models: Mapping[str, Results]) -> tuple[list[str], list[list[str]]]:
    """What is left of the output errors when the worst layers stay in bf16, and what that costs.

    Returns:
        Header and rows: number of exact layers; per model those layers, bits per element without the band, and the
        root of the summed squared relative errors.
    """
    header = ["exact layers"]
    for model in models:
        header += [f"{model}: which", "bits", "output, root of sum of squares"]
    rows = []
    for count in EXACT_LAYERS:
        row = [str(count)]
        for results in models.values():
            layers = next(iter(results["bands"].values()))["layers"]
            bits = next(iter(results["values"].values()))["bits_per_element"]
            worst = worst_layers(layers, count)
            left = sum(figures["output_error"] ** 2 for layer, figures in layers.items() if layer not in worst) ** 0.5
            mean_bits = bits + count / len(layers) * (_EXACT_BITS - bits)
            row += [", ".join(sorted(worst, key=int)) or "-", f"{mean_bits:.2f}", f"{left:.3f}"]
        rows.append(row)
    return header, rows


def worst_layers(layers: Mapping[str, Mapping[str, float]], count: int) -> Sequence[str]:
    """The layers with the largest output errors."""
    return sorted(layers, key=lambda layer: -layers[layer]["output_error"])[:count]


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %".replace("-", "−")
