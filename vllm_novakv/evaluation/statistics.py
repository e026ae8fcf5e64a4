"""Intervals and tests for the figures that the benchmarks report: plain functions over numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
"""Bootstrap resamples."""

# resamples are drawn in blocks of at most so many picks
_BLOCK_PICKS = 1 << 22


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements with their extremes."""

    median: float
    minimum: float
    maximum: float


def summarize(values: Sequence[float]) -> Spread:
    """Median, minimum and maximum of repeated measurements.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to summarize; measure at least once")
    return Spread(median=float(np.median(values)), minimum=float(min(values)), maximum=float(max(values)))


def wilson_interval(num_successes: int, num_trials: int, z: float = 1.959964) -> Interval:
    """Success rate p = s/n with its Wilson score interval.

    The ends are (p + z²/2n ± z·sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n), which stay inside [0, 1] also for s = 0 or s = n.

    Args:
        num_successes: 0..num_trials.
        num_trials: at least 1.
        z: normal quantile; the default gives 95 %.

    Returns:
        Estimate s/n and the interval.

    Raises:
        ValueError: the counts are impossible.

    Source: Wilson (1927), score interval for a binomial proportion.
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} successes in {num_trials} trials is impossible; need 0 <= s <= n, n >= 1")
    rate = num_successes / num_trials
    scale = 1 + z * z / num_trials
    center = (rate + z * z / (2 * num_trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / num_trials + z * z / (4 * num_trials * num_trials))
    return Interval(estimate=rate, low=max(0.0, center - half), high=min(1.0, center + half))


def paired_perplexity_ratio(
    baseline_nll: Sequence[float],
    candidate_nll: Sequence[float],
    tokens_per_window: Sequence[int],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Perplexity ratio exp(Σ(c_w − b_w) / Σ n_w) over the same windows, with a bootstrap interval over windows.

    Windows differ far more from each other than two caches do on one window, so the difference is taken per window.

    Args:
        baseline_nll: summed negative log-likelihood of each window (nats) with the baseline cache.
        candidate_nll: the same windows with the cache under test.
        tokens_per_window: predicted tokens of each window.
        num_resamples: bootstrap resamples of the windows.
        seed: of the resampling.

    Returns:
        Ratio candidate / baseline and its 95 % interval (percentile bootstrap).

    Raises:
        ValueError: the three lists differ in length or are empty.
    """
    if not baseline_nll or not len(baseline_nll) == len(candidate_nll) == len(tokens_per_window):
        raise ValueError(
            f"got {len(baseline_nll)} baseline, {len(candidate_nll)} candidate and {len(tokens_per_window)} token "
            "counts; the comparison is paired, so measure both caches on the same windows"
        )
    # [num_windows] nats and tokens
    difference = np.asarray(candidate_nll, dtype=np.float64) - np.asarray(baseline_nll, dtype=np.float64)
    tokens = np.asarray(tokens_per_window, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(tokens), size=(num_resamples, len(tokens)))
    ratios = np.exp(difference[picks].sum(axis=1) / tokens[picks].sum(axis=1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(estimate=float(np.exp(difference.sum() / tokens.sum())), low=float(low), high=float(high))


@dataclass(frozen=True)
class McNemarResult:
    """Two methods on the same items.

    Attributes:
        only_first: items that only the first method solves.
        only_second: items that only the second method solves.
        p_value: two-sided, of the hypothesis that both have the same error rate.
    """

    only_first: int
    only_second: int
    p_value: float


def bootstrap_mean(values: Sequence[float], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
    """Mean of values with its 95 % percentile-bootstrap interval.

    Args:
        values: one number per independent unit (an item, a window).
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Returns:
        The mean and its interval.

    Raises:
        ValueError: there are no values.

    Source: arXiv 2608.04074, section 8.6.
    """
    return bootstrap_task_mean([values], num_resamples, seed)


def bootstrap_task_mean(
    scores_by_task: Sequence[Sequence[float]], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Mean over tasks of the mean over items, (1/T) Σ_t (1/n_t) Σ_i s_ti, resampling items within each task.

    Every task has the same weight, whatever its number of items.

    Args:
        scores_by_task: for each task the scores of its items.
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Returns:
        The mean and its 95 % interval (percentile bootstrap).

    Raises:
        ValueError: there are no tasks, or one has no items.

    Source: arXiv 2608.04074, section 15.1.
    """
    if not scores_by_task or not all(len(scores) for scores in scores_by_task):
        raise ValueError("no values to resample; every task needs at least one")
    generator = np.random.default_rng(seed)
    resampled = np.zeros(num_resamples)
    for scores in scores_by_task:
        resampled += _resampled_means(np.asarray(scores, dtype=np.float64), num_resamples, generator)
    low, high = np.quantile(resampled / len(scores_by_task), [0.025, 0.975])
    means = [math.fsum(scores) / len(scores) for scores in scores_by_task]
    return Interval(estimate=math.fsum(means) / len(means), low=float(low), high=float(high))


def paired_bootstrap(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Difference first − second of two task means over the same items, with its interval over items.

    Args:
        first: for each task the scores of its items.
        second: the same tasks and items with the other method.
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Returns:
        The difference and its 95 % interval; it separates the methods if it excludes 0.

    Raises:
        ValueError: the two do not have the same tasks and items.

    Source: arXiv 2608.04074, section 15.1.
    """
    if [len(scores) for scores in first] != [len(scores) for scores in second]:
        raise ValueError("the two methods were not measured on the same items; the comparison is paired")
    differences = [[a - b for a, b in zip(left, right, strict=True)] for left, right in zip(first, second, strict=True)]
    return bootstrap_task_mean(differences, num_resamples, seed)


def majority_vote(outcomes: Sequence[bool]) -> bool:
    """Whether more than half of the samples of one item are correct; a tie is not.

    Raises:
        ValueError: there are no samples.

    Source: arXiv 2608.04074, section 8.6.
    """
    if not outcomes:
        raise ValueError("no samples to vote; draw at least one per item")
    return 2 * sum(outcomes) > len(outcomes)


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> McNemarResult:
    """Exact McNemar test: p = min(1, 2 P(X ≤ min(n01, n10))) with X ~ Binomial(n01 + n10, 1/2).

    Example: 5 items that only the first solves and 1 that only the second does give p = 2 · 7/64 = 0.21875.

    Args:
        first: whether the first method solves each item, e.g. by `majority_vote`.
        second: the second method on the same items.

    Returns:
        Discordant counts and the two-sided p value, 1 if there is no discordant item.

    Raises:
        ValueError: the methods were not measured on the same number of items.

    Source: arXiv 2608.04074, section 8.6; McNemar (1947).
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} outcomes; the test is paired, so use the same items")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    num_discordant = only_first + only_second
    # integers until the last division: exact for any count
    tail = sum(math.comb(num_discordant, k) for k in range(min(only_first, only_second) + 1))
    return McNemarResult(only_first, only_second, min(1.0, 2 * tail / 2**num_discordant))


def _resampled_means(
    values: NDArray[np.float64], num_resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    rows = max(1, _BLOCK_PICKS // len(values))
    blocks = [min(rows, num_resamples - start) for start in range(0, num_resamples, rows)]
    means = [values[generator.integers(len(values), size=(block, len(values)))].mean(axis=1) for block in blocks]
    return np.concatenate(means)
