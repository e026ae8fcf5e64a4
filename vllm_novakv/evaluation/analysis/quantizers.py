"""The quantizers of the comparison, fitted on coefficients of one KV head: entropy-coded SQ, fixed SQ and VQ.

Source: arXiv 2608.04074, section 5 ("Transform analysis", "Transform-quantizer") and algorithm 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_novakv.baselines.scalar import clip_percentile, quantize_min_max
from vllm_novakv.evaluation.analysis.codebooks import (
    fit_codebooks,
    gather_groups,
    nearest,
    num_centroids,
    scatter_groups,
)
from vllm_novakv.evaluation.analysis.partitions import partition

_BISECTIONS = 28
# what a symbol that calibration never saw is counted as
_PSEUDO_COUNT = 0.5


@dataclass(frozen=True)
class Quantized:
    """Coefficients after quantization.

    Attributes:
        coefficients: f64 [num_tokens, d].
        bits_per_element: rate of the codes, without scales.
    """

    coefficients: torch.Tensor
    bits_per_element: float


Quantizer = Callable[[torch.Tensor], Quantized]
"""A fitted quantizer of coefficients, f64 [num_tokens, d]."""


def fit_entropy_coded(coefficients: torch.Tensor, bits: float, group_size: int, seed: int) -> Quantizer:
    """Uniform quantizer with one step for all coordinates and an ideal entropy code per coordinate.

    The step is the one for which the mean entropy of the codes of the fitted coefficients is `bits`. On other
    coefficients the rate is the cross-entropy under the fitted code, with counts from half a symbol on.

    Args:
        coefficients: f64 [num_tokens, d], zero mean.
        bits: rate per element.
        group_size: not used; all quantizers are fitted with the same arguments.
        seed: not used.

    Returns:
        The quantizer.

    Raises:
        ValueError: the coefficients are all zero.
    """
    largest = float(coefficients.abs().max())
    if largest == 0:
        raise ValueError("all coefficients are zero; there is nothing to fit a step to")
    # bisection on the logarithm of the step: the rate falls with it
    low, high = math.log(largest) - 40, math.log(largest) + 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        codes = (coefficients / math.exp(middle)).round()
        low, high = (middle, high) if _mean_entropy(codes) > bits else (low, middle)
    step = math.exp(high)
    fitted = (coefficients / step).round()

    def quantize(test: torch.Tensor) -> Quantized:
        codes = (test / step).round()
        return Quantized(codes * step, _mean_cross_entropy(codes, fitted))

    return quantize


def fit_fixed_scalar(coefficients: torch.Tensor, bits: float, group_size: int, seed: int) -> Quantizer:
    """The same number of bits for every coordinate: min-max codes per token, clipped at the 0.96 percentile.

    Args:
        coefficients: f64 [num_tokens, d]; not used, because scale and zero point belong to the token.
        bits: rate per element, a whole number.
        group_size: not used.
        seed: not used.

    Returns:
        The quantizer.

    Raises:
        ValueError: the rate is not a whole number.
    """
    if bits != int(bits):
        raise ValueError(f"bits={bits}: a fixed scalar quantizer needs a whole number of bits")

    def quantize(test: torch.Tensor) -> Quantized:
        return Quantized(
            quantize_min_max(clip_percentile(test.float(), 0.96), num_levels=2 ** int(bits)).double(), bits
        )

    return quantize


def fit_vector(coefficients: torch.Tensor, bits: float, group_size: int, seed: int) -> Quantizer:
    """k-means codebooks of 2^{g·bits} centroids for the groups of the equalizing partition, per-token scale ‖r‖/√d.

    Args:
        coefficients: f64 [num_tokens, d].
        bits: rate per element; g·bits is a whole number.
        group_size: g.
        seed: of the initial centroids.

    Returns:
        The quantizer.

    Raises:
        ValueError: g·bits is not a whole number, g does not divide d, or there are fewer tokens than centroids.
    """
    groups = partition("equalizing", coefficients.var(dim=0, correction=0), group_size)
    codebooks = fit_codebooks(gather_groups(normalize(coefficients)[0], groups), num_centroids(bits, group_size), seed)

    def quantize(test: torch.Tensor) -> Quantized:
        normalized, scale = normalize(test)
        chosen = nearest(gather_groups(normalized, groups), codebooks)
        return Quantized(scatter_groups(chosen, groups) * scale, bits)

    return quantize


QUANTIZERS: Mapping[str, Callable[[torch.Tensor, float, int, int], Quantizer]] = {
    "entropy-coded-sq": fit_entropy_coded,
    "fixed-sq": fit_fixed_scalar,
    "vq": fit_vector,
}
"""Fits by name: (coefficients, bits, group_size, seed) to a quantizer."""


def normalize(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """r/ρ and ρ = ‖r‖/√d per token; ρ is 1 for a zero vector.

    Args:
        coefficients: f64 [num_tokens, d].

    Returns:
        f64 [num_tokens, d] and f64 [num_tokens, 1].
    """
    norm = torch.linalg.vector_norm(coefficients, dim=-1, keepdim=True) / math.sqrt(coefficients.shape[-1])
    scale = torch.where(norm > 0, norm, 1.0)
    return coefficients / scale, scale


def _mean_entropy(codes: torch.Tensor) -> float:
    """log₂ n − Σ c log₂ c / (n d) over the counts c of every symbol of every column of [n, d]."""
    ordered = codes.mT.sort(dim=-1).values
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = is_first.flatten().nonzero().squeeze(-1)
    counts = first.diff(append=first.new_tensor([codes.numel()])).double()
    return math.log2(codes.shape[0]) - float((counts * counts.log2()).sum()) / codes.numel()


def _mean_cross_entropy(codes: torch.Tensor, fitted: torch.Tensor) -> float:
    total = 0.0
    for column, known in zip(codes.T, fitted.T, strict=True):
        symbols, counts = known.unique(return_counts=True)
        # one more symbol stands for all that were not seen
        probabilities = torch.cat([counts.double(), counts.new_zeros(1).double()]) + _PSEUDO_COUNT
        probabilities /= probabilities.sum()
        place = torch.searchsorted(symbols, column.contiguous()).clamp(max=len(symbols) - 1)
        place = torch.where(symbols[place] == column, place, len(symbols))
        total -= float(probabilities[place].log2().mean())
    return total / codes.shape[1]
