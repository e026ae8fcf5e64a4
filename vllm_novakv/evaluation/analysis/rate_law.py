"""The high-resolution law D_l(b) = C_g 2^{−2b} v_l^{1/g}, tested on k-means codebooks at several rates.

D_l is the squared error per coordinate. The paper writes the error of the whole group (equation 46), but its constants
of about 1.5 for g = 4 are on the scale used here: summed over a group, no quantizer gets below g (equation 44).

Source: arXiv 2608.04074, section 14.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_novakv.evaluation.analysis.codebooks import fit_codebooks, gather_groups, nearest, num_centroids
from vllm_novakv.evaluation.analysis.partitions import log2_volumes

RATES = (1.0, 1.5, 2.0, 2.5)
"""Bits per element."""


@dataclass(frozen=True)
class GroupDistortion:
    """Distortions of one partition of one KV head at one rate.

    Attributes:
        bits: rate b per element.
        train: mean squared error of a coordinate of each group on the fitted coefficients, D̂_l.
        test: the same on held-out coefficients.
        volume_roots: v_l^{1/g} of the fitted coefficients.
    """

    bits: float
    train: tuple[float, ...]
    test: tuple[float, ...]
    volume_roots: tuple[float, ...]

    @property
    def normalized_train(self) -> tuple[float, ...]:
        """D̂_l / v_l^{1/g} on the fitted coefficients."""
        return tuple(d / v for d, v in zip(self.train, self.volume_roots, strict=True))

    @property
    def normalized_test(self) -> tuple[float, ...]:
        """D̂_l / v_l^{1/g} on held-out coefficients."""
        return tuple(d / v for d, v in zip(self.test, self.volume_roots, strict=True))


@dataclass(frozen=True)
class RateLaw:
    """Fitted constants.

    Attributes:
        constant: Ĉ_g = 2^{2b} median_l(D̂_l,train(b) / v_l^{1/g}) at the highest rate b.
        exponent: α of the least-squares line log₂(D̂_l / v_l^{1/g}) = a − α b through the held-out distortions.
        local_exponents: the same between neighbouring rates, from the means of the logarithms.
    """

    constant: float
    exponent: float
    local_exponents: tuple[float, ...]

    def predict(self, bits: float, volume_root: float) -> float:
        """D_l(b) = Ĉ_g 2^{−2b} v_l^{1/g}."""
        return float(self.constant * 2.0 ** (-2 * bits) * volume_root)


def measure_groups(
    train: torch.Tensor, test: torch.Tensor, groups: torch.Tensor, bits: float, seed: int = 0
) -> GroupDistortion:
    """Fit a codebook of 2^{g·b} centroids per group and measure E‖r_l − Q(r_l)‖²/g, without token scales.

    Args:
        train: f64 [num_tokens, d], coefficients of zero mean to fit.
        test: f64 [num_test_tokens, d], held out.
        groups: int64 [L, g], see `partitions.partition`.
        bits: rate b per element; g·b is a whole number.
        seed: of the k-means.

    Returns:
        The distortions of the groups.

    Raises:
        ValueError: see `codebooks.num_centroids` and `codebooks.fit_codebooks`.
    """
    group_size = groups.shape[1]
    points = gather_groups(train, groups)
    codebooks = fit_codebooks(points, num_centroids(bits, group_size), seed)
    held_out = gather_groups(test, groups)
    errors = [(x - nearest(x, codebooks)).square().mean(dim=(1, 2)).tolist() for x in (points, held_out)]
    roots = (log2_volumes(train.var(dim=0, correction=0), groups) / group_size).exp2()
    return GroupDistortion(bits, tuple(errors[0]), tuple(errors[1]), tuple(roots.tolist()))


def fit_rate_law(measurements: Sequence[GroupDistortion]) -> RateLaw:
    """Ĉ_g from the highest rate and α from all of them.

    Example: distortions 2^{−1.8 b} · 1.2 of groups with unit volume give α = 1.8 and, from b = 2.5,
    Ĉ = 2^5 · 1.2 · 2^{−4.5} = 1.697.

    Args:
        measurements: of the equalizing partition, of any number of heads, at two rates or more.

    Returns:
        The constants.

    Raises:
        ValueError: fewer than two rates.
    """
    rates = sorted({measurement.bits for measurement in measurements})
    if len(rates) < 2:
        raise ValueError(f"rates {rates}: an exponent needs at least two")
    by_rate = {rate: [m for m in measurements if m.bits == rate] for rate in rates}
    logs = {rate: np.log2([d for m in by_rate[rate] for d in m.normalized_test]) for rate in rates}
    bits = np.concatenate([np.full(len(values), rate) for rate, values in logs.items()])
    slope = float(np.polyfit(bits, np.concatenate(list(logs.values())), 1)[0])
    means = [float(logs[rate].mean()) for rate in rates]
    local = [(means[i] - means[i + 1]) / (rates[i + 1] - rates[i]) for i in range(len(rates) - 1)]
    anchor = statistics.median(d for m in by_rate[rates[-1]] for d in m.normalized_train)
    return RateLaw(constant=2.0 ** (2 * rates[-1]) * anchor, exponent=-slope, local_exponents=tuple(local))
