"""Clusters and their storage against all pairs of the plain dictionary, and against examples worked out by hand."""

import itertools
import math

import numpy as np
import pytest
from prefix_model import PlainTrie, common_prefix, random_logprobs, random_sequence

from vllm_novakv.prefix.clusters import cluster_storage, definition3_cluster, information_clusters, saving
from vllm_novakv.prefix.trie import Trie

THRESHOLDS = [0.4, 1.7, 3.1, 6.3]


def random_case(seed, vocab_size=4, num_sequences=14):
    source = np.random.default_rng(seed)
    trie, plain = Trie(vocab_size), PlainTrie(vocab_size)
    for _ in range(num_sequences):
        sequence = random_sequence(source, vocab_size, max_tokens=6)
        logprobs = random_logprobs(source, sequence)
        trie.insert(sequence, logprobs)
        plain.insert(sequence, logprobs)
    view = trie.view()
    names = {int(end): tuple(view.sequence(end).tolist()) for end in view.ends}
    return view, plain, names


def shared_bits(plain, first, second):
    return plain.information_bits(common_prefix(first, second))


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_clusters_equal_brute_force(threshold):
    for seed in range(12):
        view, plain, names = random_case(seed)
        clusters = information_clusters(view, threshold)
        assert sorted(end for cluster in clusters for end in cluster.members) == sorted(names)
        cluster_of = {names[end]: number for number, cluster in enumerate(clusters) for end in cluster.members}
        for first, second in itertools.combinations(names.values(), 2):
            together = shared_bits(plain, first, second) >= threshold - 1e-6
            assert (cluster_of[first] == cluster_of[second]) == together
        for cluster in clusters:
            members = [names[end] for end in cluster.members]
            least = min(plain.information_bits(member) for member in members)
            assert plain.information_bits(names[cluster.centroid]) == pytest.approx(least, abs=1e-6)
            shared = members[0]
            for member in members:
                shared = common_prefix(shared, member)
            assert cluster.shared_tokens == len(shared)
            assert cluster.shared_information_bits == pytest.approx(plain.information_bits(shared), abs=1e-6)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_definition_3_equals_brute_force(threshold):
    for seed in range(12):
        view, plain, names = random_case(seed, num_sequences=7)
        result = definition3_cluster(view, threshold)

        def fits(chosen, plain=plain):
            pairs = itertools.combinations(chosen, 2)
            return all(shared_bits(plain, first, second) <= threshold + 1e-6 for first, second in pairs)

        sequences = list(names.values())
        subsets = [set(chosen) for n in range(1, len(sequences) + 1) for chosen in itertools.combinations(sequences, n)]
        fitting = [chosen for chosen in subsets if fits(chosen)]
        maximal = [chosen for chosen in fitting if not any(chosen < other for other in fitting)]
        assert {names[end] for end in result.members} in maximal
        assert result.num_maximal_sets == len(maximal)
        least = min(plain.information_bits(names[end]) for end in result.members)
        assert plain.information_bits(names[result.centroid]) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("block_tokens", [1, 2, 3])
def test_storage_equals_brute_force(block_tokens):
    for seed in range(12):
        view, plain, names = random_case(seed)
        clusters = information_clusters(view, 0.7)
        for cluster in clusters:
            centroid = names[cluster.centroid]
            storage = cluster_storage(view, cluster, block_tokens, block_bytes=10)
            members = [names[end] for end in cluster.members]
            others = [(len(member), len(common_prefix(member, centroid))) for member in members if member != centroid]
            assert storage.num_sessions == sum(plain.weight[member] for member in members)
            assert storage.independent_tokens == sum(plain.weight[member] * len(member) for member in members)
            assert storage.relative_tokens == len(centroid) + sum(length - common for length, common in others)
            union = {member[:length] for member in members for length in range(1, len(member) + 1)}
            assert storage.trie_tokens == len(union)
            blocks = math.ceil(len(centroid) / block_tokens)
            blocks += sum(math.ceil(length / block_tokens) - common // block_tokens for length, common in others)
            assert storage.relative_blocks == blocks
            assert storage.relative_bytes == 10 * blocks
        result = saving(view, clusters)
        independent = sum(weight * len(sequence) for sequence, weight in plain.weight.items())
        stored = sum(cluster_storage(view, cluster, 1, 1).relative_tokens for cluster in clusters)
        assert result.measured == pytest.approx(1 - stored / independent)


def test_worked_example():
    trie = Trie(100)
    log_half = math.log(0.5)
    trie.insert([1, 2, 3], [log_half, 3 * log_half, log_half])
    trie.insert([1, 2, 4], [log_half, 3 * log_half, 2 * log_half])
    trie.insert([5, 6], [3 * log_half, 6 * log_half])
    view = trie.view()
    names = {int(end): tuple(view.sequence(end).tolist()) for end in view.ends}

    def sets(threshold):
        return [{names[end] for end in cluster.members} for cluster in information_clusters(view, threshold)]

    # [1, 2] carries 1 + 3 = 4 bits, [5, 6] carries 9
    assert sets(4.0) == [{(1, 2, 3), (1, 2, 4)}, {(5, 6)}]
    assert sets(4.5) == [{(1, 2, 3)}, {(1, 2, 4)}, {(5, 6)}]
    pair = information_clusters(view, 4.0)[0]
    assert names[pair.centroid] == (1, 2, 3)
    assert (pair.shared_tokens, pair.shared_information_bits) == (2, pytest.approx(4.0))

    storage = cluster_storage(view, pair, block_tokens=2, block_bytes=100)
    assert (storage.independent_tokens, storage.relative_tokens, storage.trie_tokens) == (6, 4, 4)
    assert (storage.independent_blocks, storage.relative_blocks, storage.relative_bytes) == (4, 3, 300)

    # two of three sessions, tails 0 and 1, 8 tokens in all: 2/3 (1 - (1/2)/(8/3)); stored are 4 + 2 of 8
    result = saving(view, information_clusters(view, 4.0))
    assert result.predicted == pytest.approx(2 / 3 * (1 - 0.5 / (8 / 3)))
    assert result.measured == pytest.approx(1 / 4)

    # as written: pairs may share at most 3 bits, so [1, 2, 3] and [1, 2, 4] exclude each other
    written = definition3_cluster(view, 3.0)
    assert {names[end] for end in written.members} == {(1, 2, 3), (5, 6)}
    assert written.num_maximal_sets == 2
    assert definition3_cluster(view, 4.1).num_maximal_sets == 1


def test_corollary_3_holds_where_its_assumptions_do():
    """Many sessions of one length behind one prompt: prediction and measurement differ by the centroid's full copy."""
    trie = Trie(1 << 20)
    prompt = list(range(900))
    for session in range(200):
        trie.insert([*prompt, *range(1000 + 100 * session, 1100 + 100 * session)])
    view = trie.view()
    result = saving(view, information_clusters(view, 1.0))
    assert result.covered == 1.0
    assert result.predicted == pytest.approx(0.9, abs=0.001)
    assert result.predicted - result.measured == pytest.approx(1 / 200, rel=0.1)


def test_bad_arguments_are_refused():
    view = Trie(10).view()
    assert information_clusters(view, 1.0) == []
    with pytest.raises(ValueError, match="min_shared_bits=0"):
        information_clusters(view, 0)
    with pytest.raises(ValueError, match="no sequence"):
        definition3_cluster(view, 1.0)
    with pytest.raises(ValueError, match="max_distance_bits=nan"):
        definition3_cluster(view, math.nan)
    with pytest.raises(ValueError, match="insert sequences first"):
        saving(view, [])
