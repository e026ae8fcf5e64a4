"""The band manager inside vLLM's cache manager: hand-computed blocks, capacity, policy, and a fuzz of all reads."""

import bisect
import random

import pytest
from engine_simulation import Engine, Setup, plan_kv_cache
from vllm.v1.core.kv_cache_manager import KVCacheManager

from vllm_novakv.backend import band_manager
from vllm_novakv.backend.band_geometry import BandGeometry
from vllm_novakv.backend.band_manager import BandManager
from vllm_novakv.backend.compat import num_uncached_free_blocks

# Layers -> groups as vLLM forms them.
PLAIN = {}  # one of history, one of band
SLIDING = {"full_layers": 2, "sliding_layers": 6}  # and three with a sliding window
SKIPPED = {"full_layers": 3, "skipped_layers": 1}  # three of history, three of band, one of full attention


def tokens(length: int, seed: int) -> list[int]:
    return list(random.Random(seed).randbytes(length))


def real_blocks(engine: Engine, request) -> list[int]:
    """Numbers of the request's band blocks that are not null."""
    blocks = engine.manager.get_blocks(request.request_id).blocks[engine.band_groups[0]]
    return [number for number, block in enumerate(blocks) if not block.is_null]


def is_accepted(num_blocks: int, **arguments) -> bool:
    """Whether vLLM starts with a pool of this size."""
    try:
        Setup(num_blocks, **arguments).start()
    except ValueError:
        return False
    return True


def smallest_pool(**arguments) -> Setup:
    """The setup with the fewest blocks, the null block included, with which vLLM starts."""
    sizes = range(1, 5000)
    return Setup(sizes[bisect.bisect_left(sizes, True, key=lambda size: is_accepted(size, **arguments))], **arguments)


# Blocks worked out by hand.


def test_whole_prompt_in_one_chunk_leaves_a_hole():
    engine = Engine(Setup(num_blocks=110, has_prefix_caching=False))
    request = engine.add(tokens(1500, seed=0), max_tokens=30)
    engine.step()
    # 512 tokens before the boundary, 1,408.
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(56, 94)]
    assert len(engine.manager.get_block_ids(request.request_id)[engine.history_groups[0]]) == 12
    assert engine.pool.get_num_free_blocks() == 109 - (4 + 38) - 12


def test_decoding_shrinks_the_window_and_moves_it_by_128_tokens():
    engine = Engine(Setup(num_blocks=110, has_prefix_caching=False))
    request = engine.add(tokens(1500, seed=0), max_tokens=60)
    engine.step()
    assert real_blocks(engine, request)[:5] == [0, 1, 2, 3, 56]
    while request.num_computed_tokens < 1536:
        engine.step()
        assert real_blocks(engine, request)[:5] == [0, 1, 2, 3, 72]
    engine.step()  # token 1,537 begins block 96
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(72, 97)]
    engine.step()
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(80, 97)]
    engine.run()
    engine.check_idle()


def test_resumed_request_computes_its_generated_tokens_with_the_short_window():
    engine = Engine(Setup(num_blocks=110, has_prefix_caching=False))
    request = engine.add(tokens(1500, seed=0), max_tokens=200)
    while request.num_output_tokens < 100:
        engine.step()
    engine.reset_prefix_cache(with_running=True)
    engine.chunk_limit = 1500
    engine.step()
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(56, 94)]
    engine.step()
    assert request.num_computed_tokens == 1600
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(72, 100)]
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize(
    ("max_steps_in_flight", "first_window_blocks"),
    [
        (1, [4, 4, 4, 8, 24, 40, 72, 72]),
        # The window of a step follows what is processed, one step later.
        (2, [4, 4, 4, 4, 8, 24, 40, 72]),
    ],
    ids=["sync", "async"],
)
def test_chunks_of_256_tokens(max_steps_in_flight, first_window_blocks):
    setup = Setup(num_blocks=150, max_num_batched_tokens=256, max_steps_in_flight=max_steps_in_flight)
    engine = Engine(setup)
    request = engine.add(tokens(1500, seed=0), max_tokens=5)
    # Six chunks and two generated tokens.
    num_blocks = [16, 32, 48, 64, 80, 94, 94, 94]
    for first, end in zip(first_window_blocks, num_blocks, strict=True):
        engine.step()
        assert real_blocks(engine, request) == [0, 1, 2, 3, *range(first, end)]
    assert request.num_computed_tokens == 1502


def test_hit_leaves_a_hole_and_the_window_moves_on():
    engine = Engine(Setup(num_blocks=400))
    prompt = tokens(1500, seed=0)
    assert engine.serve(prompt) == 0
    request = engine.add(prompt, max_tokens=40)
    engine.step()
    # Hit of 1,408 tokens: tail from token 896; the chunk adds blocks 88 to 93.
    assert engine.hits[request.request_id] == 1408
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(56, 94)]
    while request.num_computed_tokens < 1538:
        engine.step()
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(80, 97)]
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2], ids=["sync", "async"])
def test_optional_blocks_are_real_while_the_pool_is_empty_and_freed_at_the_next_step(max_steps_in_flight):
    engine = Engine(Setup(num_blocks=400, max_num_batched_tokens=1500, max_steps_in_flight=max_steps_in_flight))
    request = engine.add(tokens(1600, seed=0), max_tokens=3)
    engine.step()
    assert real_blocks(engine, request) == [*range(94)]
    engine.step()
    assert real_blocks(engine, request) == [0, 1, 2, 3, *range(56, 100)]


@pytest.mark.parametrize(("num_missing", "is_filled"), [(0, True), (1, False)])
def test_optional_blocks_take_half_of_the_uncached_blocks(num_missing, is_filled):
    # 12 of history, of which 11 are cached by then, 42 required and 52 optional.
    engine = Engine(Setup(num_blocks=1 + 12 + 11 + 42 + 2 * 52 - num_missing))
    request = engine.add(tokens(1500, seed=0), max_tokens=3)
    engine.step()
    assert real_blocks(engine, request) == ([*range(94)] if is_filled else [0, 1, 2, 3, *range(56, 94)])


def test_worker_gets_optional_blocks_of_later_chunks():
    engine = Engine(Setup(num_blocks=400, max_num_batched_tokens=1024))
    request = engine.add(tokens(2000, seed=0), max_tokens=5)
    engine.step()
    engine.step()
    band = engine.band_groups[0]
    table = engine.worker.tables[request.request_id][band]
    assert (table[:125] > 0).all()
    assert list(table[64:125]) == engine.manager.get_block_ids(request.request_id)[band][64:125]


# Start-up and capacity.


@pytest.mark.parametrize(
    ("layers", "max_steps_in_flight", "needed"),
    [
        # 16 blocks of history; sink, window of 512 + 128 tokens before and after the chunk.
        pytest.param(PLAIN, 1, 16 + 4 + 2 * 40, id="plain-sync"),
        pytest.param(PLAIN, 2, 16 + 4 + 3 * 40, id="plain-async"),
        # A sliding group holds up to the whole chunk, and one block more.
        pytest.param(SLIDING, 1, 16 + 4 + 2 * 40 + 3 * (128 + 1), id="sliding-sync"),
        pytest.param(SKIPPED, 2, 3 * (16 + 4 + 3 * 40) + 128, id="skipped-async"),
    ],
)
def test_pool_too_small_for_one_request_is_refused(layers, max_steps_in_flight, needed):
    setup = smallest_pool(max_steps_in_flight=max_steps_in_flight, **layers)
    assert setup.num_blocks == 1 + needed
    with pytest.raises(
        ValueError, match=r"one request with the model's max seq len \(2048\).*decreasing `max_model_len`"
    ):
        Setup(needed, max_steps_in_flight=max_steps_in_flight, **layers).start()


def test_automatic_length_leaves_room_for_its_prompt():
    setup = Setup(num_blocks=1 + 12 + 84)
    vllm_config = setup.vllm_config()
    vllm_config.model_config.original_max_model_len = -1
    config = plan_kv_cache(vllm_config, setup.kv_cache_specs())
    assert vllm_config.model_config.max_model_len == 12 * 128
    KVCacheManager(config, max_model_len=1536, scheduler_block_size=128, hash_block_size=16)


def test_band_of_other_blocks_is_refused():
    setup = Setup(num_blocks=1000)
    config, _ = setup.start()
    spec = config.kv_cache_groups[1].kv_cache_spec
    object.__setattr__(spec, "block_size", 128)
    with pytest.raises(NotImplementedError, match="stretched the band's blocks to 128 tokens"):
        KVCacheManager(config, max_model_len=2048, scheduler_block_size=128, hash_block_size=128)


def test_start_up_log_states_sizes(monkeypatch):
    lines = set()
    monkeypatch.setattr(band_manager.logger, "info_once", lambda text, *values: lines.add(text % values))
    Engine(Setup(num_blocks=1000, **SKIPPED))
    # 8 * 36 / 128 bits; 30 layers x 3 heads x 36 bytes, and x 128 elements x 2 bytes.
    assert lines == {
        "NOVAKV cache: 2.250 bits per element, 3240 bytes per token of history in 30 layers (BF16: 23040); BF16 band "
        "of 64 first and 256 latest tokens (512 for a prompt's tokens), 28 blocks of 16 tokens a decoding request",
        "NOVAKV prefix cache: the smallest cacheable prefix is 128 tokens, of a prompt of at least 129; longer ones "
        "count in steps of 128",
    }


@pytest.mark.parametrize("chunk", [256, 2048, 8192], ids="chunk{}".format)
@pytest.mark.parametrize("max_steps_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("has_prefix_caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("layers", [PLAIN, SLIDING, SKIPPED], ids=["plain", "sliding", "skipped"])
def test_longest_prompt_runs_alone_in_the_smallest_pool(chunk, max_steps_in_flight, has_prefix_caching, layers):
    setup = smallest_pool(
        max_model_len=8192,
        max_num_batched_tokens=chunk,
        max_steps_in_flight=max_steps_in_flight,
        has_prefix_caching=has_prefix_caching,
        **layers,
    )
    engine = Engine(setup)
    engine.serve(tokens(3000, seed=1))  # leaves the pool partly cached
    request = engine.add(tokens(8185, seed=0), max_tokens=7)
    engine.step()
    assert engine.running == [request]
    engine.run()
    assert engine.counts["preemptions"] == 0
    engine.check_idle()


@pytest.mark.parametrize("layers", [PLAIN, SKIPPED], ids=["plain", "skipped"])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3, 4], ids="steps{}".format)
def test_optional_blocks_leave_room_for_the_rest_of_the_prompt(max_steps_in_flight, layers):
    setup = smallest_pool(
        max_model_len=8192, max_num_batched_tokens=8192, max_steps_in_flight=max_steps_in_flight, **layers
    )
    rng = random.Random(0)
    for seed in range(15):
        engine = Engine(setup)
        engine.add(tokens(8185, seed), max_tokens=7)
        while engine.waiting or engine.running or engine.steps:
            engine.chunk_limit = rng.choice([128, 300, 700, 1000, 3000, 8192])
            engine.step()
        assert engine.counts["preemptions"] == 0


@pytest.mark.parametrize("num_missing", [0, 1])
def test_prompt_waits_until_it_fits_whole(num_missing):
    # The first holds 16 blocks of history, the sink, and 22 blocks from token 1,664 on; the second needs 16 and 84.
    num_blocks = 1 + (16 + 4 + 22) + (16 + 84) - num_missing
    engine = Engine(Setup(num_blocks, max_num_batched_tokens=128))
    first = engine.add(tokens(2000, seed=0), max_tokens=40)
    while not first.num_output_tokens:
        engine.step()
    second = engine.add(tokens(2000, seed=1), max_tokens=2)
    engine.step()
    assert engine.running == [first, second][: 2 - num_missing]
    engine.run()
    assert second.is_finished()
    engine.check_idle()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "layers"),
    [
        pytest.param(1024, 400, PLAIN, id="1k-400"),
        pytest.param(1024, 1000, PLAIN, id="1k-1000"),
        pytest.param(2048, 700, PLAIN, id="2k-700"),
        pytest.param(2048, 1500, PLAIN, id="2k-1500"),
        pytest.param(8192, 1000, PLAIN, id="8k-1000"),
        pytest.param(2048, 4000, SKIPPED, id="2k-4000-skipped"),
    ],
)
def test_reported_capacity_is_what_decodes_at_the_same_time(max_model_len, num_blocks, layers, max_steps_in_flight):
    """All requests decode up to the longest length in step, the worst case: every window is largest at once."""
    setup = Setup(
        num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=8192,
        max_steps_in_flight=max_steps_in_flight,
        max_num_seqs=1000,
        prompt_recent_tokens=1024,
        **layers,
    )
    reported = setup.reported_requests()
    engine = Engine(setup)
    engine.worker.execute = lambda step: None  # reads are the fuzz's subject
    for seed in range(int(1.5 * reported) + 2):
        engine.add(tokens(max_model_len - 130, seed), max_tokens=130)
    while not engine.finished:
        num_decoding = sum(request.num_output_tokens > 0 for request in engine.running)
        engine.step()
    assert num_decoding == pytest.approx(reported, rel=0.1)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", [200, 1000, 8192], ids="chunk{}".format)
def test_requests_hold_no_more_than_accounted(chunk, max_steps_in_flight):
    setup = Setup(400, 8192, chunk, max_steps_in_flight=max_steps_in_flight, has_prefix_caching=False)
    engine = Engine(setup)
    request = engine.add(tokens(7000, seed=0), max_tokens=300)
    steady = setup.geometry.steady_blocks(8192)
    num_held = {"prompt": [], "decode": []}
    while not request.is_finished():
        engine.step()
        kind = "decode" if request.num_computed_tokens > 7005 else "prompt"
        num_held[kind].append(len(real_blocks(engine, request)))
    assert max(num_held["prompt"]) <= setup.geometry.peak_blocks(8192, 1 + max_steps_in_flight)
    assert max(num_held["decode"][:-2]) == steady + 1
    # Three boundaries are crossed; the window moves once the token after one is processed.
    assert sum(number > steady for number in num_held["decode"]) <= 3 * max_steps_in_flight


# Which prefixes are found again.


def test_resend_hits():
    engine = Engine(Setup(num_blocks=400))
    prompt = tokens(1500, seed=0)
    assert [engine.serve(prompt) for _ in range(3)] == [0, 1408, 1408]


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 384, 385, 1024, 1025])
def test_resend_hits_at_every_length(length):
    engine = Engine(Setup(num_blocks=90, max_model_len=1100))
    prompt = tokens(length, seed=0)
    assert engine.serve(prompt) == 0
    assert engine.serve(prompt) == (length - 1) // 128 * 128


def test_next_turn_hits():
    engine = Engine(Setup(num_blocks=400))
    request = engine.add(tokens(700, seed=0), max_tokens=100)
    engine.run()
    # 800 tokens, of which the last was never computed: up to 768.
    assert engine.serve(request.sequence + tokens(200, seed=1)) == 768


def test_partly_shared_prefix_hits_while_the_pool_has_room():
    engine = Engine(Setup(num_blocks=400))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    assert engine.serve(prompt[:1000] + tokens(500, seed=1)) == 896


def full_pool_engine(setup: Setup) -> Engine:
    """An engine whose free blocks are cached, all but a few that the last request filled or freed last."""
    engine = Engine(setup)
    for seed in range(1000, 1010):
        engine.serve(tokens(1500, seed))
    assert num_uncached_free_blocks(engine.pool) <= 20
    return engine


@pytest.mark.parametrize("chunk", [2048, 600, 400], ids="chunk{}".format)
def test_second_divergence_keeps_its_tail_for_the_third(chunk):
    engine = full_pool_engine(Setup(num_blocks=200, max_num_batched_tokens=chunk))
    shared = tokens(1000, seed=0)
    hits = [engine.serve(shared + tokens(500, seed)) for seed in (1, 2, 3, 4)]
    # The first leaves no tail at 896; the second finds the history's prefix and keeps one.
    assert hits == [0, 0, 896, 896]


def test_released_blocks_lose_their_hash_when_the_pool_is_full():
    engine = full_pool_engine(Setup(num_blocks=200, max_num_batched_tokens=256))
    request = engine.add(tokens(1500, seed=0), max_tokens=300)
    engine.run()
    cached = {
        number
        for number, block_hash in enumerate(request.block_hashes)
        if engine.pool.get_cached_block(block_hash, engine.band_groups)
    }
    # The sink, the tail of the prompt's last boundary (1,408) and what was held up to the last one (1,792).
    assert cached == {*range(4), *range(56, 88), *range(96, 112)}


def test_released_blocks_keep_their_hash_while_others_use_them():
    engine = full_pool_engine(Setup(num_blocks=200, max_num_batched_tokens=512))
    engine.chunk_limit = 256
    shared = tokens(1000, seed=0)
    first = engine.add(shared + tokens(1000, seed=1), max_tokens=2)
    while first.num_computed_tokens < 1024:
        engine.step()
    second = engine.add(shared + tokens(300, seed=2), max_tokens=20)
    engine.run()
    assert engine.hits[second.request_id] == 896
    assert engine.serve(shared + tokens(30, seed=3)) == 896


def test_released_blocks_keep_their_hash_while_the_pool_has_room():
    engine = Engine(Setup(num_blocks=1000, max_num_batched_tokens=256))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    for length in (600, 900, 1200):
        assert engine.serve(prompt[:length] + tokens(100, seed=length)) == length // 128 * 128


@pytest.mark.parametrize("missing", [0, 3, 72, 80, 87], ids="block{}".format)
def test_hit_is_never_longer_than_its_sink_and_tail(missing):
    engine = Engine(Setup(num_blocks=400))
    prompt = tokens(1500, seed=0)
    request = engine.add(prompt, max_tokens=2)
    engine.step()
    blocks = list(engine.manager.get_blocks(request.request_id).blocks[engine.band_groups[0]])
    engine.run()
    engine.manager.evict_blocks({blocks[missing].block_id})
    # Without a sink block only the tail can cover it (256 tokens); without a tail block, boundaries before it remain.
    expected = {0: 0, 3: 0, 72: 1152, 80: 1280, 87: 1280}[missing]
    assert engine.serve(prompt) == expected


def test_reset_and_eviction_forget_all_prefixes():
    engine = Engine(Setup(num_blocks=400))
    prompt = tokens(1500, seed=0)
    engine.serve(prompt)
    assert engine.reset_prefix_cache(with_running=False)
    assert engine.serve(prompt) == 0
    engine.manager.evict_blocks(set(range(1, 400)))
    assert engine.serve(prompt) == 0
    engine.check_idle()


# The fuzz.


class Traffic:
    """Random prompts that share prefixes as a tree: fresh ones, resends, next turns and forks of earlier ones."""

    def __init__(self, rng: random.Random, setup: Setup) -> None:
        self.rng = rng
        self.max_model_len = setup.max_model_len
        self.max_prompt = setup.max_model_len - 61
        self.earlier: list[tuple[list[int], list[int]]] = []

    def _fresh(self) -> list[int]:
        boundary = 128 * self.rng.randint(1, self.max_prompt // 128)
        length = self.rng.choice(
            [self.rng.randint(1, 80), boundary + self.rng.randint(-1, 1), self.rng.randint(1, self.max_prompt)]
        )
        return list(self.rng.randbytes(length))

    def send(self, engine: Engine) -> None:
        rng = self.rng
        kind = rng.choices(["fresh", "resend", "next turn", "fork"], [3, 2, 3, 6])[0]
        if kind == "fresh" or not self.earlier:
            prompt = self._fresh()
        else:
            earlier_prompt, earlier_sequence = rng.choice(self.earlier)
            cut = rng.randint(1, len(earlier_sequence))
            if rng.random() < 0.5:
                cut = max(1, cut // 128 * 128)
            prompt = {
                "resend": earlier_prompt,
                "next turn": earlier_sequence + list(rng.randbytes(rng.randint(1, 200))),
                "fork": earlier_sequence[:cut] + list(rng.randbytes(rng.randint(1, self.max_prompt // 3))),
            }[kind]
        prompt = prompt[: self.max_prompt]
        request = engine.add(prompt, min(rng.choice([1, 2, 10, 40, 300]), self.max_model_len - len(prompt) - 1))
        self.earlier = [*self.earlier[-11:], (prompt, request.sequence)]


def fuzz(setup: Setup, num_requests: int, seed: int, start=Engine) -> Engine:
    """Serve random traffic to its end; the engine checks every read of every step on the way."""
    rng = random.Random(seed)
    engine = start(setup)
    traffic = Traffic(rng, setup)
    chunks = [1, 17, 128, 256, 777, *[setup.max_num_batched_tokens] * 4]
    while engine.counts["requests"] < num_requests or engine.waiting or engine.running or engine.steps:
        if rng.random() < 0.3:
            for _ in range(min(rng.choice([1, 1, 2, 5]), num_requests - engine.counts["requests"])):
                traffic.send(engine)
        engine.chunk_limit = rng.choice(chunks)
        engine.step()
        event, live = rng.random(), [*engine.running, *engine.waiting]
        if event < 0.01 and live:
            engine.abort(rng.choice(live))
        elif event < 0.015:
            engine.counts["resets"] += engine.reset_prefix_cache(with_running=rng.random() < 0.3)
        elif event < 0.02:
            engine.manager.evict_blocks(set(rng.sample(range(1, setup.num_blocks), 5)))
        if engine.counts["steps"] % 100 == 0:
            engine.check_references()
    engine.check_idle()
    return engine


FUZZ_SETUPS = {
    "smallest-sync": smallest_pool(max_model_len=1024),
    "smallest-async": smallest_pool(max_model_len=1024, max_steps_in_flight=2),
    "small-sync": Setup(140, 1024),
    "small-async": Setup(140, 1024, max_steps_in_flight=2),
    "no-admission-gate": Setup(140, 1024, reserves_full_prompt=False),
    "no-caching": Setup(140, 1024, max_steps_in_flight=2, has_prefix_caching=False),
    "large": Setup(600, 1024, max_steps_in_flight=2),
    "chunks-of-8192": Setup(400, 9000, 8192, max_steps_in_flight=2),
    "sliding-window": Setup(300, 1024, 1024, max_steps_in_flight=2, full_layers=2, sliding_layers=2),
    "many-groups": Setup(800, 1024, 1024, full_layers=3, skipped_layers=1, sliding_layers=2),
    "short-band": Setup(110, 1024, sink_tokens=16, recent_tokens=48, prompt_recent_tokens=112),
    "no-sink": Setup(140, 1024, max_steps_in_flight=3, sink_tokens=0, recent_tokens=128, prompt_recent_tokens=256),
    "one-window": Setup(140, 1024, max_steps_in_flight=2, prompt_recent_tokens=256),
}


@pytest.mark.parametrize("name", FUZZ_SETUPS)
def test_fuzz_every_read_finds_its_page(name):
    setup = FUZZ_SETUPS[name]
    engine = fuzz(setup, num_requests=300, seed=0)
    counts = engine.counts
    print(name, dict(counts), engine.worker.num_reads)
    # The traffic did reach the cases that it is meant for.
    assert counts["preemptions"] > 10 or name == "large"
    assert (counts["hits"] > 50) == setup.has_prefix_caching
    assert counts["aborts"] > 0


def _no_sink_check(monkeypatch):
    blocks_for_hit = BandGeometry.blocks_for_hit
    monkeypatch.setattr(BandGeometry, "blocks_for_hit", lambda self, n: (range(0), blocks_for_hit(self, n)[1]))


def _free_one_block_early(monkeypatch):
    remove = BandManager.remove_skipped_blocks
    monkeypatch.setattr(BandManager, "remove_skipped_blocks", lambda self, id, n, p=None: remove(self, id, n + 144, p))


def _prompt_keeps_the_short_window_only(monkeypatch):
    remove = BandManager.remove_skipped_blocks
    monkeypatch.setattr(BandManager, "remove_skipped_blocks", lambda self, id, n, p=None: remove(self, id, n, 0))


def _returned_list_is_not_updated(monkeypatch):
    allocate = BandManager.allocate_new_blocks
    monkeypatch.setattr(BandManager, "allocate_new_blocks", lambda self, *args: list(allocate(self, *args)))


@pytest.mark.parametrize(
    "break_manager",
    [_no_sink_check, _free_one_block_early, _prompt_keeps_the_short_window_only, _returned_list_is_not_updated],
)
def test_fuzz_sees_a_broken_manager(monkeypatch, break_manager):
    break_manager(monkeypatch)
    with pytest.raises(AssertionError, match=r"missing or foreign|band block 0"):
        fuzz(FUZZ_SETUPS["small-sync"], num_requests=300, seed=0)
