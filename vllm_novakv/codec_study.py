"""Codec-level study of a model: bases, quantizers, partitions and the rate law on keys and queries as served.

The model runs once, as for a fit. Everything is fitted on the text's first part, and measured on its held-out rest.
The result is one file, study.json, that `novakv eval report` draws.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from vllm_novakv.calibration import prompts as texts
from vllm_novakv.calibration.pipeline import sample_positions, tokenized_text
from vllm_novakv.evaluation.analysis.bases import KeyStatistics, key_statistics
from vllm_novakv.evaluation.analysis.compare import (
    FittedHead,
    HeadTensors,
    compare_bases,
    compare_partitions,
    measure_rates,
)
from vllm_novakv.evaluation.analysis.metrics import query_weighted_distortion
from vllm_novakv.evaluation.analysis.rate_law import RATES, GroupDistortion, fit_rate_law
from vllm_novakv.evaluation.record import describe_environment
from vllm_novakv.evaluation.run_directory import write_new
from vllm_novakv.evaluation.study_report import STUDY_NAME
from vllm_novakv.support import assess_model

if TYPE_CHECKING:
    from vllm_novakv.calibration.capture import LayerCapture

_MAX_QUERY_POSITIONS = 256


@dataclass(frozen=True)
class StudySettings:
    """Everything that a study depends on.

    Attributes:
        model: directory, or a hub name that is already downloaded.
        prompts: prompt file, as for a fit; None is the text that ships.
        num_tokens: tokens that are fitted on.
        seq_len: tokens per sequence; the model's limit if that is less.
        layers: layer indices; empty takes the second, the middle and the last of full attention.
        num_heads: KV heads per layer, the first ones.
        bits: rate per element.
        group_size: elements per vector.
        seed: of k-means, samples and the random partition.
        dtype: vLLM's dtype for the run.
    """

    model: str
    prompts: Path | None = None
    num_tokens: int = 8192
    seq_len: int = 4096
    layers: tuple[int, ...] = ()
    num_heads: int = 1
    bits: float = 2.0
    group_size: int = 4
    seed: int = 0
    dtype: str = "auto"


def study_codec(settings: StudySettings, directory: Path) -> Path:
    """Capture, compare, and write study.json.

    Args:
        settings: see `StudySettings`.
        directory: of this study alone; created if missing.

    Returns:
        The file.

    Raises:
        ValueError: there is a study already, or the model, the text or a layer does not fit.

    Source: arXiv 2608.04074, sections 5, 10 and 14.
    """
    path = directory / STUDY_NAME
    if path.exists():
        raise ValueError(f"{directory} holds a study already; choose another --out")
    source = settings.prompts or texts.DEFAULT_PROMPTS
    prompts = texts.read_prompts(source, None, settings.seed)

    # vLLM takes seconds to import, so only after the cheap checks
    from vllm_novakv.calibration.capture import CapturePlan, capture, inspect_model, load_tokenizer

    facts = inspect_model(settings.model, settings.dtype)
    support = assess_model(facts.hf_config)
    if support.problems:
        raise ValueError(f"{settings.model} cannot be studied: {'; '.join(support.problems)}")
    layers = choose_layers(support.quantized_layers, settings.layers)
    tokenizer = load_tokenizer(settings.model)
    seq_len = min(settings.seq_len, facts.max_model_len)
    text = tokenized_text(prompts, tokenizer, settings.num_tokens, seq_len, settings.num_tokens)
    others = tuple(layer for layer in support.quantized_layers if layer not in layers)
    positions = sample_positions(settings.num_tokens, settings.num_tokens, settings.seed)
    captures = capture(settings.model, CapturePlan(text.sequences, text.heldout, positions, others), facts)

    heads = []
    law_data = []
    pairs = [(layer, head) for layer in layers for head in range(min(settings.num_heads, facts.num_kv_heads))]
    for layer, head in tqdm(pairs, desc="comparing codecs", unit="head"):
        train, test = fitted_head(captures[layer], head), held_out_head(captures[layer], head)
        result, rates = study_head(train, test, settings)
        heads.append({"layer": layer, "head": head, **result})
        law_data += rates
    measured = [
        [rate, statistics.geometric_mean(x for data in law_data if data.bits == rate for x in data.normalized_test)]
        for rate in RATES
    ]
    shown = dataclasses.asdict(settings) | {"model": Path(settings.model).name, "prompts": source.name}
    study = {
        "settings": shown | {"layers": layers, "seq_len": seq_len, "heldout_tokens": len(text.heldout)},
        "environment": describe_environment(),
        "heads": heads,
        "rate_law": dataclasses.asdict(fit_rate_law(law_data)) | {"measured": measured},
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_new(path, study)
    return path


def choose_layers(available: Sequence[int], asked: Sequence[int]) -> list[int]:
    """The layers asked for, or the second, the middle and the last.

    Example: of layers 0 to 29, 1, 15 and 29.

    Args:
        available: layers with full attention, ascending.
        asked: layer indices, possibly none.

    Returns:
        Ascending indices.

    Raises:
        ValueError: a layer is not available.
    """
    if unknown := sorted(set(asked) - set(available)):
        raise ValueError(f"layers {unknown} have no full attention; choose from {list(available)}")
    if asked:
        return sorted(set(asked))
    return sorted({available[min(1, len(available) - 1)], available[len(available) // 2], available[-1]})


def fitted_head(capture: LayerCapture, head: int) -> FittedHead:
    """Training keys and moments of one KV head, on the CPU.

    Args:
        capture: of the layer.
        head: index of the KV head.
    """
    moments = capture.moments
    num_queries = moments.num_tokens * capture.heldout_query.shape[1] // capture.keys.shape[1]
    fitted = KeyStatistics(
        key_mean=moments.key_mean[head].cpu(),
        key_covariance=moments.key_scatter[head].cpu() / moments.num_tokens,
        query_moment=moments.query_moment[head].cpu() / num_queries,
    )
    return FittedHead(capture.keys[:, head].cpu(), fitted)


def held_out_head(capture: LayerCapture, head: int) -> HeadTensors:
    """Held-out keys of one KV head with the queries of its heads at spread positions, on the CPU.

    Args:
        capture: of the layer.
        head: index of the KV head.
    """
    num_tokens, num_kv_heads, head_size = capture.heldout_key.shape
    heads_per_kv_head = capture.heldout_query.shape[1] // num_kv_heads
    positions = torch.arange(0, num_tokens, max(1, num_tokens // _MAX_QUERY_POSITIONS))
    own = slice(head * heads_per_kv_head, (head + 1) * heads_per_kv_head)
    queries = capture.heldout_query.cpu()[positions, own]
    return HeadTensors(
        keys=capture.heldout_key[:, head].cpu(),
        queries=queries.reshape(-1, head_size),
        positions=positions.repeat_interleave(heads_per_kv_head),
    )


def study_head(
    train: FittedHead, test: HeadTensors, settings: StudySettings
) -> tuple[dict[str, Any], list[GroupDistortion]]:
    """All comparisons on one KV head.

    Args:
        train: what is fitted on.
        test: what is measured on.
        settings: rate, group size and seed.

    Returns:
        JSON values, and the distortions at several rates.
    """
    options = (settings.bits, settings.group_size, settings.seed)
    moment = key_statistics(test.keys, test.queries).query_moment
    mean = train.statistics.key_mean.expand(len(test.keys), -1)
    result = {
        # what is left when every key becomes the mean: distortions are shown relative to it
        "energy": query_weighted_distortion(test.keys, mean, moment),
        "bases": [dataclasses.asdict(row) for row in compare_bases(train, test, *options)],
        "partitions": [
            {
                "name": part.name,
                "log10_volumes": part.log10_volumes.tolist(),
                "test_distortion": statistics.fmean(part.distortion.test),
                "mean_volume_root": statistics.fmean(part.distortion.volume_roots),
                "total_correlation_bits": statistics.fmean(part.total_correlation),
            }
            for part in compare_partitions(train, test, *options)
        ],
    }
    return result, measure_rates(train, test, RATES, settings.group_size, settings.seed)
