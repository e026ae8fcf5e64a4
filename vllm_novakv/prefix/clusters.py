"""Groups of stored sequences by the information they share, and what storing each group relative to one member saves.

d_T(s, s′) = −log2 P(s ∧ s′) is the information, in bits, of the longest common prefix. What it tells: how much a second
sequence repeats a first one, measured by how surprising the repeated part is; a long common prefix of predictable text
can carry less than a short one of rare tokens. What it does not tell: how many tokens or bytes are shared (that is the
length of the prefix, given here beside it), nor anything about what follows the first difference: two texts of the same
meaning that differ in their first token share nothing, and their keys and values are stored twice. Keys and values of a
common prefix are equal whatever its probability, so a prefix cache needs no threshold; the threshold decides only which
groups are worth looking at.

Source: arXiv:2604.15356, sections 4.2 and 4.3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.trie import ROUNDING_BITS
from vllm_novakv.prefix.view import TrieView


@dataclass(frozen=True)
class Cluster:
    """Sequences that share a prefix of enough information.

    Attributes:
        members: indices of their end nodes in the view, ascending.
        centroid: the most probable member (the first of equals).
        shared_tokens: length of the longest prefix that all members have.
        shared_information_bits: −log2 P of that prefix.
    """

    members: tuple[int, ...]
    centroid: int
    shared_tokens: int
    shared_information_bits: float


@dataclass(frozen=True)
class Definition3Cluster:
    """One of the largest possible sets of sequences whose pairs share at most a given information.

    Attributes:
        members: indices of their end nodes in the view, ascending.
        centroid: the most probable member.
        num_maximal_sets: how many sets fit the definition equally well.
    """

    members: tuple[int, ...]
    centroid: int
    num_maximal_sets: int


@dataclass(frozen=True)
class ClusterStorage:
    """What the sequences of a cluster store, a session being one insertion of a sequence.

    Attributes:
        num_sessions: insertions of the members.
        independent_tokens: tokens if every session stored its own cache.
        relative_tokens: tokens of the centroid, plus those of every other member after its first difference from it.
        trie_tokens: tokens of the union of all members, as a block cache that shares every common prefix stores them.
        independent_blocks, relative_blocks: the same in blocks; only whole blocks are shared.
        independent_bytes, relative_bytes: the same in bytes.
        mean_tail_tokens: mean over the sessions of what follows the first difference from the centroid; 0 for the
            centroid and for repeated sessions.
    """

    num_sessions: int
    independent_tokens: int
    relative_tokens: int
    trie_tokens: int
    independent_blocks: int
    relative_blocks: int
    independent_bytes: int
    relative_bytes: int
    mean_tail_tokens: float


@dataclass(frozen=True)
class Saving:
    """Share of the storage that clusters save over independent caches.

    Attributes:
        predicted: f · (1 − ℓ̄ / n̄), corollary 3.
        measured: 1 − stored tokens / tokens of independent caches, over all sessions.
        covered: f, the share of the sessions that lie in clusters of at least two sessions.
        mean_tail_tokens: ℓ̄ over those sessions.
        mean_tokens: n̄ over all sessions.
    """

    predicted: float
    measured: float
    covered: float
    mean_tail_tokens: float
    mean_tokens: float


def information_clusters(view: TrieView, min_shared_bits: float) -> list[Cluster]:
    """Partition the stored sequences: two belong together if and only if they share at least τ bits.

    Sharing at least τ bits is transitive, because of two common prefixes of the same sequence one contains the other
    (2^(−d_T) is an ultrametric). So the cluster of a sequence is all that lies under the first node of its path that
    carries τ bits, and a sequence with less than τ bits is alone.

    Example: [1, 2, 3], [1, 2, 4] and [5, 6] with 4 bits at [1, 2] and 9 at [5, 6]. τ = 4 gives {[1, 2, 3], [1, 2, 4]}
    and {[5, 6]}; τ = 5 leaves each alone.

    Args:
        view: of the trie.
        min_shared_bits: τ, above 0.

    Returns:
        The clusters, those of one member included, in the order of their first members.

    Raises:
        ValueError: τ is not positive.

    Source: arXiv:2604.15356, definition 2 and section 7.3, read as shared information.
    """
    if not min_shared_bits > 0:
        raise ValueError(f"min_shared_bits={min_shared_bits} must be positive")
    return _clusters(view, view.information_bits >= min_shared_bits - ROUNDING_BITS)


def definition3_cluster(view: TrieView, max_distance_bits: float) -> Definition3Cluster:
    """A semantic prefix cluster as definition 3 has it: a maximal set with d_T(s, s′) ≤ δ for all its pairs s ≠ s′.

    As d_T grows with what is shared, the definition gathers sequences that share little. Sharing more than δ bits is
    an equivalence, so a maximal set takes exactly one sequence of each of its classes, and there are as many such sets
    as choices. This one takes the most probable sequence of each class. (If s = s′ counted as a pair, the only maximal
    set would be that of all sequences with P ≥ 2^(−δ), whatever they share.) Use `information_clusters` to find what
    can be stored together.

    Args:
        view: of the trie, with at least one sequence.
        max_distance_bits: δ, above 0.

    Raises:
        ValueError: δ is not positive, or the trie is empty.

    Source: arXiv:2604.15356, definition 3.
    """
    if not max_distance_bits > 0:
        raise ValueError(f"max_distance_bits={max_distance_bits} must be positive")
    if not len(view.ends):
        raise ValueError("the trie holds no sequence, so there is no cluster")
    classes = _clusters(view, view.information_bits > max_distance_bits + ROUNDING_BITS)
    num_sets = 1
    for group in classes:
        num_sets *= len(group.members)
    members = sorted(group.centroid for group in classes)
    return Definition3Cluster(tuple(members), _most_probable(view, members), num_sets)


def cluster_storage(view: TrieView, cluster: Cluster, block_tokens: int, block_bytes: int) -> ClusterStorage:
    """Storage of a cluster relative to its centroid: |s*| + Σ_{s ≠ s*} (|s| − |s ∧ s*|) tokens.

    Example, blocks of 4 tokens: centroid of 10 tokens, one member of 9 that has the first 6 of them. The member adds
    3 tokens; of its 3 blocks only the first is shared, so it adds 2 blocks to the centroid's 3.

    Args:
        view: of the trie.
        cluster: one of its clusters.
        block_tokens: tokens per cache block.
        block_bytes: bytes of one block, over all layers and heads.

    Raises:
        ValueError: a size is not positive.

    Source: arXiv:2604.15356, definition 4; what follows a difference is stored in full, no deltas of keys or values.
    """
    if block_tokens < 1 or block_bytes < 1:
        raise ValueError(f"block_tokens={block_tokens} and block_bytes={block_bytes} must be positive")
    common = _common_with_centroid(view, cluster)
    # [num_members] tokens
    lengths = view.depth_tokens[list(cluster.members)]
    sessions = view.own_weight[list(cluster.members)]
    is_other = np.array([member != cluster.centroid for member in cluster.members])
    tails = np.where(is_other, lengths - common, 0)
    blocks = -(-lengths // block_tokens)
    relative_blocks = np.where(is_other, blocks - common // block_tokens, blocks)
    independent_blocks = int((sessions * blocks).sum())
    return ClusterStorage(
        num_sessions=int(sessions.sum()),
        independent_tokens=int((sessions * lengths).sum()),
        relative_tokens=int(np.where(is_other, tails, lengths).sum()),
        trie_tokens=_union_tokens(view, cluster.members),
        independent_blocks=independent_blocks,
        relative_blocks=int(relative_blocks.sum()),
        independent_bytes=independent_blocks * block_bytes,
        relative_bytes=int(relative_blocks.sum()) * block_bytes,
        mean_tail_tokens=float(tails.sum() / sessions.sum()),
    )


def saving(view: TrieView, clusters: Sequence[Cluster]) -> Saving:
    """Corollary 3's prediction f · (1 − ℓ̄/n̄) beside what cluster-relative storage of the same sessions saves.

    The corollary assumes sessions of one length and leaves out the one full copy that every cluster keeps, so it
    promises too much for small clusters, and it is off where members are longer or shorter than other sessions.

    Args:
        view: of the trie.
        clusters: a partition of its sequences, as `information_clusters` returns it.

    Raises:
        ValueError: there are no clusters.

    Source: arXiv:2604.15356, corollary 3.
    """
    if not clusters:
        raise ValueError("no clusters, so nothing can be saved; insert sequences first")
    storage = [cluster_storage(view, cluster, 1, 1) for cluster in clusters]
    num_sessions = sum(part.num_sessions for part in storage)
    independent = sum(part.independent_tokens for part in storage)
    shared = [part for part in storage if part.num_sessions > 1]
    num_covered = sum(part.num_sessions for part in shared)
    tail = sum(part.mean_tail_tokens * part.num_sessions for part in shared) / max(num_covered, 1)
    mean = independent / num_sessions
    return Saving(
        predicted=num_covered / num_sessions * (1 - tail / mean),
        measured=1 - sum(part.relative_tokens for part in storage) / independent,
        covered=num_covered / num_sessions,
        mean_tail_tokens=tail,
        mean_tokens=mean,
    )


def _clusters(view: TrieView, carries_enough: NDArray[np.bool_]) -> list[Cluster]:
    """Group the ends by the first node of their path that carries enough; ends without one stay alone."""
    # parents come before children: a node's class is its parent's, or itself if it is the first to carry enough
    first = np.full(len(view.parent), -1, dtype=np.int64)
    for index in range(1, len(view.parent)):
        inherited = first[view.parent[index]]
        first[index] = inherited if inherited >= 0 else (index if carries_enough[index] else -1)
    groups: dict[int, list[int]] = {}
    for end in map(int, view.ends):
        groups.setdefault(int(first[end]) if first[end] >= 0 else end, []).append(end)
    return [_cluster(view, members) for members in groups.values()]


def _cluster(view: TrieView, members: Sequence[int]) -> Cluster:
    shared = _deepest_common(view, members)
    return Cluster(
        members=tuple(members),
        centroid=_most_probable(view, members),
        shared_tokens=int(view.depth_tokens[shared]),
        shared_information_bits=float(view.information_bits[shared]),
    )


def _most_probable(view: TrieView, members: Sequence[int]) -> int:
    bits = view.information_bits[list(members)]
    # the first within rounding of the least, so that equal probabilities do not depend on the order of sums
    return members[int(np.flatnonzero(bits <= bits.min() + ROUNDING_BITS)[0])]


def _deepest_common(view: TrieView, members: Iterable[int]) -> int:
    """The deepest node on all paths: climb from whichever index is higher, since parents have lower ones."""
    iterator = iter(members)
    common = next(iterator)
    for member in iterator:
        other = member
        while common != other:
            if common > other:
                common = int(view.parent[common])
            else:
                other = int(view.parent[other])
    return common


def _common_with_centroid(view: TrieView, cluster: Cluster) -> NDArray[np.int64]:
    """Tokens that each member has in common with the centroid: int64 [num_members]."""
    # nodes whose deepest common node with the centroid is known; grows with every member, so each is climbed once
    meets = {step: step for step in (0, *view.path(cluster.centroid))}
    common = []
    for member in cluster.members:
        climbed = []
        node = member
        while node not in meets:
            climbed.append(node)
            node = int(view.parent[node])
        meets.update((step, meets[node]) for step in climbed)
        common.append(int(view.depth_tokens[meets[node]]))
    return np.array(common, dtype=np.int64)


def _union_tokens(view: TrieView, members: Iterable[int]) -> int:
    counted: set[int] = {0}
    num_tokens = 0
    for member in members:
        node = member
        while node not in counted:
            counted.add(node)
            num_tokens += int(view.depth_tokens[node] - view.depth_tokens[view.parent[node]])
            node = int(view.parent[node])
    return num_tokens
