"""The fit: text → one run of the model → moments → bases → codebooks → figures on held-out text → artifact.

check     everything that can be refused before the model is loaded
fit       the whole calibration; writes the artifact
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from tqdm import tqdm

from vllm_novakv import artifact as artifacts
from vllm_novakv.artifact import Artifact, CalibrationRecord, LayerFigures
from vllm_novakv.baselines.moments import (
    AttentionMoments,
    check_moments_directory,
    moments_directory,
    save_moments,
)
from vllm_novakv.calibration import prompts as texts
from vllm_novakv.calibration.kmeans import fit_codebooks
from vllm_novakv.codec import quantizer, transform
from vllm_novakv.codec.codebook import DEFAULT_DTYPE, CodebookDtype, snap
from vllm_novakv.codec.quantizer import MAX_CENTROIDS, LayerCodec
from vllm_novakv.fingerprint import ModelFingerprint, default_artifact_dir, fingerprint_model, resolve_model_dir
from vllm_novakv.support import assess_model

if TYPE_CHECKING:
    from vllm_novakv.calibration.capture import LayerCapture, ModelFacts, Tokenizer

# Figures need no more queries than this; they are spread over the held-out text and see all of its keys.
_MAX_FIGURE_QUERIES = 256

# Held-out logits of one block of query rows: at most 64 MB in float32.
_LOGITS_PER_BLOCK = 1 << 24


class FitSettings(BaseModel):
    """Everything that a fit depends on.

    Raises:
        ValueError: an unknown field or a value outside its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Model directory, or a hub name that is already downloaded.")
    prompts: Path | None = Field(default=None, description="Prompt file; None is the text that ships with the package.")
    prompt_columns: tuple[str, ...] | None = Field(default=None, description="Columns of a .csv or .jsonl file.")
    num_tokens: int | None = Field(default=None, ge=1, description="Tokens for the fit; None is all, up to 131,072.")
    seq_len: int | None = Field(
        default=None, ge=2, description="Tokens per sequence; None is 32768 at most, 4096 on a CPU."
    )
    out: Path | None = Field(default=None, description="Artifact directory; None is where the server looks.")
    seed: int = Field(default=0, ge=0, description="Of k-means, of the samples drawn and of the order of options.")
    codebook_dtype: CodebookDtype = Field(default=DEFAULT_DTYPE, description="Of centroids.")
    max_samples: int = Field(default=131_072, ge=1, description="Most keys per head that k-means trains on.")
    skip_layers: tuple[int, ...] = Field(default=(), description="Layers that stay on vLLM's own cache.")
    group_size: int = Field(default=4, ge=1, description="Key elements per index.")
    num_centroids: int = Field(default=256, ge=2, le=MAX_CENTROIDS, description="Centroids per group.")
    dtype: str = Field(default="auto", description="vLLM's dtype for the run.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="Ranks that share the heads during the run.")
    save_moments: bool = Field(default=False, description="Keep the moments beside the artifact, for other methods.")


@dataclass(frozen=True)
class LayerFit:
    """One layer's codec with everything the table shows.

    Attributes:
        codec: the fitted layer.
        figures: what the manifest keeps.
        sorted_spread_bits: spread of group volumes if consecutive coordinates were grouped.
        random_spread_bits: the same for a random partition.
        key_distortion: mean ‖x − ĉ‖² / ‖x‖² over the k-means samples, after snapping.
    """

    codec: LayerCodec
    figures: LayerFigures
    sorted_spread_bits: float
    random_spread_bits: float
    key_distortion: float


@dataclass(frozen=True)
class FitResult:
    """A finished fit.

    Attributes:
        artifact: as written.
        directory: where.
        layers: layer index to fit, ascending.
        skip_layers: layers that the settings left out.
        is_default_directory: whether a server finds the artifact by itself.
    """

    artifact: Artifact
    directory: Path
    layers: dict[int, LayerFit]
    skip_layers: tuple[int, ...]
    is_default_directory: bool


def fit(settings: FitSettings) -> FitResult:
    """Calibrate a model and write its artifact.

    1. Refuse what cannot work: model, text, token counts, output directory.
    2. Cut the text into sequences and a held-out part.
    3. Run the model once: moments of every head, and the keys at the sampled positions.
    4. Per layer: bases from the moments, normalised samples, codebooks, figures on the held-out text.
    5. Write the artifact, all or nothing, and beside it the moments if they are wanted.

    The paper makes two passes, moments first and transformed samples second. Keeping the sampled keys of the first pass
    as the model wrote them takes half the memory of the transformed samples and saves the second run.

    Args:
        settings: see `FitSettings`.

    Returns:
        The artifact with its figures.

    Raises:
        ValueError: the settings, the text or the model cannot give a fit; the text says why and what to do.
        NotImplementedError: the model's attention is of a kind that the 2-bit cache cannot serve.

    Source: arXiv 2608.04074, algorithms 1 to 3.
    """
    # 1. what can be refused without vLLM
    source = settings.prompts or texts.DEFAULT_PROMPTS
    texts.check_token_counts(settings.num_tokens, settings.max_samples, settings.num_centroids)
    prompts = texts.read_prompts(source, settings.prompt_columns, settings.seed)
    model_dir = resolve_model_dir(settings.model)
    fingerprint = fingerprint_model(model_dir)
    directory = settings.out or default_artifact_dir(fingerprint)
    artifacts.check_output_directory(directory)
    if settings.save_moments:
        check_moments_directory(moments_directory(directory))

    # 2. vLLM takes seconds to import, so only after the cheap checks
    from vllm_novakv.calibration.capture import CapturePlan, capture, inspect_model, load_tokenizer

    facts = inspect_model(settings.model, settings.dtype)
    _check_model(settings, facts.hf_config, facts.num_kv_heads)
    seq_len = _sequence_length(settings.seq_len, facts)
    tokenizer = load_tokenizer(settings.model)
    min_tokens = texts.SAMPLES_PER_CENTROID * settings.num_centroids
    text = tokenized_text(prompts, tokenizer, settings.num_tokens, seq_len, min_tokens)

    # 3. run
    num_tokens = sum(len(sequence) for sequence in text.sequences)
    positions = sample_positions(num_tokens, settings.max_samples, settings.seed)
    plan = CapturePlan(text.sequences, text.heldout, positions, settings.skip_layers)
    captures = capture(settings.model, plan, facts, settings.tensor_parallel_size)

    # 4. fit, freeing each layer's keys on the way
    moments = {
        layer: AttentionMoments(seen.moments.query_moment, seen.moments.output_moment)
        for layer, seen in captures.items()
        if settings.save_moments
    }
    layers = {}
    for layer in tqdm(sorted(captures), desc="fitting the codebooks", unit="layer"):
        layers[layer] = fit_layer(layer, captures.pop(layer), settings)

    # 5. write
    record = CalibrationRecord(
        source=source.name,
        num_tokens=num_tokens,
        seq_len=max(len(sequence) for sequence in text.sequences),
        seed=settings.seed,
        vllm_version=facts.vllm_version,
        created="",
    )
    artifact = artifacts.build(
        {layer: result.codec for layer, result in layers.items()},
        fingerprint=fingerprint,
        codebook_dtype=settings.codebook_dtype,
        calibration=record,
        figures=[result.figures for result in layers.values()],
    )
    artifacts.save(artifact, directory)
    if settings.save_moments:
        save_moments(moments, fingerprint, record, moments_directory(directory))
    return FitResult(artifact, directory, layers, settings.skip_layers, _is_default(directory, fingerprint))


def tokenized_text(
    prompts: Sequence[str], tokenizer: Tokenizer, num_tokens: int | None, seq_len: int, min_tokens: int
) -> texts.TextPlan:
    """`texts.plan_text` with a model's tokenizer, and before every sequence the token that it puts before every text.

    Args:
        prompts, num_tokens, seq_len, min_tokens: as there.
        tokenizer: of the model.

    Returns:
        The sequences and the held-out text.

    Raises:
        ValueError: as there.
    """
    prefix = tokenizer.encode("", add_special_tokens=True)[:1]
    return texts.plan_text(
        prompts,
        lambda prompt: tokenizer.encode(prompt, add_special_tokens=False),
        prefix if prefix == [tokenizer.bos_token_id] else [],
        num_tokens,
        seq_len,
        min_tokens,
    )


def _is_default(directory: Path, fingerprint: ModelFingerprint) -> bool:
    return directory.resolve() == default_artifact_dir(fingerprint).resolve()


def _check_model(settings: FitSettings, hf_config: dict[str, object], num_kv_heads: int) -> None:
    support = assess_model(hf_config, settings.skip_layers)
    if support.problems:
        raise ValueError(f"{settings.model} cannot be calibrated: " + "; ".join(support.problems))
    if num_kv_heads % settings.tensor_parallel_size != 0:
        raise ValueError(
            f"tensor_parallel_size={settings.tensor_parallel_size} does not divide the model's {num_kv_heads} KV "
            "heads; every rank must hold whole KV heads: use fewer ranks for the fit (the artifact serves any number)"
        )


def _sequence_length(asked: int | None, facts: ModelFacts) -> int:
    limit = facts.max_model_len
    if asked is None:
        return min(limit, texts.DEFAULT_SEQ_LEN_CPU if facts.is_cpu else texts.DEFAULT_SEQ_LEN)
    if asked > limit:
        raise ValueError(f"--seq-len {asked} is longer than the model's limit of {limit} tokens: use {limit} or less")
    return asked


def sample_positions(num_tokens: int, max_samples: int, seed: int) -> Tensor:
    """Positions of the keys that k-means trains on: all, or max_samples drawn without replacement.

    Args:
        num_tokens: tokens of the fit.
        max_samples: most samples per head.
        seed: of the draw.

    Returns:
        Sorted positions `[min(num_tokens, max_samples)] i64`.

    Source: arXiv 2608.04074, section 8.3 (131,072 samples per head).
    """
    if num_tokens <= max_samples:
        return torch.arange(num_tokens)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_tokens, generator=generator)[:max_samples].sort().values


def fit_layer(layer: int, capture: LayerCapture, settings: FitSettings) -> LayerFit:
    """Bases, codebooks and figures of one layer.

    1. R_K, R_K^{-T} and R_V from the moments, averaged over tokens and query heads so that transformed queries have
       unit variance.
    2. Samples x = r/ρ with r = (k − k̄) R_K and ρ = ‖r‖/√d, cut into groups.
    3. Codebooks by k-means, snapped to the 8-bit type.
    4. Figures on the held-out text.

    Args:
        layer: layer index, which also varies the seed.
        capture: what was observed.
        settings: group size, number of centroids, seed and type.

    Returns:
        The layer's codec, on the CPU, with its figures.

    Raises:
        ValueError: the moments are not finite or a head saw no query.

    Source: arXiv 2608.04074, algorithms 2 and 3.
    """
    moments = capture.moments
    num_kv_heads = moments.key_mean.shape[0]
    num_queries = moments.num_tokens * capture.heldout_query.shape[1] // num_kv_heads
    keys = transform.key_transforms(
        moments.query_moment / num_queries, moments.key_scatter / moments.num_tokens, settings.group_size
    )
    value_transform = transform.value_transform(moments.output_moment / num_queries)

    samples = normalised_samples(capture.keys, moments.key_mean, keys.key_transform, settings.group_size)
    books = fit_codebooks(
        samples,
        settings.num_centroids,
        seed=settings.seed + layer,
        snap=lambda centroids: snap(centroids, settings.codebook_dtype),
    )
    energy = samples.square().sum(dim=2).mean(dim=1)
    codec = LayerCodec(
        key_mean=moments.key_mean.float(),
        key_transform=keys.key_transform.float(),
        key_transform_inv_t=keys.key_transform_inv_t.float(),
        value_transform=value_transform.float(),
        codebook=books.centroids.view(num_kv_heads, -1, settings.num_centroids, settings.group_size),
    )
    spread = _volume_spreads(keys.eigenvalues, settings.group_size, settings.seed)
    logit_error, agreement = key_figures(codec, capture.heldout_query, capture.heldout_key)
    figures = LayerFigures(
        layer=layer,
        relative_logit_error=logit_error,
        top1_agreement=agreement,
        volume_spread_bits=spread["equalizing"],
        value_relative_error=value_error(codec, capture.heldout_value),
    )
    distortion = float(books.distortion.sum() / energy.sum())
    return LayerFit(codec.to("cpu"), figures, spread["sorted"], spread["random"], distortion)


def normalised_samples(keys: Tensor, key_mean: Tensor, key_transform: Tensor, group_size: int) -> Tensor:
    """x = r/ρ with r = (k − k̄) R_K and ρ = ‖r‖/√d, cut into groups; x = r for r = 0.

    Args:
        keys: `[num_samples, num_kv_heads, head_size]`, any float type.
        key_mean: k̄, `[num_kv_heads, head_size] f64`.
        key_transform: R_K, `[num_kv_heads, head_size, head_size] f64`.
        group_size: coordinates per group.

    Returns:
        `[num_kv_heads * num_groups, num_samples, group_size] f32`, on the device of the transform.

    Source: arXiv 2608.04074, algorithm 3.
    """
    num_samples, num_kv_heads, head_size = keys.shape
    # [num_kv_heads, num_samples, head_size]; float32 halves the memory, and 1e-7 is far below a codebook's resolution
    centred = keys.to(key_transform.device).float().transpose(0, 1) - key_mean.float().unsqueeze(1)
    rotated = torch.bmm(centred, key_transform.float())
    scale = torch.linalg.vector_norm(rotated, dim=2, keepdim=True) / math.sqrt(head_size)
    rotated /= torch.where(scale == 0, 1.0, scale)
    grouped = rotated.view(num_kv_heads, num_samples, head_size // group_size, group_size)
    return grouped.transpose(1, 2).reshape(-1, num_samples, group_size)


def _volume_spreads(eigenvalues: Tensor, group_size: int, seed: int) -> dict[str, float]:
    """Spread of group volumes in bits per element for each way to group, averaged over heads."""
    heads = [transform.group_volumes(head, group_size, seed) for head in eigenvalues]
    return {
        name: sum(transform.volume_spread_bits(volumes[name], group_size) for volumes in heads) / len(heads)
        for name in heads[0]
    }


def key_figures(codec: LayerCodec, query: Tensor, key: Tensor) -> tuple[float, float]:
    """‖QKᵀ − QK̂ᵀ‖_F / ‖QKᵀ‖_F over causal pairs, and the share of queries whose best key stays the best.

    Args:
        codec: the fitted layer.
        query: post-RoPE queries of one sequence `[num_tokens, num_heads, head_size]`, any float type.
        key: post-RoPE keys `[num_tokens, num_kv_heads, head_size]`, any float type.

    Returns:
        The relative logit error and the top-1 agreement, over all query heads.

    Source: arXiv 2608.04074, equation 5 and section 8.1 (top-1 attention agreement).
    """
    num_tokens, num_kv_heads, _ = key.shape
    device = codec.key_mean.device
    key = key.to(device)
    indices, key_scale = quantizer.encode_keys(key, codec)
    decoded = quantizer.decode_keys(indices, key_scale, codec.codebook)
    heads_per_kv_head = query.shape[1] // num_kv_heads
    key_positions = torch.arange(num_tokens, device=device)
    query_positions = key_positions[:: max(1, num_tokens // _MAX_FIGURE_QUERIES)]
    error = torch.zeros((), dtype=torch.float64, device=device)
    energy = torch.zeros_like(error)
    num_agreeing = torch.zeros((), dtype=torch.int64, device=device)
    for head in range(num_kv_heads):
        # [num_tokens, head_size]
        exact_keys, restored_keys = key[:, head].float(), decoded[:, head]
        for positions in query_positions.split(max(1, _LOGITS_PER_BLOCK // (heads_per_kv_head * num_tokens))):
            # [heads_per_kv_head, block, head_size]
            rows = query[positions.to(query.device), head * heads_per_kv_head : (head + 1) * heads_per_kv_head]
            rows = rows.to(device).float().transpose(0, 1)
            # [heads_per_kv_head, block, num_tokens]
            exact = rows @ exact_keys.T
            restored = rows @ codec.key_transform_inv_t[head] @ restored_keys.T
            restored += (rows @ codec.key_mean[head]).unsqueeze(2)
            is_future = key_positions > positions.unsqueeze(1)
            num_agreeing += (_best(exact, is_future) == _best(restored, is_future)).sum()
            error += (exact - restored).masked_fill_(is_future, 0).double().square().sum()
            energy += exact.masked_fill_(is_future, 0).double().square().sum()
    return _ratio(error, energy), int(num_agreeing) / (query_positions.numel() * query.shape[1])


def _best(logits: Tensor, is_future: Tensor) -> Tensor:
    """Index of the largest logit that a query may see."""
    return logits.masked_fill(is_future, -math.inf).argmax(dim=2)


def value_error(codec: LayerCodec, value: Tensor) -> float:
    """‖V − V̂‖_F / ‖V‖_F, measured in the rotated basis, which keeps norms.

    Args:
        codec: the fitted layer.
        value: `[num_tokens, num_kv_heads, head_size]`, any float type.

    Returns:
        The relative error.

    Source: arXiv 2608.04074, proposition 1 (Parseval for an orthogonal transform).
    """
    value = value.to(codec.key_mean.device)
    codes, scale = quantizer.encode_values(value, codec.value_transform)
    rotated = torch.bmm(value.float().transpose(0, 1), codec.value_transform).transpose(0, 1)
    error = (rotated - quantizer.decode_values(codes, scale)).double().square().sum()
    return _ratio(error, rotated.double().square().sum())


def _ratio(error: Tensor, energy: Tensor) -> float:
    """√(error / energy); 0 for no energy and no error."""
    return float((error / energy.clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
