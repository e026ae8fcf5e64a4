"""The codec's choices beside their alternatives: value codes, key scales and codebook training, for one layer.

Every alternative is a `Half`: what is stored, and what attention reads. `VALUES`, `KEYS` and `CODEBOOKS` are plain
dictionaries from a name to a function that fits the half of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vllm_novakv.baselines import CacheCodec, Storage
from vllm_novakv.baselines.nova import KeyScale, NovaKV
from vllm_novakv.baselines.rotations import hadamard_rotation, rotate
from vllm_novakv.baselines.scalar import SCALE_BITS, clip_percentile, lloyd_max_levels, quantize_min_max
from vllm_novakv.calibration.kmeans import SCHEDULE, fit_codebooks
from vllm_novakv.calibration.pipeline import normalised_samples, sample_positions
from vllm_novakv.codec.codebook import CodebookDtype, snap
from vllm_novakv.codec.quantizer import VALUE_STEP, LayerCodec, decode_keys, encode_keys, gather_centroids
from vllm_novakv.codec.transform import key_transforms
from vllm_novakv.evaluation.analysis.codebooks import spread_centroids
from vllm_novakv.evaluation.analysis.scalar_codes import (
    BF16_SIGNIFICAND_BITS,
    UNIFORM_LEVELS,
    Refit,
    quantize_levels,
    refit_scale,
    round_significand,
)

SEARCHED = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35)
"""Candidates for a scale, relative to the one that RMS gives."""

KEY_SEARCHED = (0.85, 1.0, 1.15, 1.3)
"""The same for keys, relative to the norm: each costs a search of all centroids."""

GROUP = 32
"""Elements that share a scale in the variants with several."""


@dataclass(frozen=True, eq=False)
class LayerData:
    """One layer: its codec as shipped, and calibration tensors to fit alternatives on.

    Attributes:
        layer: index, which varies the seed as in a fit.
        codec: of the artifact.
        keys: f32 [num_tokens, num_kv_heads, head_size], calibration keys of all sequences, after RoPE.
        values: the same shape.
        positions: int64 [num_tokens], place of each token in its sequence.
        mass: f32 [num_tokens, num_kv_heads], softmax weight that queries give each key when it is history.
        sensitivity: f32 [num_tokens, num_kv_heads], what errors in its logits do to outputs.
    """

    layer: int
    codec: LayerCodec
    keys: Tensor
    values: Tensor
    positions: Tensor
    mass: Tensor
    sensitivity: Tensor

    @cached_property
    def samples(self) -> Tensor:
        """Normalised key groups, f32 [num_kv_heads * num_groups, num_tokens, group_size]."""
        codec = self.codec
        return normalised_samples(self.keys, codec.key_mean.double(), codec.key_transform.double(), codec.group_size)


@dataclass(frozen=True)
class Half:
    """Keys or values of an alternative.

    Attributes:
        storage: what an element costs.
        quantize: [num_tokens, num_kv_heads, head_size] f32 to what attention reads, the same shape.
    """

    storage: Storage
    quantize: Callable[[Tensor], Tensor]


class Combined(CacheCodec):
    """Keys of one alternative with values of another.

    Args:
        key: half for keys.
        value: half for values.
    """

    name = "combined"
    paper = "arXiv 2608.04074"

    def __init__(self, key: Half, value: Half) -> None:
        self._key, self._value = key, value

    @property
    def key_storage(self) -> Storage:
        return self._key.storage

    @property
    def value_storage(self) -> Storage:
        return self._value.storage

    def quantize_keys(self, key: Tensor) -> Tensor:
        return self._key.quantize(key)

    def quantize_values(self, value: Tensor) -> Tensor:
        return self._value.quantize(value)


def served_keys(codec: LayerCodec, scale: KeyScale = "least-squares") -> Half:
    """The served key format, or that with the paper's scale."""
    method = NovaKV(codec, key_scale=scale)
    return Half(method.key_storage, method.quantize_keys)


def served_values(codec: LayerCodec) -> Half:
    """The served value format."""
    method = NovaKV(codec)
    return Half(method.value_storage, method.quantize_values)


def vectors(codec: LayerCodec, refit: Refit = "least-squares", factors: Sequence[float] = (1.0,)) -> Half:
    """The served key format with another rule for ρ.

    Args:
        codec: transforms and codebooks.
        refit: see `refit_scale`.
        factors: per token, a‖r‖/√d divides r before the search of centroids; the a of least error is kept.
    """
    # nearest(x/a, c) and its refit are those of x among a·c
    books = [codec.codebook * factor for factor in factors]

    def quantize(key: Tensor) -> Tensor:
        exact = rotate(key - codec.key_mean, codec.key_transform)
        candidates = []
        for book in books:
            indices, scale = encode_keys(key, replace(codec, codebook=book))
            if refit != "least-squares":
                # [tokens, heads, 1]
                fitted = refit_scale(exact, gather_centroids(indices, book), refit)
                scale = fitted.squeeze(-1).bfloat16()
            candidates.append(decode_keys(indices, scale, book))
        decoded = torch.stack(candidates)
        # [1, tokens, heads, 1]
        best = (decoded - exact).square().sum(dim=-1, keepdim=True).argmin(dim=0, keepdim=True)
        chosen = decoded.gather(0, best.expand(1, *exact.shape))[0]
        return rotate(chosen, codec.key_transform_inv_t.mT) + codec.key_mean

    return Half(NovaKV(codec).key_storage, quantize)


def scalar_values(
    data: LayerData,
    code: Callable[[Tensor], Tensor],
    metadata_bits: int = SCALE_BITS,
    rotation: Tensor | None = None,
    is_centred: bool = False,
) -> Half:
    """Two-bit codes of (v − v̄) R with metadata_bits per token; v̄ is 0 unless centred, R is R_V unless given."""
    basis = data.codec.value_transform if rotation is None else rotation
    mean = data.values.mean(dim=0) if is_centred else torch.zeros(())

    def quantize(value: Tensor) -> Tensor:
        return rotate(code(rotate(value - mean, basis)), basis.mT) + mean

    return Half(Storage(2, metadata_bits, data.codec.head_size), quantize)


def grouped(code: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The code for every GROUP consecutive elements on their own."""
    return lambda x: code(x.unflatten(-1, (-1, GROUP))).flatten(-2)


def around_mean(code: Callable[[Tensor], Tensor], significand_bits: int) -> Callable[[Tensor], Tensor]:
    """The code of x − z with the zero point z = mean(x) of the token, rounded to some significant bits."""

    def quantize(x: Tensor) -> Tensor:
        zero_point = round_significand(x.mean(dim=-1, keepdim=True), significand_bits)
        return code(x - zero_point) + zero_point

    return quantize


def vector_values(data: LayerData, basis: str, refit: Refit = "least-squares") -> Half:
    """Values coded as keys are: groups of 4, 256 centroids, one scale."""
    return vectors(value_codec(data, basis), refit)


@lru_cache(maxsize=2)
def value_codec(data: LayerData, basis: str) -> LayerCodec:
    """Transform and codebooks for values, in the place of those for keys.

    Args:
        data: of the layer.
        basis: "R_V", or "KLT" for the eigenvectors of Σ v^T v, dealt to the groups by rank.
    """
    codec = data.codec
    zero = torch.zeros_like(codec.key_mean)
    if basis == "KLT":
        values = data.values.double().transpose(0, 1)
        # for queries without a preferred direction the key transform is the KLT
        identity = torch.eye(codec.head_size, dtype=torch.float64).expand(codec.num_kv_heads, -1, -1)
        rotation = key_transforms(identity, values.mT @ values / values.shape[1], codec.group_size).key_transform
    else:
        rotation = codec.value_transform.double()
    samples = normalised_samples(data.values, zero.double(), rotation, codec.group_size)
    return replace(
        codec,
        key_mean=zero,
        key_transform=rotation.float(),
        key_transform_inv_t=rotation.float(),
        codebook=trained(data, samples),
    )


def trained(
    data: LayerData,
    samples: Tensor,
    seed: int = 0,
    schedule: Sequence[tuple[int, int]] = SCHEDULE,
    dtype: CodebookDtype | None = "float8_e4m3fn",
    is_spread: bool = False,
) -> Tensor:
    """Codebooks as a fit trains them, f32 [num_kv_heads, num_groups, num_centroids, group_size].

    Args:
        data: of the layer.
        samples: f32 [num_kv_heads * num_groups, num_samples, group_size].
        seed: of the fit.
        schedule: see `fit_codebooks`.
        dtype: of the stored centroids; None keeps float32.
        is_spread: start from k-means++.
    """
    shape = data.codec.codebook.shape
    initial = spread_centroids(samples, shape[2], seed + data.layer) if is_spread else None
    rounded = None if dtype is None else (lambda centroids: snap(centroids, dtype))
    return fit_codebooks(samples, shape[2], seed + data.layer, schedule, rounded, initial).centroids.view(shape)


def resampled(data: LayerData, weights: Tensor) -> Tensor:
    """As many samples as there are tokens, drawn with replacement with probability ∝ weight.

    Args:
        data: of the layer.
        weights: [num_tokens, num_kv_heads], at least 0.
    """
    generator = torch.Generator().manual_seed(data.layer)
    heads = data.samples.view(data.codec.num_kv_heads, data.codec.num_groups, *data.samples.shape[1:])
    drawn = [
        head[:, torch.multinomial(weight, len(weight), replacement=True, generator=generator).sort().values]
        for head, weight in zip(heads, weights.T.double(), strict=True)
    ]
    return torch.cat(drawn)


def squared_norm(data: LayerData) -> Tensor:
    """‖r‖² of every calibration key, [num_tokens, num_kv_heads]: a normalised error counts ρ² times in the logits."""
    return rotate(data.keys - data.codec.key_mean, data.codec.key_transform).square().sum(dim=-1)


def _subset(data: LayerData, num_samples: int) -> Tensor:
    return data.samples[:, sample_positions(data.samples.shape[1], num_samples, data.layer)]


_STEPS = [VALUE_STEP * factor for factor in SEARCHED]
_default_code = partial(quantize_levels, steps=(VALUE_STEP,))
_unbiased_code = partial(_default_code, refit="unbiased")
_searched_code = partial(quantize_levels, steps=_STEPS, refit="least-squares")
_lloyd_max_code = partial(quantize_levels, levels=lloyd_max_levels(len(UNIFORM_LEVELS)))
_PAIR_BITS = 2 * SCALE_BITS
_BYTE_SIGNIFICAND_BITS = 4  # 3 bits beside the leading one; 5 are left for the exponent, or 4 and a sign


def _scalar(code: Callable[[Tensor], Tensor], **options: Any) -> Callable[[LayerData], Half]:
    return lambda data: scalar_values(data, code, **options)


def _stepped(factor: float) -> Callable[[LayerData], Half]:
    return _scalar(partial(quantize_levels, steps=(VALUE_STEP * factor,)))


def _clipped(percentile: float) -> Callable[[LayerData], Half]:
    return _scalar(lambda x: quantize_min_max(clip_percentile(x, percentile)), metadata_bits=_PAIR_BITS)


def _group_scales(data: LayerData, significand_bits: int, scale_bits: int, refit: Refit = "least-squares") -> Half:
    code = partial(_default_code, refit=refit, significand_bits=significand_bits)
    return scalar_values(data, grouped(code), metadata_bits=scale_bits * data.codec.head_size // GROUP)


_bf16_scales = partial(_group_scales, significand_bits=BF16_SIGNIFICAND_BITS, scale_bits=SCALE_BITS)
_byte_scales = partial(_group_scales, significand_bits=_BYTE_SIGNIFICAND_BITS, scale_bits=SCALE_BITS // 2)

VALUES: Mapping[str, Callable[[LayerData], Half]] = {
    "default: symmetric, step from RMS": lambda data: served_values(data.codec),
    "step 0.9 times": _stepped(0.9),
    "step 1.1 times": _stepped(1.1),
    "scale: least squares": _scalar(partial(_default_code, refit="least-squares")),
    "scale: least squares, searched": _scalar(_searched_code),
    "scale: norm": _scalar(partial(_default_code, refit="norm")),
    "scale: unbiased": _scalar(_unbiased_code),
    "scale: unbiased, searched": _scalar(partial(_searched_code, refit="unbiased")),
    "Lloyd-Max levels": _scalar(_lloyd_max_code),
    "Lloyd-Max levels, unbiased": _scalar(partial(_lloyd_max_code, refit="unbiased")),
    "min-max, zero point": _scalar(quantize_min_max, metadata_bits=_PAIR_BITS),
    "min-max, clipped at 0.96": _clipped(0.96),
    "min-max, clipped at 0.92": _clipped(0.92),
    "zero point: token's mean, unbiased": _scalar(
        around_mean(_unbiased_code, BF16_SIGNIFICAND_BITS), metadata_bits=_PAIR_BITS
    ),
    "the same, 8 bits for each of scale and zero point": _scalar(
        around_mean(partial(_unbiased_code, significand_bits=_BYTE_SIGNIFICAND_BITS), _BYTE_SIGNIFICAND_BITS),
        metadata_bits=SCALE_BITS,
    ),
    "bf16 scale per 32, least squares": _bf16_scales,
    "bf16 scale per 32, unbiased": partial(_bf16_scales, refit="unbiased"),
    "8-bit scale per 32, unbiased": partial(_byte_scales, refit="unbiased"),
    "centred": _scalar(_default_code, is_centred=True),
    "Hadamard alone": lambda data: scalar_values(data, _default_code, rotation=hadamard_rotation(data.codec.head_size)),
    "Hadamard alone, unbiased": lambda data: scalar_values(
        data, _unbiased_code, rotation=hadamard_rotation(data.codec.head_size)
    ),
    "no rotation": lambda data: scalar_values(
        data, _default_code, rotation=torch.eye(data.codec.head_size).unsqueeze(0)
    ),
    "VQ, R_V": partial(vector_values, basis="R_V"),
    "VQ, R_V, unbiased": partial(vector_values, basis="R_V", refit="unbiased"),
    "VQ, KLT": partial(vector_values, basis="KLT"),
    "VQ, KLT, unbiased": partial(vector_values, basis="KLT", refit="unbiased"),
}
"""Value halves by name; keys are the default's."""

KEYS: Mapping[str, Callable[[LayerData], Half]] = {
    "default: scale by least squares": lambda data: served_keys(data.codec),
    "scale: norm": lambda data: served_keys(data.codec, "norm"),
    "scale: least squares, searched": lambda data: vectors(data.codec, factors=KEY_SEARCHED),
    "scale: norm kept": lambda data: vectors(data.codec, refit="norm"),
    "scale: unbiased": lambda data: vectors(data.codec, refit="unbiased"),
    "scale: unbiased, searched": lambda data: vectors(data.codec, "unbiased", KEY_SEARCHED),
}
"""Key halves by name, with the artifact's codebooks; values are the default's."""

PAIRS: Mapping[str, tuple[str, str]] = {
    "unbiased keys and values": ("scale: unbiased", "scale: unbiased"),
    "the same, searched": ("scale: unbiased, searched", "scale: unbiased, searched"),
    "searched unbiased keys, unbiased VQ values in R_V": ("scale: unbiased, searched", "VQ, R_V, unbiased"),
    "unbiased keys, values with 8-bit zero point": (
        "scale: unbiased",
        "the same, 8 bits for each of scale and zero point",
    ),
    "the paper's: norm, min-max": ("scale: norm", "min-max, zero point"),
}
"""Names of key halves with names of value halves."""


def _book(**options: Any) -> Callable[[LayerData], Tensor]:
    return lambda data: trained(data, data.samples, **options)


def _weighted(weights: Callable[[LayerData], Tensor]) -> Callable[[LayerData], Tensor]:
    return lambda data: trained(data, resampled(data, weights(data)))


CODEBOOKS: Mapping[str, Callable[[LayerData], Tensor]] = {
    "default: all samples, 25 staged iterations": _book(),
    "another seed": _book(seed=1000),
    "half of the samples": lambda data: trained(data, _subset(data, data.samples.shape[1] // 2)),
    "a quarter": lambda data: trained(data, _subset(data, data.samples.shape[1] // 4)),
    "5 full iterations": _book(schedule=((1, 5),)),
    "50 full iterations": _book(schedule=((1, 50),)),
    "k-means++": _book(is_spread=True),
    "without sink tokens": lambda data: trained(data, data.samples[:, data.positions >= 64]),
    "weighted by ρ²": _weighted(squared_norm),
    "weighted by attention": _weighted(lambda data: data.mass),
    "weighted by its root": _weighted(lambda data: data.mass.sqrt()),
    "weighted by output sensitivity": _weighted(lambda data: data.sensitivity),
    "weighted by its fourth root": _weighted(lambda data: data.sensitivity.pow(0.25)),
    "centroids in e5m2": _book(dtype="float8_e5m2"),
    "centroids of integers": _book(dtype="int8"),
    "centroids in fp32": _book(dtype=None),
}
"""Codebooks by name, in the artifact's transforms, all trained on the same calibration keys."""
