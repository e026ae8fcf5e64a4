"""Every basis with every quantizer on the tensors of one KV head, fitted on one part and measured on another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_novakv.evaluation.analysis.bases import BASES, Basis, KeyStatistics, key_statistics
from vllm_novakv.evaluation.analysis.codebooks import gather_groups
from vllm_novakv.evaluation.analysis.dependence import total_correlation
from vllm_novakv.evaluation.analysis.metrics import mean_squared_error, query_weighted_distortion, top1_agreement
from vllm_novakv.evaluation.analysis.partitions import PARTITIONS, log2_volumes, normalized_log10_volumes, partition
from vllm_novakv.evaluation.analysis.quantizers import QUANTIZERS
from vllm_novakv.evaluation.analysis.rate_law import RATES, GroupDistortion, measure_groups

_MAX_DEPENDENCE_POINTS = 2048


@dataclass(frozen=True)
class HeadTensors:
    """Captured vectors of one layer and KV head, after RoPE.

    Attributes:
        keys: float [num_tokens, head_size].
        queries: float [num_queries, head_size], of all query heads that share the KV head.
        positions: int64 [num_queries], the last key that each query sees; None lets all see all.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """One basis with one quantizer on held-out tensors.

    Attributes:
        basis: name in `bases.BASES`.
        quantizer: name in `quantizers.QUANTIZERS`.
        bits_per_element: rate of the codes, without scales.
        mse: see `metrics.mean_squared_error`.
        query_weighted: see `metrics.query_weighted_distortion`, with the held-out queries' moment.
        top1_agreement: see `metrics.top1_agreement`.
    """

    basis: str
    quantizer: str
    bits_per_element: float
    mse: float
    query_weighted: float
    top1_agreement: float


@dataclass(frozen=True)
class FittedHead:
    """What everything is fitted from: the training keys of one KV head, and moments of the training text.

    Attributes:
        keys: float [num_tokens, head_size], after RoPE.
        statistics: of the whole training text, of which the keys may be a sample.
    """

    keys: torch.Tensor
    statistics: KeyStatistics

    def coefficients(self, keys: torch.Tensor, basis: Basis) -> torch.Tensor:
        """(k − k̄) R, f64 [num_tokens, head_size]."""
        return (keys.double() - self.statistics.key_mean) @ basis.forward


def compare_bases(
    train: FittedHead,
    test: HeadTensors,
    bits: float = 2.0,
    group_size: int = 4,
    seed: int = 0,
    bases: Sequence[str] = tuple(BASES),
    quantizers: Sequence[str] = tuple(QUANTIZERS),
) -> list[Comparison]:
    """All pairs of bases and quantizers: k̂ = Q((k − k̄) R) R^{-1} + k̄, everything but k fitted on `train`.

    Args:
        train: for bases, steps and codebooks.
        test: held-out tensors of the same head.
        bits: rate per element.
        group_size: elements per vector of the vector quantizer.
        seed: of its k-means.
        bases: names in `bases.BASES`.
        quantizers: names in `quantizers.QUANTIZERS`.

    Returns:
        One entry per pair, bases first.

    Raises:
        ValueError: see the quantizers.

    Source: arXiv 2608.04074, section 5 (figure 3 and table 4).
    """
    test_moment = key_statistics(test.keys, test.queries).query_moment
    results = []
    for basis_name in bases:
        basis = BASES[basis_name](train.statistics)
        coefficients, held_out = train.coefficients(train.keys, basis), train.coefficients(test.keys, basis)
        for quantizer_name in quantizers:
            quantized = QUANTIZERS[quantizer_name](coefficients, bits, group_size, seed)(held_out)
            keys = quantized.coefficients @ basis.inverse + train.statistics.key_mean
            results.append(
                Comparison(
                    basis=basis_name,
                    quantizer=quantizer_name,
                    bits_per_element=quantized.bits_per_element,
                    mse=mean_squared_error(test.keys, keys),
                    query_weighted=query_weighted_distortion(test.keys, keys, test_moment),
                    top1_agreement=top1_agreement(test.queries, test.keys, keys, test.positions),
                )
            )
    return results


@dataclass(frozen=True)
class PartitionComparison:
    """One partition of the coefficients in our basis.

    Attributes:
        name: one of `partitions.PARTITIONS`.
        groups: int64 [L, g], coordinates of each group.
        log2_volumes: f64 [L], in bits.
        log10_volumes: f64 [L], in decades from an exactly equal partition; see `partitions.normalized_log10_volumes`.
        distortion: per group, on fitted and held-out coefficients.
        total_correlation: per group, in bits, on fitted coefficients.
    """

    name: str
    groups: torch.Tensor
    log2_volumes: torch.Tensor
    log10_volumes: torch.Tensor
    distortion: GroupDistortion
    total_correlation: tuple[float, ...]


def compare_partitions(
    train: FittedHead, test: HeadTensors, bits: float = 2.0, group_size: int = 4, seed: int = 0
) -> list[PartitionComparison]:
    """The three partitions of the coefficients in our basis, without token scales.

    Args:
        train: for basis, variances and codebooks.
        test: held-out tensors of the same head.
        bits: rate per element; group_size · bits is a whole number.
        group_size: coordinates per group.
        seed: of the random partition and the k-means.

    Returns:
        One entry per partition, in the order of `PARTITIONS`.

    Raises:
        ValueError: see `rate_law.measure_groups`.

    Source: arXiv 2608.04074, sections 10 and 14.4.
    """
    basis = BASES["ours"](train.statistics)
    coefficients, held_out = train.coefficients(train.keys, basis), train.coefficients(test.keys, basis)
    variances = coefficients.var(dim=0, correction=0)
    results = []
    for name in PARTITIONS:
        groups = partition(name, variances, group_size, seed)
        distortion = measure_groups(coefficients, held_out, groups, bits, seed)
        dependence = [_dependence(points) for points in gather_groups(coefficients, groups)]
        volumes = log2_volumes(variances, groups), normalized_log10_volumes(variances, groups)
        results.append(PartitionComparison(name, groups, *volumes, distortion, tuple(dependence)))
    return results


def measure_rates(
    train: FittedHead, test: HeadTensors, rates: Sequence[float] = RATES, group_size: int = 4, seed: int = 0
) -> list[GroupDistortion]:
    """Distortions of the equalizing partition in our basis at several rates: what `rate_law.fit_rate_law` takes.

    Args:
        train, test, group_size, seed: as in `compare_partitions`.
        rates: bits per element.

    Returns:
        One entry per rate.

    Source: arXiv 2608.04074, section 14.
    """
    basis = BASES["ours"](train.statistics)
    coefficients, held_out = train.coefficients(train.keys, basis), train.coefficients(test.keys, basis)
    groups = partition("equalizing", coefficients.var(dim=0, correction=0), group_size, seed)
    return [measure_groups(coefficients, held_out, groups, rate, seed) for rate in rates]


def _dependence(points: torch.Tensor) -> float:
    """Total correlation of a group; keys that occur twice, as at the start of each sequence, count once."""
    return total_correlation(points.unique(dim=0)[:: max(1, len(points) // _MAX_DEPENDENCE_POINTS)])
