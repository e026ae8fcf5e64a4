"""The codec's choices against their alternatives, on queries, keys and values of a real model.

    python benchmarks/codec_choices.py --model MODEL --artifact DIR --prompts gpqa.csv --text essays.txt

The model prefills two texts once: one that alternatives are fitted on, and one that everything is measured on. Queries
then attend as in serving: the first 64 and the latest 256 tokens exactly, what lies between through the codec. A record
holds every figure of every layer. With --tensors DIR the captured tensors are kept there and found again.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from codec_variants import CODEBOOKS, KEYS, PAIRS, VALUES, Combined, Half, LayerData, served_keys, served_values
from torch import Tensor
from tqdm import tqdm

from vllm_novakv.artifact import load
from vllm_novakv.baselines import bits_per_element
from vllm_novakv.calibration import prompts as texts
from vllm_novakv.calibration.pipeline import tokenized_text
from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.evaluation.analysis.attention_error import AttentionErrors, Band, attention_errors, key_importance
from vllm_novakv.evaluation.record import write_record
from vllm_novakv.support import assess_model

BANDS = {"64 + 256": Band(), "32 + 128": Band(32, 128), "128 + 512": Band(128, 512), "none": Band(0, 0)}
"""Exact windows by name; the first is the default."""

# The run that captures a sequence wants another one before it; the fewest tokens that vLLM prefills quickly.
_WARM_UP_TOKENS = 16
# Queries from here on have a history in every band.
_FIRST_QUERY = 1024
_QUERY_STRIDE = 24
_IMPORTANCE_STRIDE = 8
_DEFAULT_LAYERS = 6
_DIGITS = 6

LayerTensors = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of one sequence, [num_tokens, heads, head_size], in the model's type."""

Tensors = dict[int, LayerTensors]
"""The same by layer."""

Results = dict[str, dict[str, Any]]
"""Family, name of the alternative, its figures."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--artifact", type=Path, required=True, help="artifact directory")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file that alternatives are fitted on")
    parser.add_argument("--text", type=Path, required=True, help="plain text that is measured on (UTF-8)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--fit-sequences", type=int, default=4, help="sequences to fit on")
    parser.add_argument("--test-sequences", type=int, default=2, help="sequences to measure on")
    parser.add_argument("--layers", type=int, nargs="+", help="layers to fit alternatives for; left out: six of all")
    parser.add_argument("--jobs", type=int, default=1, help="layers that are compared side by side")
    parser.add_argument("--tensors", type=Path, help="folder that keeps the captured tensors")
    parser.add_argument("--name", help="name of the record; default: codec-choices-<model>")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records", help="folder for the record")
    return parser.parse_args()


def spread_layers(available: tuple[int, ...], count: int) -> list[int]:
    """Evenly spread layers, the first and the last among them.

    Example: 6 of layers 0 to 29 are 0, 6, 12, 17, 23, 29.
    """
    last = len(available) - 1
    return sorted({available[round(i * last / max(1, count - 1))] for i in range(count)})


def capture_sequences(
    model: str, file: Path, num_sequences: int, seq_len: int, layers: list[int] | None
) -> list[Tensors]:
    """Queries, keys and values of every sequence of a text, through the observers of the fit.

    Args:
        model: directory.
        file: prompts or plain text.
        num_sequences: of seq_len tokens each.
        seq_len: tokens.
        layers: to observe; None is all.
    """
    # vLLM takes seconds to import
    from vllm_novakv.calibration.capture import CapturePlan, capture, inspect_model, load_tokenizer

    facts = inspect_model(model)
    num_tokens = num_sequences * seq_len
    text = tokenized_text(texts.read_prompts(file, None, 0), load_tokenizer(model), num_tokens, seq_len, num_tokens)
    available = assess_model(facts.hf_config).quantized_layers
    skipped = tuple(layer for layer in available if layers is not None and layer not in layers)
    sequences = []
    for sequence in text.sequences:
        warm_up = sequence[:_WARM_UP_TOKENS]
        captures = capture(model, CapturePlan((warm_up,), sequence, torch.arange(len(warm_up)), skipped), facts)
        sequences.append(
            {i: (seen.heldout_query, seen.heldout_key, seen.heldout_value) for i, seen in captures.items()}
        )
    return sequences


def kept(path: Path | None, make: Any, *arguments: Any) -> list[Tensors]:
    """What `make` returns, read from the file if it is there already, and written to it if not."""
    if path is not None and path.exists():
        return torch.load(path)
    made = make(*arguments)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, path)
    return made


def layer_data(layer: int, codec: LayerCodec, fitted: list[LayerTensors]) -> LayerData:
    """Calibration tensors of one layer with the importance of every key."""
    mass, sensitivity = [], []
    for query, key, value in fitted:
        positions = torch.arange(0, len(key), _IMPORTANCE_STRIDE)
        importance = key_importance(query[positions], positions, key, value, Band())
        mass.append(importance[0])
        sensitivity.append(importance[1])
    return LayerData(
        layer,
        codec,
        keys=torch.cat([key for _, key, _ in fitted]).float(),
        values=torch.cat([value for _, _, value in fitted]).float(),
        positions=torch.cat([torch.arange(len(key)) for _, key, _ in fitted]),
        mass=torch.cat(mass),
        sensitivity=torch.cat(sensitivity),
    )


class Bench:
    """Held-out sequences of one layer, on which halves are measured.

    Args:
        sequences: queries, keys and values of each.
    """

    def __init__(self, sequences: list[LayerTensors]) -> None:
        self._sequences = [tuple(tensor.float() for tensor in sequence) for sequence in sequences]

    def quantized(self, half: Half, is_key: bool) -> list[Tensor]:
        """What attention reads of every sequence."""
        return [half.quantize(sequence[1 if is_key else 2]) for sequence in self._sequences]

    def errors(self, keys: list[Tensor], values: list[Tensor], band: Band = BANDS["64 + 256"]) -> dict[str, float]:
        """Figures over all sequences and query heads, and ‖V − V̂‖/‖V‖."""
        total, noise, energy = AttentionErrors(), 0.0, 0.0
        for (query, key, value), new_key, new_value in zip(self._sequences, keys, values, strict=True):
            positions = torch.arange(_FIRST_QUERY, len(key), _QUERY_STRIDE)
            total += attention_errors(query[positions], positions, (key, value), (new_key, new_value), band)
            noise += float((value - new_value).square().sum())
            energy += float(value.square().sum())
        figures = total.figures() | {"value_error": math.sqrt(noise / energy)}
        return {name: round(figure, _DIGITS) for name, figure in figures.items()}


def compare_layer(data: LayerData, bench: Bench, results: Results, has_codebooks: bool) -> None:
    """Every alternative on one layer; figures are appended to those of earlier layers."""
    key, value = served_keys(data.codec), served_values(data.codec)
    key_halves = {name: fit(data) for name, fit in KEYS.items()}
    value_halves = {name: fit(data) for name, fit in VALUES.items()}
    keys = {name: bench.quantized(half, True) for name, half in key_halves.items()}
    values = {name: bench.quantized(half, False) for name, half in value_halves.items()}
    default_keys, default_values = next(iter(keys.values())), next(iter(values.values()))

    for name, half in value_halves.items():
        _note(results["values"], name, data, Combined(key, half), bench.errors(default_keys, values[name]))
    for name, half in key_halves.items():
        _note(results["keys"], name, data, Combined(half, value), bench.errors(keys[name], default_values))
    for name, (first, second) in PAIRS.items():
        method = Combined(key_halves[first], value_halves[second])
        _note(results["pairs"], name, data, method, bench.errors(keys[first], values[second]))
    for name, train in CODEBOOKS.items() if has_codebooks else ():
        half = served_keys(replace(data.codec, codebook=train(data)))
        figures = bench.errors(bench.quantized(half, True), default_values)
        _note(results["codebooks"], name, data, Combined(half, value), figures)


def _note(family: dict[str, Any], name: str, data: LayerData, method: Combined, figures: dict[str, float]) -> None:
    entry = family.setdefault(name, {"bits_per_element": bits_per_element(method), "layers": {}})
    entry["layers"][str(data.layer)] = figures


def compare_bands(layer: int, codec: LayerCodec, bench: Bench, results: Results) -> None:
    """The default codec of one layer with every band."""
    key, value = served_keys(codec), served_values(codec)
    keys, values = bench.quantized(key, True), bench.quantized(value, False)
    for name, band in BANDS.items():
        width = band.sink_tokens + band.recent_tokens
        bits = {str(n): bits_per_element(Combined(key, value), n, width) for n in (8192, 32768, 131072)}
        entry = results["bands"].setdefault(name, {"bits_per_element": bits, "layers": {}})
        entry["layers"][str(layer)] = bench.errors(keys, values, band)


def study_layer(
    layer: int, codec: LayerCodec, tested: list[LayerTensors], fitted: list[LayerTensors], has_codebooks: bool
) -> Results:
    """All figures of one layer; a layer without tensors to fit on has those of its bands only."""
    results: Results = {family: {} for family in ("bands", "values", "keys", "pairs", "codebooks")}
    bench = Bench(tested)
    compare_bands(layer, codec, bench, results)
    if fitted:
        compare_layer(layer_data(layer, codec, fitted), bench, results, has_codebooks)
    return results


def merged(parts: Iterable[Results]) -> Results:
    """The results of several layers as one."""
    results: Results = {}
    for part in parts:
        for family, entries in part.items():
            for name, entry in entries.items():
                known = results.setdefault(family, {}).setdefault(name, entry)
                known["layers"] |= entry["layers"]
    return results


def print_means(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Means over layers, one line per alternative."""
    for family, entries in results.items():
        print(f"\n{family:48} output   (keys)  (values)  logits   top-1")
        for name, entry in entries.items():
            layers = entry["layers"].values()
            names = ("output_error", "output_error_of_keys", "output_error_of_values", "logit_error", "top1_agreement")
            means = (statistics.fmean(figures[key] for figures in layers) for key in names)
            print(f"{name:48}", *(f"{mean:.4f} " for mean in means))


def main() -> None:
    options = parse_arguments()
    artifact = load(options.artifact)
    layers = sorted(options.layers or spread_layers(artifact.manifest.layer_indices, _DEFAULT_LAYERS))
    files = {name: options.tensors and options.tensors / f"{name}.pt" for name in ("test", "fit")}
    arguments = (options.model, options.text, options.test_sequences, options.seq_len, None)
    tested = kept(files["test"], capture_sequences, *arguments)[: options.test_sequences]
    arguments = (options.model, options.prompts, options.fit_sequences, options.seq_len, layers)
    fitted = kept(files["fit"], capture_sequences, *arguments)[: options.fit_sequences]

    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = []
        for layer, codec in artifact.layers.items():
            known = [sequence[layer] for sequence in fitted if layer in layers]
            # every third of them: codebooks take most of the time
            has_codebooks = layer in layers[1::3]
            test = [sequence[layer] for sequence in tested]
            futures.append(pool.submit(study_layer, layer, codec, test, known, has_codebooks))
        results = merged(future.result() for future in tqdm(futures, desc="comparing", unit="layer"))
    print_means(results)
    settings = {
        "model": Path(options.model).name,
        "artifact": artifact.manifest.calibration.model_dump(mode="json")
        | {"tensors_sha256": artifact.manifest.tensors_sha256},
        "prompts": options.prompts.name,
        "text": options.text.name,
        "seq_len": options.seq_len,
        "fit_sequences": len(fitted),
        "test_sequences": len(tested),
        "layers": layers,
        "first_query": _FIRST_QUERY,
        "query_stride": _QUERY_STRIDE,
    }
    print(write_record(options.records, options.name or f"codec-choices-{settings['model']}", settings, results))


if __name__ == "__main__":
    sys.exit(main())
