"""A radix-compressed trie over token ids with probabilities: the prefix index.

A node is a prefix, an edge holds a run of tokens, and every stored sequence is a path from the root. Each token has a
probability given those before it (`estimator.py`), so each prefix has one: the product along its path. Information is
measured in bits, −log2 P. The information that two sequences share is that of their common prefix; it grows with the
prefix, and where sequences part decides it alone.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.node import NODE_BYTES, Node, ancestry, walk
from vllm_novakv.prefix.results import Insertion
from vllm_novakv.prefix.tokens import LOGPROB_BYTES, TOKEN_BYTES, Tokens, checked_logprobs
from vllm_novakv.prefix.trie_reader import TrieReader
from vllm_novakv.prefix.view import TrieColumns, build_nodes

ROUNDING_BITS = 1e-9
"""Slack of the comparison with a threshold in bits, so that a sum's rounding does not decide."""


class Trie(TrieReader):
    """Stored sequences with a probability for every prefix; memory O(stored tokens), never above `max_bytes`.

    One lock guards every operation, so any number of threads may read beside a writer. Insert, match and evict take
    time O(n) in the sequence, plus one copy of an edge that is split or joined.

    Example, vocabulary of 4, no recorded probabilities: insert [1, 2] and [1, 3]. Both begin with 1, which was seen
    twice: P(1) = (2 − ½)/2 = 3/4. After it 2 and 3 were seen once each: P(2 | 1) = (1 − ½)/2 = 1/4. So
    P([1, 2]) = 3/16, and the two share −log2(3/4) = 0.415 bits.

    Args:
        vocab_size: token ids are below it; at least 2.
        max_bytes: bound of the charged memory (4 bytes per token, 4 per recorded log-probability, `NODE_BYTES` per
            node), at least one node's; payloads are the caller's. The oldest insertions make room.

    Raises:
        ValueError: an argument is out of range.

    Source: arXiv:2604.15356, definition 1 and section 7.3; radix trees: D. R. Morrison (1968), PATRICIA.
    """

    def __init__(self, vocab_size: int, max_bytes: int = 1 << 28) -> None:
        super().__init__(vocab_size)
        if max_bytes < 2 * NODE_BYTES:
            raise ValueError(f"max_bytes={max_bytes} does not hold one sequence; give at least {2 * NODE_BYTES}")
        self.max_bytes = max_bytes
        self._ends: OrderedDict[int, Node] = OrderedDict()  # by order of insertion
        self._next_order = 1
        self._num_nodes = 1
        self._memory_bytes = self._root.memory_bytes
        self._num_tokens = 0

    @property
    def num_sequences(self) -> int:
        """Different stored sequences."""
        return len(self._ends)

    @property
    def num_tokens(self) -> int:
        """Stored tokens; a shared prefix counts once."""
        return self._num_tokens

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return self._num_nodes

    @property
    def memory_bytes(self) -> int:
        """Charged memory."""
        return self._memory_bytes

    def insert(
        self, tokens: Tokens, logprobs: Sequence[float | None] | NDArray[Any] | None = None, payload: Any = None
    ) -> Insertion:
        """Store a sequence, or count it once more.

        Args:
            tokens: int [n], n at least 1.
            logprobs: natural logarithms of P(token | tokens before) from the model, one per token, None or NaN where
                unknown; the first value recorded for a token of the trie stays.
            payload: attached to the sequence; replaces an earlier one.

        Returns:
            What was added and what had to go.

        Raises:
            ValueError: the sequence is empty, a token or a log-probability is out of range, the lengths differ, or
                the sequence alone exceeds `max_bytes`.
        """
        data = self._encode(tokens)
        num_tokens = len(data) // TOKEN_BYTES
        if not num_tokens:
            raise ValueError("an empty sequence cannot be stored")
        values = None if logprobs is None else checked_logprobs(logprobs, num_tokens)
        token_bytes = TOKEN_BYTES + (0 if values is None else LOGPROB_BYTES)
        if 3 * NODE_BYTES + num_tokens * token_bytes > self.max_bytes:
            raise ValueError(
                f"{num_tokens} tokens need more than max_bytes={self.max_bytes}; store a shorter prefix or raise it"
            )
        with self._lock:
            evicted: list[Any] = []
            node, child, common, position = walk(self._root, data)
            while True:
                # a split and a leaf, the new tokens, and log-probabilities for stored tokens that had none
                need = 2 * NODE_BYTES + (num_tokens - position) * TOKEN_BYTES
                need += 0 if values is None else (num_tokens + (child.num_tokens if child else 0)) * LOGPROB_BYTES
                if self._memory_bytes + need <= self.max_bytes or not self._ends:
                    break
                payload_of_oldest = self._remove(self._ends[next(iter(self._ends))])
                evicted.extend([] if payload_of_oldest is None else [payload_of_oldest])
                node, child, common, position = walk(self._root, data)
            num_new = num_tokens - position
            if child is not None:
                self._num_nodes += 1
                self._memory_bytes -= child.memory_bytes
                node = child.split(common)
                self._memory_bytes += child.memory_bytes + node.memory_bytes
            if num_new:
                tail = None if values is None else values[position:].copy()
                leaf = Node(data[position * TOKEN_BYTES :], tail, None)
                node.attach(leaf)
                self._num_nodes += 1
                self._num_tokens += num_new
                self._memory_bytes += leaf.memory_bytes
                node = leaf
            self._count_end(node, payload, evicted)
            if values is not None:
                self._record(node, values[:position])
            return Insertion(num_new, tuple(evicted))

    def evict(self, tokens: Tokens) -> Any:
        """Forget a stored sequence with all its insertions, and the ancestors that then lead nowhere.

        Returns:
            Its payload.

        Raises:
            KeyError: the sequence is not stored.

        Source: arXiv:2604.15356, section 7.3.
        """
        data = self._encode(tokens)
        with self._lock:
            node, _, common, position = walk(self._root, data)
            if common or position * TOKEN_BYTES < len(data) or not node.own_weight:
                raise KeyError("the sequence is not stored")
            return self._remove(node)

    def prune(self, epsilon: float) -> tuple[Any, ...]:
        """Cut every stored sequence to its longest prefix with P ≥ epsilon; nothing less probable stays.

        Probabilities are those before the call. What stays can only become more probable, but for prefixes that every
        token of the vocabulary had followed. A shortened sequence keeps its number of insertions and has no payload,
        unless the prefix was stored before.

        Args:
            epsilon: probability in (0, 1].

        Returns:
            Payloads of the sequences that were shortened or dropped.

        Raises:
            ValueError: epsilon is out of range.

        Source: arXiv:2604.15356, section 7.3.
        """
        if not 0.0 < epsilon <= 1.0:
            raise ValueError(f"epsilon={epsilon} is not a probability in (0, 1]")
        limit = -math.log2(epsilon) + ROUNDING_BITS
        dropped: list[Any] = []
        with self._lock:
            stack = [(self._root, 0.0)]
            while stack:
                node, bits = stack.pop()
                children = list(node.children.values()) if node.children else []
                # every sibling's probability before any of them is cut
                ends = [bits + np.cumsum(child.token_bits(self.vocab_size)) for child in children]
                for child, end in zip(children, ends, strict=True):
                    kept = int(np.searchsorted(end, limit, side="right"))
                    if kept == len(end):
                        stack.append((child, float(end[-1])))
                    else:
                        self._cut(child, kept, dropped)
            self._ends = OrderedDict(sorted(self._ends.items()))
        return tuple(dropped)

    @classmethod
    def from_columns(cls, columns: TrieColumns, vocab_size: int, max_bytes: int) -> "Trie":
        """Rebuild a trie from the columns of its view.

        Args:
            columns: see `TrieColumns`.
            vocab_size: as for the constructor.
            max_bytes: as for the constructor.

        Raises:
            ValueError: the columns are not those of a trie, or need more than max_bytes.
        """
        trie = cls(vocab_size, max_bytes)
        nodes = build_nodes(columns, vocab_size)
        trie._root = nodes[0]
        trie._num_nodes = len(nodes)
        trie._num_tokens = sum(node.num_tokens for node in nodes)
        trie._memory_bytes = sum(node.memory_bytes for node in nodes)
        if trie._memory_bytes > max_bytes:
            raise ValueError(f"the trie needs {trie._memory_bytes} bytes, max_bytes={max_bytes}")
        ends = sorted((node.order, node) for node in nodes if node.own_weight)
        trie._ends = OrderedDict(ends)
        trie._next_order = 1 + max(trie._ends, default=0)
        return trie

    def _add_weight(self, node: Node, amount: int) -> None:
        for ancestor in ancestry(node):
            ancestor.weight += amount
            if ancestor.probability is None and ancestor.parent is not None:
                ancestor.parent.counted_weight += amount
        self._root.weight += amount

    def _count_end(self, node: Node, payload: Any, replaced: list[Any]) -> None:
        if node.own_weight:
            self._ends.pop(node.order)
            if payload is not None and node.payload is not None and node.payload != payload:
                replaced.append(node.payload)
        node.own_weight += 1
        node.payload = node.payload if payload is None else payload
        node.order = self._next_order
        self._ends[node.order] = node
        self._next_order += 1
        self._add_weight(node, 1)

    def _record(self, node: Node, logprobs: NDArray[np.float32]) -> None:
        """Fill in log-probabilities for the tokens of a path that had none, up to where the path was stored before."""
        path = list(ancestry(node))[::-1]
        start = 0
        for step in path:
            end = start + step.num_tokens
            if end > len(logprobs):
                break
            given = logprobs[start:end]
            held = step.logprobs
            merged = given if held is None else np.where(np.isnan(held), given, held)
            if held is None or not np.array_equal(merged, held, equal_nan=True):
                parent = step.parent
                assert parent is not None
                self._memory_bytes -= step.memory_bytes
                parent.count(step, -1)
                step.set_logprobs(merged.astype(np.float32))
                parent.count(step, 1)
                self._memory_bytes += step.memory_bytes
            start = end

    def _remove(self, node: Node) -> Any:
        """Forget the sequence that ends at a node; returns its payload."""
        self._add_weight(node, -node.own_weight)
        del self._ends[node.order]
        payload, node.payload, node.own_weight, node.order = node.payload, None, 0, 0
        while node.parent is not None and not node.own_weight and not node.children:
            parent = node.parent
            self._discard(node)
            node = parent
        if node.parent is not None and not node.own_weight and node.children and len(node.children) == 1:
            (child,) = node.children.values()
            # joining an edge with log-probabilities to a long one without would need more memory than two nodes
            if node.joined_bytes <= node.memory_bytes + child.memory_bytes:
                self._memory_bytes += node.joined_bytes - node.memory_bytes - child.memory_bytes
                self._num_nodes -= 1
                node.merge_into_child()
        return payload

    def _discard(self, node: Node) -> None:
        assert node.parent is not None
        self._memory_bytes -= node.memory_bytes
        self._num_tokens -= node.num_tokens
        self._num_nodes -= 1
        node.parent.detach(node)

    def _cut(self, node: Node, kept: int, dropped: list[Any]) -> None:
        """End every sequence through an edge after its first `kept` tokens."""
        below = [node]
        for step in below:
            below.extend(step.children.values() if step.children else ())
        ends = [step for step in below if step.own_weight]
        for step in ends:
            del self._ends[step.order]
            dropped.extend([] if step.payload is None else [step.payload])
        weight, order = node.weight, max(step.order for step in ends)
        parent = node.parent
        assert parent is not None
        for step in reversed(below):
            self._discard(step)
        if kept:
            logprobs = None if node.logprobs is None else node.logprobs[:kept].copy()
            end = Node(node.tokens[: kept * TOKEN_BYTES], logprobs, None)
            end.weight = weight
            parent.attach(end)
            self._num_nodes += 1
            self._num_tokens += kept
            self._memory_bytes += end.memory_bytes
        elif parent.parent is not None:
            end = parent
        else:
            self._root.weight -= weight
            return
        if end.own_weight:
            order = max(order, end.order)
            del self._ends[end.order]
        end.own_weight += weight
        end.order = order
        self._ends[order] = end
