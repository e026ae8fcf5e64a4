"""The prefix trie against the plain dictionary of prefix_model.py, and against examples worked out by hand."""

import math
import threading
import tracemalloc

import numpy as np
import pytest
from prefix_model import PlainTrie, random_logprobs, random_sequence

from vllm_novakv.prefix.estimator import Branch
from vllm_novakv.prefix.node import NODE_BYTES
from vllm_novakv.prefix.snapshot import MAGIC, load_trie, save_trie
from vllm_novakv.prefix.trie import Trie

CASES = [
    pytest.param(vocab_size, with_logprobs, id=f"vocab{vocab_size}-{'logprobs' if with_logprobs else 'counts'}")
    for vocab_size in (2, 3, 50)
    for with_logprobs in (False, True)
]


def stored_weights(trie):
    view = trie.view()
    return {tuple(view.sequence(i).tolist()): int(view.own_weight[i]) for i in view.ends}


def filled(vocab_size, with_logprobs, seed, num_sequences=40):
    """The same random sequences in both forms, some evicted again."""
    source = np.random.default_rng(seed)
    trie, plain = Trie(vocab_size), PlainTrie(vocab_size)
    for number in range(num_sequences):
        sequence = random_sequence(source, vocab_size)
        logprobs = random_logprobs(source, sequence) if with_logprobs else None
        trie.insert(sequence, logprobs, payload=number)
        plain.insert(sequence, logprobs, payload=number)
        if source.random() < 0.25:
            victim = sorted(plain.weight)[source.integers(len(plain.weight))]
            assert trie.evict(victim) == plain.payload[victim]
            plain.evict(victim)
    return trie, plain, source


@pytest.mark.parametrize(("vocab_size", "with_logprobs"), CASES)
def test_lookup_equals_brute_force(vocab_size, with_logprobs):
    for seed in range(8):
        trie, plain, source = filled(vocab_size, with_logprobs, seed)
        assert stored_weights(trie) == plain.weight
        for _ in range(60):
            query = random_sequence(source, vocab_size, max_tokens=12)
            match = trie.match(query)
            assert match.num_tokens == plain.match_tokens(query)
            common = query[: match.num_tokens]
            assert match.shared_information_bits == pytest.approx(plain.information_bits(common), abs=1e-6)
            if common:
                assert match.payload in {p for s, p in plain.payload.items() if s[: len(common)] == common}
            ancestors = [n for n in range(1, len(query) + 1) if query[:n] in plain.weight]
            assert match.ancestor_tokens == max(ancestors, default=0)
            assert match.ancestor_payload == plain.payload.get(query[: match.ancestor_tokens])


@pytest.mark.parametrize(("vocab_size", "with_logprobs"), CASES)
def test_probabilities_equal_brute_force(vocab_size, with_logprobs):
    for seed in range(8):
        trie, plain, source = filled(vocab_size, with_logprobs, seed)
        for _ in range(40):
            first, second = random_sequence(source, vocab_size), random_sequence(source, vocab_size)
            expected = plain.information_bits(first)
            assert trie.information_bits(first) == pytest.approx(expected, rel=1e-6, abs=1e-6)
            common = [i for i in range(min(len(first), len(second))) if first[: i + 1] == second[: i + 1]]
            shared = plain.information_bits(first[: len(common)])
            assert trie.shared_information_bits(first, second) == pytest.approx(shared, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("vocab_size", "with_logprobs"), CASES)
def test_continuations_sum_to_one(vocab_size, with_logprobs):
    for seed in range(8):
        trie, plain, _ = filled(vocab_size, with_logprobs, seed)
        for prefix in [(), (0, 1, 0, 1, 0, 1), *plain.prefixes()]:
            result = trie.continuations(prefix)
            total = sum(result.seen.values()) + result.num_unseen * result.unseen_probability
            assert total == pytest.approx(1.0, abs=1e-9)
            seen, unseen = plain.continuations(prefix)
            assert result.seen == pytest.approx(seen, abs=1e-6)
            assert result.unseen_probability == pytest.approx(unseen, abs=1e-6)


@pytest.mark.parametrize(("vocab_size", "with_logprobs"), CASES)
@pytest.mark.parametrize("epsilon", [0.3, 0.02, 1e-4])
def test_pruning_equals_brute_force(vocab_size, with_logprobs, epsilon):
    for seed in range(8):
        trie, plain, _ = filled(vocab_size, with_logprobs, seed)
        expected = plain.pruned(epsilon)
        trie.prune(epsilon)
        assert stored_weights(trie) == expected
        view = trie.view()
        if vocab_size == 50:  # where every token followed a prefix, a cut brings an escape back
            assert all(view.information_bits <= -math.log2(epsilon) + 1e-6)
            assert trie.prune(epsilon) == ()
            assert stored_weights(trie) == expected
        assert trie.num_sequences == len(expected)
        assert trie.num_tokens == sum(len(edge) // 4 for edge in view.tokens)


@pytest.mark.parametrize("with_logprobs", [False, True], ids=["counts", "logprobs"])
def test_eviction_leaves_nothing_behind(with_logprobs):
    trie, plain, _ = filled(5, with_logprobs, seed=3)
    for sequence in sorted(plain.weight):
        trie.evict(sequence)
    assert (trie.num_sequences, trie.num_tokens, trie.num_nodes) == (0, 0, 1)
    assert trie.memory_bytes == NODE_BYTES
    assert trie.view().weight.tolist() == [0]
    root = trie.continuations(())
    assert root.seen == {}
    assert root.unseen_probability == 1 / 5


def test_evicted_branch_is_compressed_again():
    trie = Trie(100)
    trie.insert([1, 2, 3, 4])
    trie.insert([1, 2, 7])
    assert trie.num_nodes == 4  # root, (1 2), (3 4), (7)
    trie.evict([1, 2, 7])
    assert (trie.num_nodes, trie.num_tokens) == (2, 4)
    with pytest.raises(KeyError, match="not stored"):
        trie.evict([1, 2])


def test_worked_example_with_counts():
    trie = Trie(4)
    trie.insert([1, 2], payload="a")
    trie.insert([1, 3], payload="b")
    # 1 was seen twice: (2 - 1/2)/2; then 2 and 3 once each: (1 - 1/2)/2
    assert 2 ** -trie.information_bits([1]) == pytest.approx(3 / 4)
    assert 2 ** -trie.information_bits([1, 2]) == pytest.approx(3 / 16)
    # the escape after 1 is 2/(2 * 2), shared by the tokens 0 and 1
    assert 2 ** -trie.information_bits([1, 0]) == pytest.approx(3 / 4 * 1 / 4)
    # at the root it is 1/(2 * 2), shared by 0, 2 and 3; then nothing is known: 1/4
    assert 2 ** -trie.information_bits([0, 3]) == pytest.approx(1 / 12 / 4)
    match = trie.match([1, 3, 2])
    assert (match.num_tokens, match.payload, match.ancestor_tokens) == (2, "b", 2)
    assert trie.shared_information_bits([1, 2], [1, 3]) == pytest.approx(math.log2(4 / 3))


def test_worked_example_with_recorded_probabilities():
    trie = Trie(10)
    trie.insert([7, 8], logprobs=[math.log(0.6), math.log(0.5)])
    trie.insert([9])
    assert 2 ** -trie.information_bits([7, 8]) == pytest.approx(0.3)
    # 0.4 is left at the root: 9 gets (1 - 1/2)/1 of it, the eight unseen tokens share the rest
    assert 2 ** -trie.information_bits([9]) == pytest.approx(0.2)
    assert trie.continuations([]).unseen_probability == pytest.approx(0.2 / 8)
    # a later insertion fills in what was unknown, and changes nothing that was known
    trie.insert([9], logprobs=[math.log(0.1)])
    trie.insert([7], logprobs=[math.log(0.9)])
    assert 2 ** -trie.information_bits([9]) == pytest.approx(0.1)
    assert 2 ** -trie.information_bits([7]) == pytest.approx(0.6)


def test_estimator_worked_example():
    counts = Branch(0.0, 0, 4, 2, 10)
    assert (counts.counted_probability(3), counts.counted_probability(1)) == (2.5 / 4, 0.5 / 4)
    assert counts.unseen_probability * 8 == pytest.approx(1 / 4)
    mixed = Branch(0.6, 1, 1, 1, 10)
    assert mixed.counted_probability(1) == pytest.approx(0.2)
    assert mixed.unseen_probability * 8 == pytest.approx(0.2)


def test_payload_is_replaced_and_returned():
    trie = Trie(10)
    assert trie.insert([1, 2, 3], payload="old").num_new_tokens == 3
    result = trie.insert([1, 2, 3], payload="new")
    assert (result.num_new_tokens, result.evicted_payloads) == (0, ("old",))
    assert trie.match([1, 2, 3, 4]).payload == "new"
    assert trie.insert([1, 2, 5]).num_new_tokens == 1


@pytest.mark.parametrize("with_logprobs", [False, True], ids=["counts", "logprobs"])
def test_cap_is_never_exceeded_and_the_oldest_go_first(with_logprobs):
    source = np.random.default_rng(0)
    trie = Trie(1000, max_bytes=40_000)
    recent = []
    for number in range(300):
        sequence = source.integers(0, 1000, size=source.integers(10, 200))
        sequence[:3] = source.integers(0, 2, size=3)
        logprobs = -source.random(len(sequence)) if with_logprobs else None
        result = trie.insert(sequence, logprobs, payload=number)
        assert trie.memory_bytes <= 40_000
        recent.append(number)
        for payload in result.evicted_payloads:
            assert payload == recent.pop(0)
    assert 5 < trie.num_sequences < 300


def test_memory_charged_is_not_less_than_memory_used():
    source = np.random.default_rng(1)
    sequences = [source.integers(0, 50_000, size=40).astype(np.uint32) for _ in range(5_000)]
    tracemalloc.start()
    trie = Trie(50_000)
    for sequence in sequences:
        trie.insert(sequence)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= trie.memory_bytes <= 3 * used


def test_ten_million_tokens_stay_under_the_cap():
    source = np.random.default_rng(2)
    prompts = source.integers(0, 50_000, size=(20, 1_000)).astype(np.uint32)
    trie = Trie(50_000, max_bytes=8 << 20)
    tracemalloc.start()
    inserted = 0
    while inserted < 10_000_000:
        sequence = np.concatenate([prompts[source.integers(20)], source.integers(0, 50_000, size=2_000)])
        trie.insert(sequence)
        inserted += len(sequence)
        assert trie.memory_bytes <= trie.max_bytes
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < trie.max_bytes
    assert peak < trie.max_bytes + (1 << 20)
    assert trie.num_tokens > 1_000_000


@pytest.mark.parametrize(
    ("tokens", "logprobs", "words"),
    [
        pytest.param([], None, "empty", id="empty"),
        pytest.param([3, 10], None, "vocab_size=10", id="beyond-the-vocabulary"),
        pytest.param([-1], None, "integers from 0", id="negative"),
        pytest.param(np.array([-1]), None, "vocab_size=10", id="negative-array"),
        pytest.param([1.5], None, "integers", id="fraction"),
        pytest.param(np.zeros((2, 2), int), None, "one row", id="matrix"),
        pytest.param([1, 2], [-1.0], "one per token", id="too-few-logprobs"),
        pytest.param([1], [0.5], "natural logarithms", id="positive-logprob"),
        pytest.param([1], [-math.inf], "natural logarithms", id="impossible-token"),
        pytest.param([1] * 100_000, None, "max_bytes", id="too-long"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(tokens, logprobs, words):
    trie = Trie(10, max_bytes=100_000)
    trie.insert([1, 2])
    with pytest.raises(ValueError, match=words):
        trie.insert(tokens, logprobs)
    assert stored_weights(trie) == {(1, 2): 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1, 1 << 20), "vocab_size=1"), ((10, 100), "max_bytes=100")],
    ids=["vocabulary", "memory"],
)
def test_bad_settings_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Trie(*arguments)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1.5, math.nan])
def test_bad_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        Trie(10).prune(epsilon)


def test_pruned_prefix_outlives_older_sequences():
    trie = Trie(100)
    log_half = math.log(0.5)
    trie.insert([1], [2 * log_half], payload="old prefix")
    trie.insert([2], [2 * log_half], payload="older than the cut sequence")
    trie.insert([1, 5], [2 * log_half, 9 * log_half], payload="cut")
    assert trie.prune(0.2) == ("cut",)
    trie.max_bytes = trie.memory_bytes
    assert trie.insert([7]).evicted_payloads[0] == "older than the cut sequence"


def test_joining_edges_never_costs_memory():
    trie = Trie(100)
    head = [1] * 5_000
    trie.insert([*head, 2, 3], [None] * 5_000 + [-1.0, -1.0])
    trie.insert([*head, 4])
    before = trie.memory_bytes
    trie.evict([*head, 4])
    assert trie.memory_bytes < before
    assert trie.match([*head, 2, 3]).num_tokens == 5_002
    assert trie.information_bits([*head, 2, 3]) - trie.information_bits(head) == pytest.approx(2 / math.log(2))


def test_deep_chains_need_no_recursion():
    trie = Trie(3)
    for length in range(1, 1_200):
        trie.insert([1] * length)
    assert trie.match([1] * 5_000).num_tokens == 1_199
    assert trie.num_tokens == 1_199
    trie.view()
    trie.prune(0.5)
    assert trie.num_sequences == len(stored_weights(trie))


@pytest.mark.parametrize("with_logprobs", [False, True], ids=["counts", "logprobs"])
def test_snapshot_restores_everything(tmp_path, with_logprobs):
    trie, plain, source = filled(6, with_logprobs, seed=5)
    path = tmp_path / "trie.bin"
    save_trie(trie, path)
    loaded = load_trie(path)
    assert stored_weights(loaded) == plain.weight
    assert (loaded.memory_bytes, loaded.num_nodes, loaded.num_tokens) == (
        trie.memory_bytes,
        trie.num_nodes,
        trie.num_tokens,
    )
    for _ in range(50):
        query = random_sequence(source, 6)
        assert loaded.match(query).payload == trie.match(query).payload
        assert loaded.information_bits(query) == pytest.approx(trie.information_bits(query), abs=1e-9)
    # the order of insertion too: both evict the same sequences from here on
    for target in (trie, loaded):
        target.max_bytes = target.memory_bytes
    for _ in range(20):
        sequence = random_sequence(source, 6, max_tokens=20)
        assert trie.insert(sequence).evicted_payloads == loaded.insert(sequence).evicted_payloads
    assert stored_weights(trie) == stored_weights(loaded)


def test_snapshot_of_an_empty_trie(tmp_path):
    path = tmp_path / "trie.bin"
    save_trie(Trie(10), path)
    assert load_trie(path).num_sequences == 0


def test_damaged_snapshot_is_refused(tmp_path):
    trie, _, source = filled(6, True, seed=5)
    path = tmp_path / "trie.bin"
    save_trie(trie, path)
    content = path.read_bytes()
    damaged = [b"", MAGIC, b"something else", content[:-1], content[: len(content) // 2], content + b"x"]
    for _ in range(60):
        changed = bytearray(content)
        changed[source.integers(len(changed))] ^= 1 << int(source.integers(8))
        damaged.append(bytes(changed))
    for variant in damaged:
        path.write_bytes(variant)
        with pytest.raises(ValueError, match="delete it"):
            load_trie(path)


def test_snapshot_of_foreign_objects_is_refused(tmp_path):
    trie = Trie(10)
    trie.insert([1], payload=object())
    with pytest.raises(ValueError, match="JSON"):
        save_trie(trie, tmp_path / "trie.bin")
    assert list(tmp_path.iterdir()) == []


def test_readers_see_whole_states_beside_a_writer():
    """Every stored sequence is [k, k, ..., k]; a reader must find all of one or nothing."""
    trie = Trie(64, max_bytes=1 << 20)
    stop = threading.Event()
    problems = []

    def read():
        source = np.random.default_rng(threading.get_ident() % 1000)
        while not stop.is_set():
            token = int(source.integers(64))
            match = trie.match([token] * 40)
            if match.num_tokens not in (0, 40) or (match.num_tokens and match.payload != token):
                problems.append(match)
            continuations = trie.continuations([])
            total = sum(continuations.seen.values()) + continuations.num_unseen * continuations.unseen_probability
            if abs(total - 1) > 1e-9:
                problems.append(total)
            view = trie.view()
            if view.weight[0] != view.own_weight.sum():
                problems.append("weights")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    source = np.random.default_rng(0)
    for _ in range(1_500):
        token = int(source.integers(64))
        if trie.match([token] * 40).num_tokens and source.random() < 0.5:
            trie.evict([token] * 40)
        else:
            trie.insert([token] * 40, payload=token)
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []
