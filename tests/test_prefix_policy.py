"""Retention policies: against naive simulations, against the exhaustive optimum, and for what they must never do."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from vllm_novakv.prefix.classic_policies import BeladyPolicy, DecayedLFUPolicy, GDSFPolicy, LRUPolicy
from vllm_novakv.prefix.policy import PrefillCost, make_policy, policy_names
from vllm_novakv.prefix.replay import replay
from vllm_novakv.prefix.retention import NUM_FEATURES, ExpectedReusePolicy
from vllm_novakv.prefix.return_model import (
    AGE_EDGES_S,
    AGE_WIDTHS_S,
    ReturnModel,
    class_bounds,
    fit_logistic,
    gittins_index,
    smooth,
)
from vllm_novakv.prefix.traces import LoggedRequest

FREE = PrefillCost()


def random_requests(seed, num_requests, max_blocks=6, num_roots=3):
    """Prompts that extend, repeat or abandon earlier ones; a key is unique to the path that leads to it."""
    source = np.random.default_rng(seed)
    keys, paths, requests, now_s = itertools.count(), [], [], 0.0
    roots = [(next(keys),) for _ in range(num_roots)]
    for _ in range(num_requests):
        pool = paths if paths and source.random() < 0.8 else roots
        path = pool[source.integers(len(pool))]
        path = path[: source.integers(1, len(path) + 1)]
        path += tuple(next(keys) for _ in range(source.integers(0, max_blocks - len(path) + 1)))
        paths.append(path)
        now_s += float(source.exponential(3.0))
        requests.append(LoggedRequest(now_s, path, 16 * len(path), int(source.integers(0, 50)), 16))
    return requests


def evictions(requests, policy, capacity):
    """What a policy evicts, request by request, and the number of hits."""
    log, hits = [], 0
    for number, request in enumerate(requests):
        policy.begin(number, request.keys, request.arrival_s)
        num_hits = 0
        while num_hits < len(request.keys) and request.keys[num_hits] in policy:
            num_hits += 1
        missing = len(policy) + len(request.keys) - num_hits - capacity
        log.append(policy.evict(missing, request.arrival_s) if missing > 0 else [])
        policy.end(number, request.keys, request.arrival_s, request.output_tokens)
        hits += num_hits
    return log, hits


def naive_hits(requests, capacity, worth):
    """Hits of a cache that, block by block, evicts the leaf of least worth; `worth` gives (key, state) a number."""
    cached, state, hits = {}, {"uses": {}, "last": {}, "now": 0.0, "evicted": 0.0, "turn": 0}, 0
    for request in requests:
        state["now"], state["turn"] = request.arrival_s, state["turn"] + 1
        num_hits = 0
        while num_hits < len(request.keys) and request.keys[num_hits] in cached:
            num_hits += 1
        hits += num_hits
        while len(cached) + len(request.keys) - num_hits > capacity:
            parents = set(cached.values())
            leaves = [key for key in cached if key not in parents and key not in request.keys]
            victim = min(leaves, key=lambda key: worth(key, state))
            state["evicted"] = max(state["evicted"], worth(victim, state)[0])
            del cached[victim]
            state["uses"].pop(victim)
        for parent, key in zip((None, *request.keys), request.keys, strict=False):
            cached[key] = parent
            state["uses"].setdefault(key, []).append(request.arrival_s)
            state["last"][key] = (state["turn"], state["evicted"])
    return hits


@pytest.mark.parametrize("capacity", [6, 13, 40])
def test_lru_equals_a_naive_simulation(capacity):
    for seed in range(5):
        requests = random_requests(seed, 150)
        expected = naive_hits(requests, capacity, lambda key, state: (state["last"][key][0],))
        assert evictions(requests, LRUPolicy(), capacity)[1] == expected


@pytest.mark.parametrize("capacity", [6, 13, 40])
def test_decayed_lfu_equals_a_naive_simulation(capacity):
    half_life_s = 7.0

    def worth(key, state):
        return (sum(2.0 ** ((use - state["now"]) / half_life_s) for use in state["uses"][key]),)

    for seed in range(5):
        requests = random_requests(seed, 150)
        assert evictions(requests, DecayedLFUPolicy(half_life_s), capacity)[1] == naive_hits(requests, capacity, worth)


def test_gdsf_worked_example():
    policy = GDSFPolicy()
    for number, key in enumerate("aab"):
        policy.begin(number, key, 0.0)
        policy.end(number, key, 0.0)
    # a has 2, b has 1; evicting b raises L to 1, so that a new block enters with 2
    assert policy.evict(1, 0.0) == ["b"]
    policy.begin("c", ["c"], 0.0)
    policy.end("c", ["c"], 0.0)
    policy.begin("c2", ["c"], 0.0)
    policy.end("c2", ["c"], 0.0)
    assert policy.evict(2, 0.0) == ["a", "c"]


def test_gdsf_keeps_what_is_expensive():
    policy = GDSFPolicy(PrefillCost(break_even_tokens=16, block_tokens=16))
    for number, path in enumerate([("a", "b"), ("c",)]):
        policy.begin(number, path, 0.0)
        policy.end(number, path, 0.0)
    assert policy.evict(3, 0.0) == ["c", "b", "a"]


def exhaustive_optimum(requests, capacity):
    """Most hits over all ways to evict, found by trying all."""
    best = {frozenset(): 0}
    parent = {key: above for r in requests for above, key in zip((None, *r.keys), r.keys, strict=False)}
    for request in requests:
        following = {}
        for cached, hits in best.items():
            num_hits = 0
            while num_hits < len(request.keys) and request.keys[num_hits] in cached:
                num_hits += 1
            own = frozenset(request.keys)
            others = cached - own
            room = min(capacity - len(request.keys), len(others))
            for kept in itertools.combinations(sorted(others), room):
                state = own | frozenset(kept)
                if all(parent[key] is None or parent[key] in state for key in kept):
                    following[state] = max(following.get(state, 0), hits + num_hits)
        best = following
    return max(best.values())


def test_belady_equals_the_exhaustive_optimum():
    for seed in range(25):
        requests = random_requests(seed, 9, max_blocks=3, num_roots=2)
        policy = BeladyPolicy([request.keys for request in requests])
        assert evictions(requests, policy, 4)[1] == exhaustive_optimum(requests, 4)


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_beats_the_optimum_or_breaks_a_rule(name):
    for seed in range(4):
        requests = random_requests(seed, 300)
        capacity = 30
        policy = make_policy(name)
        cached, parent = set(), {}
        for number, request in enumerate(requests):
            parent.update(zip(request.keys, (None, *request.keys), strict=False))
            policy.begin(number, request.keys, request.arrival_s)
            missing = len(cached | set(request.keys)) - capacity
            victims = policy.evict(missing, request.arrival_s) if missing > 0 else []
            assert len(victims) == max(missing, 0)
            for victim in victims:
                assert victim in cached
                assert victim not in request.keys
                cached.remove(victim)
                assert victim not in {parent[key] for key in cached}
            policy.end(number, request.keys, request.arrival_s)
            cached |= set(request.keys)
            assert len(policy) == len(cached)
            assert all(key in policy for key in cached)
        optimum = evictions(requests, BeladyPolicy([request.keys for request in requests]), capacity)[1]
        assert evictions(requests, make_policy(name), capacity)[1] <= optimum


@pytest.mark.parametrize("name", policy_names())
def test_policies_see_only_the_past(name):
    requests = random_requests(1, 900)
    shift_s = requests[699].arrival_s
    future = [dataclasses.replace(r, arrival_s=r.arrival_s + shift_s) for r in random_requests(2, 200)]
    other_future = [*requests[:700], *future]
    first = evictions(requests, make_policy(name), 60)[0]
    second = evictions(other_future, make_policy(name), 60)[0]
    assert first[:700] == second[:700]


@pytest.mark.parametrize("name", policy_names())
def test_replay_is_deterministic(name):
    requests = random_requests(3, 700)
    results = [replay(requests, make_policy(name), 50, PrefillCost(100.0, 16)) for _ in range(2)]
    assert results[0] == results[1]
    assert 0 < results[0].hit_blocks < results[0].num_blocks
    assert results[0].hit_tokens == 16 * results[0].hit_blocks


def test_replay_counts_what_does_not_fit():
    requests = [LoggedRequest(0.0, (1, 2), 20, 0, 16), LoggedRequest(1.0, tuple(range(9)), 144, 0, 16)] * 2
    result = replay(requests, LRUPolicy(), 4, PrefillCost(16.0, 16))
    assert (result.num_requests, result.num_skipped) == (2, 2)
    assert (result.num_blocks, result.hit_blocks, result.num_tokens, result.hit_tokens) == (4, 2, 40, 20)
    # costs 1 and 2 per prompt, the second prompt is found whole
    assert (result.cost, result.saved_cost, result.saved_cost_ratio) == (6.0, 3.0, 0.5)


@pytest.mark.parametrize("name", policy_names())
def test_running_and_pinned_blocks_stay(name):
    policy = make_policy(name)
    for number, path in enumerate([("a", "b"), ("a", "c"), ("d",)]):
        policy.begin(number, path, 0.0)
        policy.end(number, path, 0.0)
    policy.begin("running", ("a", "b", "x"), 1.0)
    policy.pin("system prompt", ("d",), max_pinned_blocks=2)
    assert policy.num_pinned == 1
    assert policy.evict(10, 2.0) == ["c"]
    policy.end("running", ("a", "b"), 3.0)  # aborted before x was computed
    assert sorted(policy.evict(10, 4.0)) == ["a", "b"]
    policy.unpin("system prompt")
    assert policy.evict(10, 5.0) == ["d"]
    assert len(policy) == 0


@pytest.mark.parametrize("name", policy_names())
def test_discarded_blocks_are_forgotten(name):
    policy = make_policy(name)
    policy.begin(0, ("a", "b"), 0.0)
    policy.end(0, ("a", "b"), 0.0)
    with pytest.raises(ValueError, match="discard later blocks first"):
        policy.discard("a")
    policy.discard("b")
    assert policy.evict(5, 1.0) == ["a"]
    with pytest.raises(ValueError, match="not cached"):
        policy.discard("a")


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="'fifo' is unknown; choose one of lru, lfu, gdsf, expected-reuse"):
        make_policy("fifo")
    policy = LRUPolicy()
    policy.begin(1, (), 0.0)
    with pytest.raises(ValueError, match="running already"):
        policy.begin(1, (), 0.0)
    with pytest.raises(KeyError):
        policy.end(2, (), 0.0)
    with pytest.raises(ValueError, match="2 are allowed"):
        policy.pin("long", ("a", "b", "c"), max_pinned_blocks=2)
    policy.pin("short", ("a",), max_pinned_blocks=2)
    with pytest.raises(ValueError, match="exists"):
        policy.pin("short", ("a",), max_pinned_blocks=2)
    for maker in (
        lambda: DecayedLFUPolicy(0.0),
        lambda: PrefillCost(break_even_tokens=-1.0),
        lambda: ExpectedReusePolicy(max_evicted_blocks=0),
        lambda: ReturnModel(0),
        lambda: replay([], LRUPolicy(), 0, FREE),
    ):
        with pytest.raises(ValueError, match="positive"):
            maker()


def test_evicted_blocks_are_remembered_up_to_the_bound():
    policy = ExpectedReusePolicy(max_evicted_blocks=7)
    for number in range(200):
        policy.begin(number, (number,), float(number))
        policy.end(number, (number,), float(number))
        policy.evict(max(len(policy) - 5, 0), float(number))
    assert len(policy) == 5
    assert (len(policy._evicted), len(policy._owners), len(policy._segments), len(policy._arrivals)) == (7, 5, 5, 0)


def test_untrained_policy_is_lru():
    requests = random_requests(4, 60)
    assert evictions(requests, ExpectedReusePolicy(), 20)[1] == evictions(requests, LRUPolicy(), 20)[1]


def conversations(seed, num_requests):
    """Half of the prompts go on every 60 s, and their first answers are long; the others never come back."""
    source = np.random.default_rng(seed)
    keys, events = itertools.count(), []
    for _ in range(num_requests // 3):
        start_s = float(source.uniform(0, 3000))
        path = tuple(next(keys) for _ in range(8))
        goes_on = bool(source.random() < 0.3)
        for turn in range(6 if goes_on else 1):
            events.append(LoggedRequest(start_s + 60.0 * turn, path, 16 * len(path), 400 if goes_on else 5, 16))
            path += tuple(next(keys) for _ in range(2))
    return sorted(events, key=lambda request: request.arrival_s)


def test_learned_policy_keeps_what_comes_back():
    requests = conversations(0, 3000)
    capacity = 250
    results = {name: evictions(requests, make_policy(name), capacity)[1] for name in ("lru", "gdsf", "expected-reuse")}
    optimum = evictions(requests, BeladyPolicy([request.keys for request in requests]), capacity)[1]
    assert results["expected-reuse"] > max(results["lru"], results["gdsf"])
    assert results["expected-reuse"] > results["lru"] + 0.5 * (optimum - results["lru"])


def test_gittins_index_equals_a_search_over_stopping_ages():
    source = np.random.default_rng(0)
    hazard = source.exponential(0.05, size=(3, len(AGE_WIDTHS_S))) * (source.random((3, len(AGE_WIDTHS_S))) < 0.7)
    index = gittins_index(hazard)
    for row in range(3):
        for age in range(0, len(AGE_WIDTHS_S), 5):
            best, survival, returns, time_s = 0.0, 1.0, 0.0, 0.0
            for rate, width in zip(hazard[row, age:], AGE_WIDTHS_S[age:], strict=True):
                left = survival * math.exp(-rate * width)
                time_s += (survival - left) / rate if rate > 0 else survival * width
                returns += survival - left
                survival = left
                best = max(best, returns / time_s)
            assert index[row, age] == pytest.approx(best, rel=1e-9)


def test_constant_hazard_is_its_own_index():
    hazard = np.full((1, len(AGE_WIDTHS_S)), 0.02)
    np.testing.assert_allclose(gittins_index(hazard), 0.02, rtol=1e-9)


def test_smoothing_spreads_a_peak_and_keeps_its_sum():
    hazard = np.zeros((1, 9))
    hazard[0, 4] = 10.0
    np.testing.assert_allclose(smooth(hazard)[0], [0, 0, 1, 2, 4, 2, 1, 0, 0])
    constant = np.full((2, 5), 0.3)
    np.testing.assert_allclose(smooth(constant), constant)


def test_logistic_fit_recovers_the_odds():
    source = np.random.default_rng(0)
    features = np.concatenate([np.ones((40_000, 1)), source.normal(size=(40_000, 2))], axis=1)
    truth = np.array([-0.5, 1.0, -2.0])
    labels = (source.random(40_000) < 1 / (1 + np.exp(-features @ truth))).astype(np.float64)
    np.testing.assert_allclose(fit_logistic(features, labels), truth, atol=0.08)


@pytest.mark.parametrize(
    ("scores", "num_classes", "bounds"),
    [
        ([0, 0, 0, 1], 2, [0.5]),
        ([0, 1, 1, 1], 2, [0.5]),
        ([3, 3, 3], 4, []),
        ([4, 1, 3, 2], 2, [2.5]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, [2.5, 4.5, 6.5]),
        ([0, 0, 0, 0, 0, 0, 1, 2], 4, [0.5]),
    ],
)
def test_class_bounds_never_split_equals(scores, num_classes, bounds):
    assert class_bounds(np.array(scores, dtype=np.float64), num_classes).tolist() == bounds


def test_model_ranks_by_odds_and_by_age():
    """Samples with feature 1 come back after 10 s with odds 4:1, the others never."""
    source = np.random.default_rng(0)
    model = ReturnModel(1, num_classes=2, history=1024, refit_every=128)
    waiting = []
    for step in range(2048):
        now_s = float(step)
        while waiting and waiting[0][0] <= now_s:
            model.returned(waiting.pop(0)[1], now_s)
        feature = float(source.integers(2))
        sample = model.add(np.array([feature]), now_s)
        if feature and source.random() < 0.8:
            waiting.append((now_s + 10.0, sample))
    low, high = model.classify(np.array([[0.0], [1.0]]))
    assert low < high
    young, old = model.value(np.array([high, high]), np.array([1.0, 100.0]))
    (never,) = model.value(np.array([low]), np.array([1.0]))
    assert young > 10 * old
    assert young > 10 * never
    # 0.8 returns within 10 s of keeping
    assert young == pytest.approx(0.8 / 10, rel=0.3)


def test_what_may_still_return_is_not_taken_for_lost():
    """Everything returns after 100 s; that the younger half has not done so yet says nothing about its feature."""
    model = ReturnModel(1, num_classes=2, history=512, refit_every=256)
    for step in range(256):
        model.add(np.array([float(step >= 150)]), float(step))
        if step >= 100:
            model.returned(step - 100, float(step))
    assert model.classify(np.array([[0.0], [1.0]])).tolist() == [0, 0]


def test_ages_are_bounded_and_cover_everything():
    assert AGE_EDGES_S[0] == 0.0
    assert np.all(np.diff(AGE_EDGES_S) > 0)
    model = ReturnModel(NUM_FEATURES)
    values = model.value(np.zeros(3, dtype=np.int64), np.array([0.0, 5.0, 1e9]))
    assert values[0] > values[1] > values[2] > 0
