"""Pages, pins' arithmetic, shadow replay and statistics of the served index: by hand and against the definition."""

import itertools
import json
import random

import pytest

from vllm_novakv.prefix.observer import Observer, hottest, open_trie
from vllm_novakv.prefix.pages import PageGroup, PageMap
from vllm_novakv.prefix.pins import Pin, PinTable
from vllm_novakv.prefix.policy import make_policy
from vllm_novakv.prefix.served import Arrival, ServedIndex
from vllm_novakv.prefix.shadow import ShadowLRU
from vllm_novakv.prefix.status import read_statuses, status_file
from vllm_novakv.prefix.trie import Trie

HISTORY, BAND, SLIDING = PageGroup(128), PageGroup(16, 512, 64), PageGroup(16, 128)
PAGES = PageMap((HISTORY, BAND), chunk_tokens=128, hash_tokens=16)


def hashes(tokens: list[int]) -> list[bytes]:
    """One name per 16 tokens, of all tokens up to there."""
    return [bytes(tokens[:end]) for end in range(16, len(tokens) + 1, 16)]


# Pages.


@pytest.mark.parametrize(
    ("group", "num_tokens", "expected"),
    [
        (HISTORY, 384, [2, 1, 0]),
        (PageGroup(16, 64, 32), 256, [15, 14, 13, 12, 1, 0]),
        (BAND, 128, [7, 6, 5, 4, 3, 2, 1, 0]),
        (SLIDING, 256, [15, 14, 13, 12, 11, 10, 9, 8]),
        # the window begins inside the sink
        (BAND, 544, [*range(33, -1, -1)]),
    ],
)
def test_blocks_for_hit(group, num_tokens, expected):
    assert list(group.blocks_for_hit(num_tokens)) == expected


def test_chunk_is_named_by_the_hash_at_its_end():
    names = hashes(list(range(200)))
    assert PAGES.chunk_keys(names, 200) == (bytes(range(128)),)
    assert PAGES.page_hash(names, (0, 0)) == PAGES.page_hash(names, (1, 7)) == bytes(range(128))
    assert PAGES.page_hash(names, (1, 2)) == bytes(range(48))


# The shadow.


@pytest.mark.parametrize("groups", [(HISTORY, BAND), (HISTORY, BAND, SLIDING), (HISTORY,)], ids=len)
def test_shadow_hit_is_the_longest_that_has_all_its_pages(groups):
    pages = PageMap(groups, chunk_tokens=128, hash_tokens=16)
    rng = random.Random(0)
    num_hits = 0
    for _ in range(300):
        shadow = ShadowLRU(pages)
        names = hashes(list(rng.randbytes(rng.randint(1, 1500))))
        for boundary in rng.sample(range(128, 1537, 128), 3):
            if boundary <= len(names) * 16:
                for page in pages.pages_for_hit(boundary):
                    shadow._cached[page[0], pages.page_hash(names, page)] = None
        for name in [name for name in shadow._cached if rng.random() < 0.01]:
            del shadow._cached[name]
        limit = rng.randint(0, len(names) * 16)
        expected = max(
            boundary
            for boundary in range(0, limit + 1, 128)
            if all((page[0], pages.page_hash(names, page)) in shadow._cached for page in pages.pages_for_hit(boundary))
        )
        assert shadow.hit_tokens(names, limit) == expected
        num_hits += expected > 0
    assert num_hits > 50


def test_shadow_forgets_what_was_used_longest_ago():
    shadow = ShadowLRU(PAGES)
    rng = random.Random(1)
    prompts = [hashes(list(rng.randbytes(300))) for _ in range(3)]
    # a prompt of 300 tokens leaves 2 blocks of history and 16 of the band
    for prompt in prompts[:2]:
        shadow.served(prompt, 300, 300, 40)
    shadow.served(prompts[0], 300, 300, 40)
    shadow.served(prompts[2], 300, 300, 40)
    assert len(shadow) == 40
    assert [shadow.hit_tokens(prompt, 299) for prompt in prompts] == [256, 0, 256]


# Chunks that share blocks.


def test_page_stays_while_another_chunk_needs_it():
    index = ServedIndex(make_policy("lru"), PAGES, PinTable(PAGES, [], 0), clock=itertools.count().__next__)
    shared = list(range(50))
    first, second = hashes([*shared, *range(100, 200)]), hashes([*shared, *range(200, 250), *range(50)])
    for name, names in (("first", first), ("second", second)):
        index.arrived(Arrival(name, names, None, 150))
        index.admitted(name, 0)
    for name in ("first", "second"):
        index.ended(name, 1, 150, 100)
    # three blocks of 16 tokens lie in both chunks
    assert index.evict(1) == [(None, None, None, *first[3:8])]
    assert index.is_wanted(second[0])
    assert not index.is_wanted(first[3])
    assert index.evict(1) == [tuple(second[:8])]
    assert not index.is_wanted(second[0])
    assert index.evict(1) == []


# Statistics.


def observed(tmp_path, snapshot=None, vocab_size=300):
    pins = PinTable(PAGES, [Pin("system", tuple(range(128)))], 100)
    index = ServedIndex(make_policy("gdsf"), PAGES, pins, clock=itertools.count().__next__)
    return index, Observer(index, vocab_size, 1 << 20, status_file(tmp_path, 0), snapshot, "gdsf")


def serve(index: ServedIndex, number: int, prompt: list[int]) -> None:
    index.arrived(Arrival(str(number), hashes(prompt), prompt, len(prompt)))
    index.admitted(str(number), 0)
    index.ended(str(number), len(prompt) // 128, len(prompt), 100)


def test_figures_and_snapshot_of_a_run(tmp_path):
    snapshot = tmp_path / "deep" / "prompts.trie"
    index, observer = observed(tmp_path, snapshot)
    for number in range(3):
        serve(index, number, [*range(200), number])
        serve(index, 10 + number, [7] * 129)
    observer.update()
    status = read_statuses(tmp_path)["0"]
    assert status == json.loads(json.dumps(observer.status())) | {"time_s": status["time_s"]}
    assert (status["requests"], status["prompt_tokens"], status["pinned_blocks"]) == (6, 603 + 387, 9)
    assert status["pins"] == [{"name": "system", "tokens": 128, "is_bound": True}]
    assert status["index"] | {"bytes": 0, "nodes": 0} == {
        "sequences": 4,
        "tokens": 203 + 129,
        "skipped": 0,
        "bytes": 0,
        "nodes": 0,
    }
    assert [(entry["tokens"], entry["requests"]) for entry in status["hottest"]] == [(200, 3), (129, 3)]
    assert status["clusters"]["count"] == 2
    serve(index, 3, [7] * 200)
    observer.close()
    observer.close()
    assert not read_statuses(tmp_path)
    # a prompt that came after the last look is in the snapshot too; nothing else than prompts is
    restored = observed(tmp_path, snapshot)[1].trie
    assert restored.num_sequences == 5
    assert restored.match([*range(200), 2]).num_tokens == 201


def test_observer_skips_what_is_no_token(tmp_path):
    index, observer = observed(tmp_path, vocab_size=100)
    serve(index, 0, [1] * 130)
    serve(index, 1, [1] * 130 + [250])
    observer.update()
    assert observer.status()["index"]["skipped"] == 1
    assert observer.trie.num_sequences == 1


def test_snapshot_is_written_now_and_then(tmp_path):
    snapshot = tmp_path / "prompts.trie"
    index, observer = observed(tmp_path, snapshot)
    serve(index, 0, [1] * 130)
    observer.update()
    assert not snapshot.exists()
    observer._next_save_s = 0.0
    observer.update()
    assert open_trie(snapshot, 300, 1 << 20).num_sequences == 1


def test_thread_writes_figures_until_closed(tmp_path):
    _, observer = observed(tmp_path)
    observer.start()
    for _ in range(500):
        if read_statuses(tmp_path):
            break
        observer._stop.wait(0.01)
    assert read_statuses(tmp_path)["0"]["policy"] == "gdsf"
    observer.close()
    assert not observer._thread.is_alive()


@pytest.mark.parametrize("content", [b"", b"novakv-trie\n", b"something else" * 100])
def test_damaged_snapshot_is_refused(tmp_path, content):
    path = tmp_path / "prompts.trie"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a usable prefix snapshot.*delete it"):
        open_trie(path, 300, 1 << 20)


def test_snapshot_of_another_vocabulary_is_refused(tmp_path):
    snapshot = tmp_path / "prompts.trie"
    index, observer = observed(tmp_path, snapshot)
    serve(index, 0, [1] * 130)
    observer.close()
    with pytest.raises(ValueError, match="knows 300 tokens, the model 500"):
        open_trie(snapshot, 500, 1 << 20)


def test_hottest_prefixes_do_not_contain_each_other():
    trie = Trie(vocab_size=1000)
    system, tools = [1] * 200, [2] * 300
    for number in range(10):
        trie.insert([*system, *tools, number])
    for number in range(50):
        trie.insert([*system, 500 + number])
    trie.insert([3] * 900)
    found = hottest(trie.view(), min_tokens=128)
    # 59 * 200 saved tokens by the system prompt, 9 * 500 with the tools
    assert [(entry["tokens"], entry["requests"]) for entry in found] == [(200, 60)]
    assert found[0]["first_tokens"] == [1] * 48
    assert hottest(trie.view(), min_tokens=300)[0]["tokens"] == 500
