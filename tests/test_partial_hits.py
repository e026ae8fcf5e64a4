"""Prefix hits that end inside a history block: what is found, what is copied, and a fuzz of all reads."""

import random

import pytest
from engine_simulation import Engine, Setup
from indexed_engine import IndexedEngine
from test_band_manager import SKIPPED, fuzz, smallest_pool, tokens

from vllm_novakv.backend.band_geometry import BandGeometry
from vllm_novakv.backend.band_manager import BandManager
from vllm_novakv.backend.compat import KVCacheManager
from vllm_novakv.backend.history_manager import HistoryManager, resume_within_blocks


def partial(num_blocks: int, *args, **kwargs) -> Setup:
    return Setup(num_blocks, *args, reuses_within_blocks=True, **kwargs)


# What is found.


@pytest.mark.parametrize("cut", [15, 16, 17, 100, 127, 128, 129, 143, 144, 512, 700, 1000, 1279, 1499])
def test_fork_hits_up_to_the_last_16_tokens_that_it_shares(cut):
    engine = Engine(partial(400))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    assert engine.serve(prompt[:cut] + tokens(300, seed=1)) == cut // 16 * 16
    engine.check_idle()


@pytest.mark.parametrize("length", [17, 127, 128, 129, 130, 145, 255, 385, 1025])
def test_resend_hits_up_to_its_last_token(length):
    engine = Engine(partial(400))
    prompt = tokens(length, seed=0)
    assert [engine.serve(prompt) for _ in range(3)] == [0] + 2 * [(length - 1) // 16 * 16]
    engine.check_idle()


def test_next_turn_hits_what_was_generated():
    engine = Engine(partial(400))
    request = engine.add(tokens(700, seed=0), max_tokens=100)
    engine.run()
    # 800 tokens, of which the last was never computed
    assert engine.serve(request.sequence + tokens(200, seed=1)) == 784


def test_block_is_found_while_its_request_still_fills_it():
    engine = Engine(partial(400))
    first = engine.add(tokens(150, seed=0), max_tokens=60)
    while first.num_output_tokens < 30:
        engine.step()
    second = engine.add(first.sequence[:170] + tokens(60, seed=1), max_tokens=10)
    engine.run()
    assert engine.hits[second.request_id] == 160
    engine.check_idle()


def test_source_stays_cached_and_the_copy_is_the_requests_own():
    engine = Engine(partial(400))
    prompt = tokens(500, seed=0)
    engine.serve(prompt)
    source = engine.pool.get_cached_block(block_hash_at(engine, prompt, 384), engine.history_groups)[0]
    fork = engine.add(prompt[:330] + tokens(200, seed=1), max_tokens=2)
    engine.step()
    own = engine.manager.get_blocks(fork.request_id).blocks[engine.history_groups[0]]
    assert source not in own
    assert source.ref_cnt == 0
    engine.run()
    assert engine.counts["copies"] == 1
    assert engine.serve(prompt[:384] + tokens(50, seed=2)) == 384
    assert engine.serve(fork.sequence[:384] + tokens(50, seed=3)) == 384


def block_hash_at(engine: Engine, prompt: list[int], num_tokens: int) -> bytes:
    request = engine.add(prompt)
    engine.abort(request)
    return request.block_hashes[num_tokens // 16 - 1]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        pytest.param(60, 960, id="last"),
        pytest.param(50, 800, id="in-the-window"),
        # with a window of 512 tokens the boundary 976 needs blocks 29 to 60
        pytest.param(28, 976, id="before-the-window"),
        pytest.param(29, 464, id="first-of-the-window"),
        pytest.param(0, 0, id="sink"),
    ],
)
def test_missing_band_block_gives_a_shorter_hit(missing, expected):
    engine = Engine(partial(400))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    block = engine.pool.get_cached_block(block_hash_at(engine, prompt, 16 * missing + 16), engine.band_groups)[0]
    engine.manager.evict_blocks({block.block_id})
    assert engine.serve(prompt[:976] + tokens(300, seed=1)) == expected


def test_missing_history_block_ends_the_hit():
    engine = Engine(partial(400))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    block = engine.pool.get_cached_block(block_hash_at(engine, prompt, 896), engine.history_groups)[0]
    engine.manager.evict_blocks({block.block_id})
    assert engine.serve(prompt[:880] + tokens(300, seed=1)) == 768
    assert not engine.pool.cached_block_hashes_by_block.get(block.block_id)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2], ids=["sync", "async"])
def test_tokens_of_the_same_step_are_not_copied(max_steps_in_flight):
    """The second request waits a step for the first; one that shares whole blocks need not."""
    engine = Engine(partial(400, max_steps_in_flight=max_steps_in_flight))
    prompt = tokens(200, seed=0)
    first, second = engine.add(prompt, max_tokens=5), engine.add(prompt[:180] + tokens(60, seed=1), max_tokens=5)
    engine.step()
    assert engine.running == [first]
    engine.step()
    assert engine.running == [first, second]
    assert engine.hits[second.request_id] == 176
    third = engine.add(tokens(200, seed=2), max_tokens=9)
    fourth = engine.add(third.sequence[:128] + tokens(60, seed=3), max_tokens=9)
    engine.step()
    assert engine.running[-2:] == [third, fourth]
    assert engine.hits[fourth.request_id] == 128
    engine.run()
    engine.check_idle()


def test_shared_boundary_is_kept_when_the_pool_is_full():
    engine = Engine(partial(200, max_num_batched_tokens=400))
    for seed in range(1000, 1010):
        engine.serve(tokens(1500, seed))
    shared = tokens(1000, seed=0)
    hits = [engine.serve(shared + tokens(500, seed)) for seed in (1, 2, 3, 4)]
    # The first leaves its sink and no tail at 992; the second finds the history's prefix and keeps one.
    assert hits == [0, 64, 992, 992]


@pytest.mark.parametrize("policy", ["lru", "expected-reuse"])
def test_more_is_hit_where_hot_prefixes_end_inside_a_block(policy):
    """In a pool that six prefixes of 750 tokens nearly fill, with scans between them."""
    hit_tokens = []
    for setup in (Setup(300), partial(300)):
        engine = IndexedEngine(setup, policy)
        engine.worker.execute = lambda step: None  # reads are the fuzz's subject
        rng = random.Random(0)
        hot = [tokens(750, 100 + i) for i in range(6)]
        for _ in range(300):
            is_hot = rng.random() < 0.5
            engine.serve(rng.choice(hot) + list(rng.randbytes(60)) if is_hot else list(rng.randbytes(1500)))
        engine.check_idle()
        hit_tokens.append(engine.counts["hit_tokens"])
    print(hit_tokens)
    assert hit_tokens[1] > hit_tokens[0]


def test_rests_of_requests_take_a_small_share_of_a_full_pool():
    engine = IndexedEngine(partial(640), "lru")
    for seed in range(60):
        engine.serve(tokens(1000, seed))
    assert 0 < engine.hook._num_rest_pages <= 20
    last, first = tokens(1000, 59), tokens(1000, 0)
    assert engine.serve(last) == 992
    assert engine.serve(first) == 0
    assert engine.reset_prefix_cache(with_running=False)
    assert engine.hook._num_rest_pages == 0


# Start-up.


def test_pool_without_a_block_for_the_copy_is_refused():
    least = smallest_pool(max_model_len=1024).num_blocks
    with pytest.raises(
        ValueError, match=rf"takes {least - 1} of {least - 1} blocks, and a copy of its last one 1 more"
    ):
        Engine(partial(least, 1024))
    engine = Engine(partial(least + 1, 1024))
    prompt = tokens(1023, seed=0)
    assert [engine.serve(prompt) for _ in range(2)] == [0, 1008]
    engine.check_idle()


def test_other_layers_with_larger_blocks_are_refused():
    engine = Engine(Setup(800, 1024, **SKIPPED))
    for single in engine.manager.coordinator.single_type_managers:
        if not isinstance(single, (BandManager, HistoryManager)):
            single.block_size = 64
    with pytest.raises(NotImplementedError, match="have blocks of 64 tokens, they must be of 16"):
        resume_within_blocks(engine.manager)


# The fuzz.

PARTIAL_SETUPS = {
    "smallest": partial(smallest_pool(max_model_len=1024).num_blocks + 1, 1024),
    "small-async": partial(140, 1024, max_steps_in_flight=2),
    "no-admission-gate": partial(140, 1024, reserves_full_prompt=False),
    "large": partial(600, 1024, max_steps_in_flight=2),
    "sliding-window": partial(300, 1024, 1024, max_steps_in_flight=2, full_layers=2, sliding_layers=2),
    "many-groups": partial(810, 1024, 1024, full_layers=3, skipped_layers=1, sliding_layers=2),
    "short-band": partial(112, 1024, sink_tokens=16, recent_tokens=48, prompt_recent_tokens=112),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, None) for name in PARTIAL_SETUPS),
        ("smallest", "expected-reuse"),
        ("small-async", "lru"),
        ("sliding-window", "lfu"),
        ("many-groups", "gdsf"),
    ],
)
def test_fuzz_every_read_finds_its_page(name, policy):
    start = Engine if policy is None else lambda setup: IndexedEngine(setup, policy)
    engine = fuzz(PARTIAL_SETUPS[name], num_requests=100, seed=7, start=start)
    counts = engine.counts
    print(name, dict(counts), engine.worker.num_reads)
    assert counts["partial_hits"] > 10
    assert counts["copies"] > 10
    assert counts["aborts"] > 0
    assert counts["preemptions"] > 5 or name == "large"


def _nothing_is_copied(monkeypatch):
    take = KVCacheManager.take_kv_cache_block_copies
    monkeypatch.setattr(KVCacheManager, "take_kv_cache_block_copies", lambda self: ([], take(self)[1]))


def _what_the_step_writes_is_copied(monkeypatch):
    monkeypatch.delattr(HistoryManager, "get_num_blocks_to_allocate")


def _band_of_the_boundary_of_128(monkeypatch):
    blocks_for_hit = BandGeometry.blocks_for_hit
    monkeypatch.setattr(BandGeometry, "blocks_for_hit", lambda self, n: (blocks_for_hit(self, n)[0], self.tail(n)))


@pytest.mark.parametrize(
    "break_it", [_nothing_is_copied, _what_the_step_writes_is_copied, _band_of_the_boundary_of_128]
)
def test_fuzz_sees_a_broken_manager(monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=r"missing or foreign|band block"):
        fuzz(PARTIAL_SETUPS["small-async"], num_requests=300, seed=0)
