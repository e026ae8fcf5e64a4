"""Intervals for the figures that the benchmarks report: plain functions over numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    num_resamples: int = 10_000,
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
