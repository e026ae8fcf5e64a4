"""The prefix index inside vLLM's cache manager: every read is right, hot prefixes stay, pins hold."""

import random

import pytest
from engine_simulation import Engine, Setup
from indexed_engine import IndexedEngine
from test_band_manager import FUZZ_SETUPS, Traffic, fuzz, tokens
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from vllm_novakv.backend import prefix_hook
from vllm_novakv.backend.compat import hash_and_group
from vllm_novakv.backend.retention_queue import RetentionQueue
from vllm_novakv.prefix.pins import Pin, PinLimitError
from vllm_novakv.prefix.policy import policy_names

POLICIES = policy_names()


def hot_and_scans(engine: Engine, num_requests: int = 400, seed: int = 0) -> int:
    """Half of the requests begin with one of six prompts, the others with none of them; returns hit tokens."""
    rng = random.Random(seed)
    hot = [tokens(640, 100 + i) for i in range(6)]
    for _ in range(num_requests):
        is_hot = rng.random() < 0.5
        engine.serve(rng.choice(hot) + list(rng.randbytes(60)) if is_hot else list(rng.randbytes(1500)))
    engine.check_idle()
    return engine.counts["hit_tokens"]


# The fuzz.


@pytest.mark.parametrize(
    ("name", "policy", "seed"),
    [
        ("smallest-async", "expected-reuse", 1),
        ("no-admission-gate", "gdsf", 2),
        ("no-admission-gate", "lfu", 3),
        ("sliding-window", "expected-reuse", 4),
        ("many-groups", "lru", 5),
    ],
)
def test_fuzz_every_read_finds_its_page(name, policy, seed):
    setup = FUZZ_SETUPS[name]
    pins = [Pin("first", tuple(tokens(300, seed=1))), Pin("second", tuple(tokens(200, seed=2)))]
    engine = fuzz(setup, num_requests=100, seed=seed, start=lambda setup: IndexedEngine(setup, policy, pins))
    assert engine.counts["preemptions"] > 5
    assert engine.counts["hits"] > 10
    assert engine.counts["aborts"] > 0
    assert engine.index.counts.evicted_chunks > 20
    assert engine.index.counts.hit_tokens <= engine.counts["hit_tokens"]


def _a_block_in_use_is_given_away(monkeypatch):
    choose = prefix_hook.PrefixHook._choose

    def broken(self, count):
        chosen = choose(self, count)
        in_use = [block for block in self._pool.blocks if block.ref_cnt == 1 and not block.is_null]
        if chosen and in_use:
            self._queue.append(chosen.pop())
            in_use[0].ref_cnt = 0
            chosen.append(in_use[0])
        return chosen

    monkeypatch.setattr(prefix_hook.PrefixHook, "_choose", broken)


def test_fuzz_sees_a_block_in_use_that_is_given_away(monkeypatch):
    _a_block_in_use_is_given_away(monkeypatch)
    with pytest.raises(AssertionError, match=r"missing or foreign|ref_cnt|assert"):
        fuzz(FUZZ_SETUPS["small-sync"], num_requests=200, seed=1, start=IndexedEngine)


def test_eviction_storm_leaves_no_block_that_nobody_accounts_for():
    engine = IndexedEngine(Setup(300, max_steps_in_flight=2))
    rng = random.Random(0)
    traffic = Traffic(rng, engine.setup)
    for _ in range(60):
        # the same prompt several times at once: duplicates of its blocks
        prompt = tokens(700, seed=rng.randint(0, 5))
        for _ in range(3):
            engine.add(prompt + list(rng.randbytes(40)), 3)
        traffic.send(engine)
        engine.run()
    engine.check_references()
    free = engine.pool.free_block_queue.get_all_free_blocks()
    cached = [block for block in free if block.block_hash is not None]
    given_up = {block.block_id for block, _, _ in engine.hook._given_up}
    unknown = [
        block
        for block in cached
        if not engine.index.is_wanted(hash_and_group(block)[0]) and block.block_id not in given_up
    ]
    # what the sweep has not reached yet stays a small part
    assert len(unknown) < len(cached) // 4
    engine.check_idle()


# What the policy is for.


def test_hot_prefixes_outlive_scans():
    setup = Setup(400)
    stock = hot_and_scans(Engine(setup))
    assert hot_and_scans(IndexedEngine(setup, "expected-reuse")) > 1.3 * stock
    assert hot_and_scans(IndexedEngine(setup, "lfu")) > 1.3 * stock


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_equal_those_without_the_index_while_the_pool_has_room(policy):
    setup = Setup(4000)
    engines = Engine(setup), IndexedEngine(setup, policy)
    stock, indexed = (hot_and_scans(engine, num_requests=40) for engine in engines)
    assert indexed == stock > 0
    assert engines[1].index.counts.hit_tokens == stock


def test_shadow_estimates_what_the_stock_queue_hits():
    setup = Setup(400)
    stock = hot_and_scans(Engine(setup))
    engine = IndexedEngine(setup)
    hot_and_scans(engine)
    assert engine.index.counts.lru_hit_tokens == pytest.approx(stock, rel=0.15)


def test_counts_are_those_of_the_engine():
    engine = IndexedEngine(Setup(400))
    prompt = tokens(1500, seed=0)
    for _ in range(3):
        engine.serve(prompt)
    counts = engine.index.counts
    assert (counts.requests, counts.prompt_tokens) == (3, 4500)
    assert counts.hit_tokens == counts.lru_hit_tokens == 2 * 1408


# Pins.


def scan(engine: IndexedEngine, num_prompts: int = 12) -> None:
    for seed in range(500, 500 + num_prompts):
        engine.serve(tokens(1500, seed))


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_prefix_outlives_a_scan(policy):
    prefix = tokens(640, seed=0)
    for pins, expected in (([Pin("system", tuple(prefix))], 640), ([], 0)):
        engine = IndexedEngine(Setup(200), policy, pins)
        engine.serve(prefix + tokens(50, seed=1))
        scan(engine)
        assert engine.serve(prefix + tokens(50, seed=2)) == expected
        engine.check_idle()


def test_pins_go_when_a_running_request_needs_the_room():
    prefix = tokens(640, seed=0)
    # 120 blocks: the longest prompt needs 16 of history and 84 of band
    engine = IndexedEngine(Setup(1 + 16 + 84), "gdsf", [Pin("system", tuple(prefix))])
    engine.serve(prefix + tokens(50, seed=1))
    request = engine.add(tokens(2000, seed=3), max_tokens=5)
    engine.run()
    assert request.is_finished()
    engine.check_idle()


@pytest.mark.parametrize(
    ("length", "limit", "message"),
    [
        (127, 200, "'long' has 127 tokens, the smallest cacheable prefix 128"),
        # 5 blocks of history, 4 of the sink and 32 of the window; the sink is part of nothing else
        (640, 40, r"need 41 blocks \('long' 41\), max_pinned_ratio allows 40"),
    ],
)
def test_pin_that_cannot_be_kept_is_refused_at_start(length, limit, message):
    with pytest.raises(PinLimitError, match=message):
        IndexedEngine(Setup(200), "gdsf", [Pin("long", tuple(tokens(length, seed=0)))], max_pinned_blocks=limit)


def test_request_pins_its_prompt_within_the_limit():
    engine = IndexedEngine(Setup(200), max_pinned_blocks=60)
    prompt = tokens(640 + 1, seed=0)
    engine.add(prompt, novakv_pin="mine")
    engine.run()
    scan(engine)
    assert engine.serve(prompt) == 640
    assert engine.index.pins.num_pages == 41
    engine.add(prompt, novakv_pin="mine")
    engine.add(tokens(641, seed=9), novakv_pin="another")
    engine.add(tokens(641, seed=9), novakv_pin="mine")
    engine.add(prompt, novakv_unpin="unknown")
    engine.run()
    assert engine.index.counts.refused_pins == 3
    engine.add(tokens(129, seed=10), novakv_unpin="mine")
    engine.run()
    assert engine.index.pins.num_pages == 0
    scan(engine)
    assert engine.serve(prompt) == 0
    engine.check_idle()


def test_pin_is_bound_by_its_whole_chunks():
    prefix = tokens(400, seed=0)
    engine = IndexedEngine(Setup(200), "gdsf", [Pin("system", tuple(prefix))])
    engine.serve(prefix[:383] + tokens(50, seed=1))
    assert not engine.index.pins.bound
    engine.serve(prefix[:390] + tokens(50, seed=1))
    assert engine.index.pins.bound["system"].num_tokens == 384


def test_request_cannot_remove_or_take_over_a_configured_pin():
    prefix = tokens(640, seed=0)
    engine = IndexedEngine(Setup(200), "gdsf", [Pin("system", tuple(prefix))])
    engine.add(tokens(129, seed=10), novakv_pin="system")
    engine.run()
    assert engine.index.counts.refused_pins == 1
    engine.serve(prefix + tokens(50, seed=1))
    engine.add(tokens(129, seed=10), novakv_unpin="system")
    engine.run()
    assert engine.index.pins.num_pages == 41


def test_requests_pin_nothing_unless_allowed():
    engine = IndexedEngine(Setup(200))
    engine.hook._takes_request_pins = False
    engine.add(tokens(641, seed=0), novakv_pin="mine")
    engine.run()
    assert engine.index.pins.num_pages == 0


# Resets and aborts.


def test_reset_forgets_all_prefixes_and_keeps_pins():
    prefix = tokens(640, seed=0)
    engine = IndexedEngine(Setup(200), "gdsf", [Pin("system", tuple(prefix))])
    prompt = prefix + tokens(50, seed=1)
    engine.serve(prompt)
    assert engine.reset_prefix_cache(with_running=False)
    assert engine.serve(prompt) == 0
    scan(engine)
    assert engine.serve(prompt) == 640
    engine.check_idle()


def test_aborted_before_it_ran_leaves_nothing():
    engine = IndexedEngine(Setup(200))
    engine.abort(engine.add(tokens(700, seed=0)))
    assert engine.index.num_chunks == 0
    engine.check_idle()


# The queue alone.


def make_pool(num_blocks: int, choose, is_pinned=lambda block: False) -> BlockPool:
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=16)
    pool.free_block_queue = RetentionQueue(pool.free_block_queue, choose, is_pinned)
    return pool


def give_hashes(pool: BlockPool, block_ids) -> None:
    for block_id in block_ids:
        pool.blocks[block_id].set_block_hash(block_id.to_bytes(36, "little"), num_tokens=16)


def test_queue_takes_uncached_blocks_then_chosen_then_oldest_then_pinned():
    calls = []

    def choose(count):
        calls.append(count)
        block = pool.blocks[5]
        if block.prev_free_block is None:
            return []
        pool.free_block_queue.remove(block)
        return [block]

    pool = make_pool(8, choose, is_pinned=lambda block: block.block_id in (3, 4))
    give_hashes(pool, [3, 4, 5, 6, 7])
    queue = pool.free_block_queue
    assert [block.block_id for block in queue.popleft_n(1)] == [1]
    assert [block.block_id for block in queue.popleft_n(3)] == [2, 5, 6]
    assert [block.block_id for block in queue.popleft_n(2)] == [7, 3]
    assert calls == [2, 2]
    assert queue.num_free_blocks == 1
    assert queue.popleft_n(0) == []


def test_queue_equals_vllm_s_when_nothing_is_chosen():
    rng = random.Random(0)
    stock = BlockPool(40, enable_caching=True, hash_block_size=16)
    ours = make_pool(40, choose=lambda count: [])
    assert type(stock.free_block_queue) is FreeKVCacheBlockQueue
    taken: list[int] = []
    for step in range(2000):
        if rng.random() < 0.5 and stock.get_num_free_blocks():
            count = rng.randint(1, stock.get_num_free_blocks())
            ids = [[block.block_id for block in pool.get_new_blocks(count)] for pool in (stock, ours)]
            assert ids[0] == ids[1]
            taken += ids[0]
            for pool in (stock, ours):
                for block_id in ids[0]:
                    # a third stays without a hash
                    if block_id % 3:
                        block_hash = (step * 64 + block_id).to_bytes(36, "little")
                        pool.blocks[block_id].set_block_hash(block_hash, num_tokens=16)
                        pool.cached_block_hash_to_block.insert(block_hash, pool.blocks[block_id])
        elif taken:
            rng.shuffle(taken)
            count = rng.randint(1, len(taken))
            for pool in (stock, ours):
                pool.free_blocks([pool.blocks[block_id] for block_id in taken[:count]])
            del taken[:count]
        assert stock.get_num_free_blocks() == ours.get_num_free_blocks()
