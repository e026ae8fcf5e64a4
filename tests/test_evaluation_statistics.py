"""Intervals and tests against values computed by hand; perplexity by position."""

import math

import numpy as np
import pytest

from vllm_novakv.evaluation.perplexity import measure_perplexity, measure_perplexity_by_position
from vllm_novakv.evaluation.statistics import (
    bootstrap_mean,
    bootstrap_task_mean,
    majority_vote,
    mcnemar_exact,
    paired_bootstrap,
)


def test_bootstrap_of_a_constant_has_no_width():
    interval = bootstrap_mean([0.25] * 7)
    assert (interval.estimate, interval.low, interval.high) == (0.25, 0.25, 0.25)


def test_bootstrap_of_many_values_agrees_with_the_normal_interval():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    half = 1.96 * values.std() / math.sqrt(400)
    interval = bootstrap_mean(values.tolist())
    assert interval.estimate == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_bootstrap_of_two_values_is_their_exact_distribution():
    # resampled means are 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4: the quantiles are the ends
    interval = bootstrap_mean([0.0, 1.0])
    assert (interval.estimate, interval.low, interval.high) == (0.5, 0.0, 1.0)


def test_bootstrap_repeats_with_its_seed_and_in_blocks(monkeypatch):
    values = np.random.default_rng(1).normal(size=50).tolist()
    whole = bootstrap_mean(values, seed=4)
    assert whole == bootstrap_mean(values, seed=4)
    assert whole != bootstrap_mean(values, seed=5)
    monkeypatch.setattr("vllm_novakv.evaluation.statistics._BLOCK_PICKS", 700)
    assert bootstrap_mean(values, seed=4) == whole


def test_tasks_weigh_the_same_whatever_their_size():
    interval = bootstrap_task_mean([[1.0] * 100, [0.0] * 2])
    assert (interval.estimate, interval.low, interval.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("scores", [[], [[]], [[1.0], []]], ids=["no-tasks", "no-items", "one-empty"])
def test_bootstrap_without_values_is_refused(scores):
    with pytest.raises(ValueError, match="no values"):
        bootstrap_task_mean(scores)


def test_paired_bootstrap_sees_a_small_constant_gain_among_large_differences():
    scores = np.random.default_rng(2).uniform(0, 1, 30)
    gain = paired_bootstrap([(scores + 0.01).tolist()], [scores.tolist()])
    assert (gain.estimate, gain.low, gain.high) == pytest.approx((0.01, 0.01, 0.01))
    with pytest.raises(ValueError, match="paired"):
        paired_bootstrap([[1.0]], [[1.0, 2.0]])


@pytest.mark.parametrize(
    ("outcomes", "vote"), [([True], True), ([True, False], False), ([True, True, False], True), ([False], False)]
)
def test_majority_vote(outcomes, vote):
    assert majority_vote(outcomes) is vote


def test_vote_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        majority_vote([])


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [
        pytest.param(5, 1, 2 * 7 / 64, id="5-1"),
        pytest.param(1, 5, 2 * 7 / 64, id="1-5"),
        pytest.param(0, 10, 2 / 1024, id="0-10"),
        pytest.param(3, 3, 1.0, id="3-3"),
        pytest.param(0, 0, 1.0, id="0-0"),
        pytest.param(0, 2_000, 0.0, id="underflow"),
    ],
)
def test_mcnemar_of_counts(only_first, only_second, p_value):
    both = [True, False]
    first = [*both, *[True] * only_first, *[False] * only_second]
    second = [*both, *[False] * only_first, *[True] * only_second]
    result = mcnemar_exact(first, second)
    assert (result.only_first, result.only_second) == (only_first, only_second)
    assert result.p_value == pytest.approx(p_value)


def test_mcnemar_is_paired():
    with pytest.raises(ValueError, match="paired"):
        mcnemar_exact([True], [True, False])


def test_perplexity_by_position_of_known_probabilities():
    # positions 1, 2, 3 with probabilities 1/2, 1/8, 1/8 and 1/2, 1/32: buckets {1} and {2, 3}
    answers = [[math.log(1 / 2), math.log(1 / 8), math.log(1 / 8)], [math.log(1 / 2), math.log(1 / 32)]]
    buckets = measure_perplexity_by_position(lambda _: answers, [[1, 2, 3, 4], [5, 6, 7]], bucket_tokens=2)
    assert [(b.first, b.last, b.num_tokens) for b in buckets] == [(1, 1, 2), (2, 3, 3)]
    assert [b.perplexity for b in buckets] == pytest.approx([2.0, 2.0 ** (11 / 3)])


def test_uniform_model_has_the_same_perplexity_everywhere():
    def uniform(windows):
        return [[-math.log(49_152)] * (len(window) - 1) for window in windows]

    windows = [list(range(1_000))] * 3
    buckets = measure_perplexity_by_position(uniform, windows, 128)
    assert [b.perplexity for b in buckets] == pytest.approx([49_152] * 8)
    assert sum(b.num_tokens for b in buckets) == measure_perplexity(uniform, windows).num_tokens
    with pytest.raises(ValueError, match="bucket_tokens=0"):
        measure_perplexity_by_position(uniform, windows, 0)
