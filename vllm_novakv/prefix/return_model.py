"""Learns from past requests how likely a prompt's blocks are to be used again, and how soon.

1. a logistic regression on features and their products gives each sample (the blocks that one request left behind) the
   odds of ever being used again;
2. samples are split into classes of equal size by these odds;
3. per class, the hazard of a return at each age is counted: returns / time spent at that age, unreturned samples too,
   and smoothed over neighbouring ages;
4. an age's value is the best rate of returns per second that keeping from that age on can have (`gittins_index`).
"""

import math

import numpy as np
from numpy.typing import NDArray

AGE_EDGES_S = np.concatenate([[0.0], 0.5 * 2.0 ** (np.arange(35) / 2.0)])
"""Ages that bound the buckets: 0, then half octaves from 0.5 s to 18 hours."""

AGE_WIDTHS_S = np.diff(AGE_EDGES_S)

RIDGE = 10.0
"""Weight of the penalty on standardized coefficients, in samples."""

PRIOR_RETURNS = 1.0
"""Weight of the hazard over all classes in that of one class, in returns per bucket."""

SMOOTHING = (0.1, 0.2, 0.4, 0.2, 0.1)
NEWTON_STEPS = 6
MIN_SAMPLES = 64


def gittins_index(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """Best attainable returns per second of keeping: G(a) = max_b (S(a) − S(b)) / ∫_a^b S(u) du over bucket ends b > a.

    S is the probability of no return up to an age: S' = −hazard · S. If room in a cache is rented by the second, it
    pays to keep what has an index above the rent, and nothing else.

    Example: a hazard that is constant has that constant as its index at every age.

    Args:
        hazard: float64 [num_classes, num_buckets], returns per second at an age (`AGE_EDGES_S`), at least 0.

    Returns:
        float64 [num_classes, num_buckets], per second, for an age at the beginning of each bucket.

    Source: J. C. Gittins (1979), Bandit processes and dynamic allocation indices, Journal of the Royal Statistical
        Society B 41(2), for a single stopping decision; as hits per space and time: LHD, Beckmann et al., NSDI 2018.
    """
    survival = np.exp(-hazard * AGE_WIDTHS_S)
    # expected time spent in a bucket by a sample that enters it
    time_s = np.where(hazard > 1e-12, (1.0 - survival) / np.maximum(hazard, 1e-12), AGE_WIDTHS_S)
    index = np.empty_like(hazard)
    for age in range(hazard.shape[1]):
        # [num_classes, num_buckets - age]
        reached = np.cumprod(np.concatenate([np.ones((len(hazard), 1)), survival[:, age:-1]], axis=1), axis=1)
        returns = np.cumsum(reached * (1.0 - survival[:, age:]), axis=1)
        index[:, age] = (returns / np.cumsum(reached * time_s[:, age:], axis=1)).max(axis=1)
    return index


def smooth(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over neighbouring ages with the weights 0.1, 0.2, 0.4, 0.2, 0.1; the ends repeat themselves.

    The Gittins index takes a maximum over ages, so it would take every accidental peak for a promise.

    Args:
        hazard: float64 [num_classes, num_buckets].

    Returns:
        float64 [num_classes, num_buckets].

    Source: engineering choice.
    """
    reach = len(SMOOTHING) // 2
    padded = np.pad(hazard, ((0, 0), (reach, reach)), mode="edge")
    parts = [weight * padded[:, i : i + hazard.shape[1]] for i, weight in enumerate(SMOOTHING)]
    return np.asarray(np.sum(parts, axis=0), dtype=np.float64)


def fit_logistic(features: NDArray[np.float64], labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ridge logistic regression by Newton's method.

    Args:
        features: float64 [num_samples, num_features], the first column 1.
        labels: float64 [num_samples], 0 or 1.

    Returns:
        float64 [num_features] coefficients of the log-odds.
    """
    penalty = RIDGE * np.eye(features.shape[1])
    penalty[0, 0] = 1e-3
    coefficients: NDArray[np.float64] = np.zeros(features.shape[1])
    for _ in range(NEWTON_STEPS):
        probability = 1.0 / (1.0 + np.exp(-np.clip(features @ coefficients, -20.0, 20.0)))
        gradient = features.T @ (labels - probability) - penalty @ coefficients
        curvature = (features.T * (probability * (1.0 - probability))) @ features + penalty
        coefficients = coefficients + np.linalg.solve(curvature, gradient)
    return coefficients


def class_bounds(scores: NDArray[np.float64], num_classes: int) -> NDArray[np.float64]:
    """Bounds that split scores into classes of about equal size, none of them at a score: equal scores stay together.

    Example: for the scores 0, 0, 0, 1 and two classes the bound is 0.5.

    Args:
        scores: float64 [num_samples].
        num_classes: at least 1.

    Returns:
        float64 [num_bounds], ascending, at most num_classes − 1 of them.
    """
    ordered = np.sort(scores)
    steps = np.flatnonzero(ordered[1:] > ordered[:-1]) + 1
    if not len(steps):
        return np.zeros(0)
    wanted = np.arange(1, num_classes) * len(ordered) / num_classes
    # the step nearest to each wanted rank
    after = np.minimum(np.searchsorted(steps, wanted), len(steps) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.unique(np.where(wanted - steps[before] < steps[after] - wanted, steps[before], steps[after]))
    bounds: NDArray[np.float64] = (ordered[nearest - 1] + ordered[nearest]) / 2
    return bounds


class ReturnModel:
    """The value of keeping blocks, as a function of how they were used and how long ago.

    Before the first fit every age is worth less than the one before, which is the order of LRU.

    Args:
        num_features: length of the vectors that describe a sample.
        num_classes: classes by odds of return.
        history: samples to learn from, the latest ones.
        refit_every: samples between two fits.

    Raises:
        ValueError: a number is not positive.

    Source: engineering choice; hazards by age and class as in EVA, Beckmann and Sanchez, HPCA 2017.
    """

    def __init__(self, num_features: int, num_classes: int = 8, history: int = 2048, refit_every: int = 128) -> None:
        if min(num_features, num_classes, history, refit_every) < 1:
            raise ValueError(f"{num_features=}, {num_classes=}, {history=} and {refit_every=} must be positive")
        self._num_classes = num_classes
        self._history = history
        self._refit_every = refit_every
        self._features = np.zeros((history, num_features))
        self._start_s = np.zeros(history)
        self._return_s = np.full(history, np.nan)
        self._left, self._right = np.triu_indices(num_features)
        self._num_samples = 0
        self._mean: NDArray[np.float64] = np.zeros(num_features)
        self._scale: NDArray[np.float64] = np.ones(num_features)
        self._coefficients: NDArray[np.float64] | None = None
        self._bounds: NDArray[np.float64] = np.zeros(0)
        self._values = np.tile(2.0 ** -np.arange(len(AGE_WIDTHS_S), dtype=np.float64), (num_classes, 1))

    def add(self, features: NDArray[np.float64], now_s: float) -> int:
        """Begin a sample.

        Args:
            features: float64 [num_features].
            now_s: seconds; its age is counted from here.

        Returns:
            Its number.
        """
        number = self._num_samples
        slot = number % self._history
        self._features[slot] = features
        self._start_s[slot] = now_s
        self._return_s[slot] = np.nan
        self._num_samples += 1
        if self._num_samples % self._refit_every == 0:
            self._fit(now_s)
        return number

    def returned(self, number: int, now_s: float) -> None:
        """The blocks of a sample are used again; only the first time counts."""
        slot = number % self._history
        if self._num_samples - number <= self._history and math.isnan(self._return_s[slot]):
            self._return_s[slot] = now_s

    def classify(self, features: NDArray[np.float64]) -> NDArray[np.int64]:
        """Class of samples by their odds of return, 0 the lowest.

        Args:
            features: float64 [num_samples, num_features].

        Returns:
            int64 [num_samples].
        """
        if self._coefficients is None:
            return np.zeros(len(features), dtype=np.int64)
        return np.searchsorted(self._bounds, self._design(features) @ self._coefficients, side="right")

    def value(self, classes: NDArray[np.int64], ages_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns per second that keeping can have: the Gittins index.

        Args:
            classes: int64 [n], from `classify`.
            ages_s: float64 [n], seconds since the last use, at least 0.

        Returns:
            float64 [n], per second.
        """
        bucket = np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1
        values: NDArray[np.float64] = self._values[classes, np.minimum(bucket, len(AGE_WIDTHS_S) - 1)]
        return values

    def _design(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = (features - self._mean) / self._scale
        return np.concatenate(
            [np.ones((len(scaled), 1)), scaled, scaled[:, self._left] * scaled[:, self._right]], axis=1
        )

    def _fit(self, now_s: float) -> None:
        count = min(self._num_samples, self._history)
        features, start, end = self._features[:count], self._start_s[:count], self._return_s[:count]
        has_returned = ~np.isnan(end)
        duration = np.maximum(np.where(has_returned, end, now_s) - start, 0.0)
        if not has_returned.any():
            return
        # what has not returned yet counts as lost only once most returns would have happened
        patience = np.quantile(duration[has_returned], 0.8)
        is_settled = has_returned | (duration > patience)
        if is_settled.sum() < MIN_SAMPLES or has_returned[is_settled].all():
            return
        self._mean = np.asarray(features.mean(axis=0), dtype=np.float64)
        self._scale = np.asarray(features.std(axis=0), dtype=np.float64) + 1e-3
        design = self._design(features)
        self._coefficients = fit_logistic(design[is_settled], has_returned[is_settled].astype(np.float64))
        score = design @ self._coefficients
        self._bounds = class_bounds(score, self._num_classes)
        classes = np.searchsorted(self._bounds, score, side="right")
        self._values = gittins_index(self._hazard(classes, duration, has_returned))

    def _hazard(
        self, classes: NDArray[np.int64], duration: NDArray[np.float64], has_returned: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Returns per second by class and age, smoothed: (returns + prior) / (time at that age + prior time)."""
        num_buckets = len(AGE_WIDTHS_S)
        bucket = np.minimum(np.searchsorted(AGE_EDGES_S, duration, side="right") - 1, num_buckets - 1)
        # [num_samples, num_buckets] seconds that each sample spent at each age
        time_s = np.clip(duration[:, None] - AGE_EDGES_S[None, :-1], 0.0, AGE_WIDTHS_S[None, :])
        returns = np.zeros((self._num_classes, num_buckets))
        np.add.at(returns, (classes[has_returned], bucket[has_returned]), 1.0)
        exposure = np.zeros((self._num_classes, num_buckets))
        np.add.at(exposure, classes, time_s)
        overall = (returns.sum(axis=0) + 1e-2) / (exposure.sum(axis=0) + AGE_WIDTHS_S)
        return smooth((returns + PRIOR_RETURNS) / (exposure + PRIOR_RETURNS / overall))
