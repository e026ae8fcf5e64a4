"""Scalar quantizers that several methods share: min-max with zero point, percentile clip, Lloyd-Max for a Gaussian."""

import math
from functools import cache
from itertools import pairwise

import torch

INT2_LEVELS = 4
SCALE_BITS = 16
"""Bits of a stored scale, norm or zero point (bf16)."""

_LLOYD_TOLERANCE = 1e-12


def quantize_min_max(x: torch.Tensor, dim: int = -1, num_levels: int = INT2_LEVELS) -> torch.Tensor:
    """x̂ = z + s · round((x − z)/s) with z = min, s = (max − min)/(levels − 1) over a dimension, both rounded to bf16.

    Example: (0, 0.4, 2.6, 3) becomes (0, 0, 3, 3).

    Args:
        x: f32, any shape.
        dim: the elements along it share one scale and one zero point.
        num_levels: levels of the code, 2^bits.

    Returns:
        f32, the shape of x.

    Source: asymmetric integer quantization, as in arXiv 2402.02750, section 3.
    """
    zero_point = _round_to_bf16(x.amin(dim, keepdim=True))
    scale = _round_to_bf16((x.amax(dim, keepdim=True) - zero_point) / (num_levels - 1))
    codes = ((x - zero_point) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, num_levels - 1)
    return codes * scale + zero_point


def clip_percentile(x: torch.Tensor, percentile: float) -> torch.Tensor:
    """Clamp the last dimension to ±τ, τ its ⌈p·d⌉-th smallest magnitude.

    Example: (1, −2, 3, −40) with percentile 0.75 becomes (1, −2, 3, −3).

    Args:
        x: f32 [..., d].
        percentile: p, share of the elements that are left as they are, above 0 and up to 1.

    Returns:
        f32 [..., d].

    Raises:
        ValueError: the percentile is outside its range.

    Source: arXiv 2608.04074, section 16.2 (0.96 in OSCAR's configuration); taking an element instead of
        interpolating between two is an engineering choice.
    """
    if not 0 < percentile <= 1:
        raise ValueError(f"percentile={percentile} must be above 0 and at most 1")
    threshold = x.abs().kthvalue(math.ceil(percentile * x.shape[-1]), dim=-1, keepdim=True).values
    return x.clamp(-threshold, threshold)


def quantize_gaussian(x: torch.Tensor, num_levels: int) -> torch.Tensor:
    """Nearest Lloyd-Max level of a unit Gaussian for every element.

    Args:
        x: f32, any shape, of about unit variance.
        num_levels: levels of the quantizer.

    Returns:
        f32, the shape of x.

    Source: Lloyd (1982), Max (1960).
    """
    levels = torch.tensor(lloyd_max_levels(num_levels), dtype=torch.float32, device=x.device)
    boundaries = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(x.contiguous(), boundaries)]


@cache
def lloyd_max_levels(num_levels: int) -> tuple[float, ...]:
    """Levels of the scalar quantizer with the smallest mean squared error for a unit Gaussian.

    Lloyd's iteration with exact integrals: boundaries midway between levels, levels at the mean of their cell,
    (φ(a) − φ(b)) / (Φ(b) − Φ(a)).

    Example: two levels are ±√(2/π) = ±0.7979, with error 1 − 2/π = 0.3634.

    Args:
        num_levels: at least 1.

    Returns:
        Levels in ascending order, symmetric about 0.

    Source: Lloyd (1982), Max (1960).
    """
    levels = [2 * (i + 0.5) / num_levels - 1 for i in range(num_levels)]
    change = 1.0
    while change > _LLOYD_TOLERANCE:
        middles = [(a + b) / 2 for a, b in pairwise(levels)]
        edges = [-math.inf, *middles, math.inf]
        means = [_cell_mean(a, b) for a, b in pairwise(edges)]
        change = max(abs(a - b) for a, b in zip(levels, means, strict=True))
        levels = means
    return tuple(levels)


def _cell_mean(low: float, high: float) -> float:
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    mass = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
    return math.sqrt(2 / math.pi) * density / mass


def _round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()
