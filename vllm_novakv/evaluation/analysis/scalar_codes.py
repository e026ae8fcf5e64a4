"""Scalar codes of a vector with one scale: any levels, and any way to choose the scale."""

from collections.abc import Sequence
from typing import Literal

import torch

UNIFORM_LEVELS = (-1.5, -0.5, 0.5, 1.5)
"""Levels of the served value codes, in units of their scale."""

BF16_SIGNIFICAND_BITS = 8
"""Significant bits of a bf16 number, the leading one included."""


Refit = Literal["none", "least-squares", "norm", "unbiased"]
"""How a scale follows from the levels that were chosen: not at all, or see `refit_scale`."""


def quantize_levels(
    x: torch.Tensor,
    levels: Sequence[float] = UNIFORM_LEVELS,
    steps: Sequence[float] = (1.0,),
    refit: Refit = "none",
    significand_bits: int = BF16_SIGNIFICAND_BITS,
) -> torch.Tensor:
    """x̂ = s · c with s = step · RMS(x) and every c the level nearest to x/s; of several steps the one of least error.

    Example: (4, 0.5) with step 1/RMS (s = 1) is (1.5, 0.5); with least squares s = (6 + 0.25)/2.5 and x̂ = (3.75, 1.25).

    Args:
        x: float [..., d], the elements that share one scale.
        levels: c, ascending.
        steps: candidates for s/RMS(x).
        refit: rule for s once the levels are chosen.
        significand_bits: significant bits to which s is rounded.

    Returns:
        The shape and type of x.

    Source: Max (1960) for the step; search and refit are engineering choices.
    """
    table = torch.tensor(levels, dtype=x.dtype, device=x.device)
    boundaries = (table[1:] + table[:-1]) / 2
    rms = x.square().mean(dim=-1, keepdim=True).sqrt()
    best, least = torch.zeros_like(x), torch.full_like(rms, torch.inf)
    for step in steps:
        scale = round_significand(rms * step, significand_bits)
        ratio = (x / torch.where(scale == 0, 1.0, scale)).contiguous()
        chosen = table[torch.bucketize(ratio, boundaries, right=True)]
        if refit != "none":
            scale = round_significand(refit_scale(x, chosen, refit), significand_bits)
        candidate = chosen * scale
        error = (x - candidate).square().sum(dim=-1, keepdim=True)
        best, least = torch.where(error < least, candidate, best), torch.minimum(error, least)
    return best


def refit_scale(x: torch.Tensor, chosen: torch.Tensor, refit: Refit) -> torch.Tensor:
    """The scale s of x̂ = s c.

    "least-squares" s = ⟨x, c⟩/⟨c, c⟩ has the smallest error, and its x̂ is shorter than x: ⟨x, x̂⟩ = ‖x̂‖² < ‖x‖².
    "unbiased"      s = ⟨x, x⟩/⟨x, c⟩ has ⟨x, x̂⟩ = ‖x‖²: the error is orthogonal to x, so that a mean of many x̂ does
                    not shrink.
    "norm"          s = ‖x‖/‖c‖ has ‖x̂‖ = ‖x‖, the geometric mean of the two.

    Example: x = (4, 0.5), c = (1.5, 0.5): 6.25/2.5 = 2.5, 16.25/6.25 = 2.6, and √(2.5 · 2.6).

    Args:
        x: float [..., d].
        chosen: c, the same shape.
        refit: a rule; "none" is refused.

    Returns:
        [..., 1]; 0 where ⟨x, c⟩ or ‖c‖ is 0.

    Raises:
        ValueError: there is no such rule.

    Source: least squares: equation 5 of arXiv 2608.04074 for fixed codes; unbiased: as in arXiv 2405.12497 (RaBitQ).
    """
    length, product, energy = ((a * b).sum(dim=-1, keepdim=True) for a, b in ((x, x), (x, chosen), (chosen, chosen)))
    if refit == "least-squares":
        above, below = product, energy
    elif refit == "unbiased":
        above, below = length, product
    elif refit == "norm":
        above, below = length.sqrt(), energy.sqrt()
    else:
        raise ValueError(f"refit={refit!r} is no rule; choose least-squares, norm or unbiased")
    return torch.where(below == 0, 0.0, above / torch.where(below == 0, 1.0, below))


def round_significand(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest number with that many significant bits; 8 is bf16's, without its limits of range.

    Example: 1.3 with 4 bits is 1.25, and 0.65 is 0.625.

    Args:
        x: float, any shape.
        bits: significant bits, the leading one included.

    Returns:
        The shape and type of x.
    """
    significand, exponent = torch.frexp(x)
    return torch.ldexp((significand * 2**bits).round(), exponent - bits)
