"""Nodes of the radix trie: one edge of tokens each, with the counts that turn into probabilities."""

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.estimator import DISCOUNT, Branch
from vllm_novakv.prefix.tokens import LOGPROB_BYTES, TOKEN_BYTES, TOKEN_DTYPE, common_tokens

NODE_BYTES = 640
"""Bytes charged for one node beside its tokens: the object, its child table and its place in the order of insertion."""


class Node:
    """The end of an edge; the path from the root to it is a prefix, and maybe a stored sequence.

    Attributes:
        tokens: the edge's token ids, 4 bytes each; never empty but for the root.
        logprobs: float32 [num_edge_tokens], natural logarithms from the model, NaN where unknown; None: all unknown.
        parent: None for the root.
        children: by the first token of their edge; None for a leaf.
        weight: insertions of sequences that pass through or end here.
        own_weight: insertions of the sequence that ends here; 0 if none does.
        order: number of its latest insertion, 0 if no sequence ends here.
        payload: what the caller attached to the sequence that ends here.
        probability: the model's probability of the edge's first token; None if unknown.
        known_mass: sum of `probability` over the children that have one.
        num_known: children that have one.
        counted_weight: sum of `weight` over the children that have none.
    """

    __slots__ = (
        "children",
        "counted_weight",
        "known_mass",
        "logprobs",
        "num_known",
        "order",
        "own_weight",
        "parent",
        "payload",
        "probability",
        "tokens",
        "weight",
    )

    def __init__(self, tokens: bytes, logprobs: NDArray[np.float32] | None, parent: "Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, Node] | None = None
        self.weight = 0
        self.own_weight = 0
        self.order = 0
        self.payload: Any = None
        self.known_mass = 0.0
        self.num_known = 0
        self.counted_weight = 0
        self.set_logprobs(logprobs)

    def set_logprobs(self, logprobs: NDArray[np.float32] | None) -> None:
        """Replace the edge's log-probabilities; an array without a known value is dropped."""
        if logprobs is not None and np.isnan(logprobs).all():
            logprobs = None
        self.logprobs = logprobs
        is_known = logprobs is not None and not math.isnan(logprobs[0])
        self.probability = math.exp(logprobs[0]) if is_known and logprobs is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the edge."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def first_token(self) -> int:
        """Key under which the parent holds this node."""
        return int.from_bytes(self.tokens[:TOKEN_BYTES], "little")

    @property
    def memory_bytes(self) -> int:
        """Bytes charged for this node: NODE_BYTES + 4 per token + 4 per stored log-probability."""
        return NODE_BYTES + len(self.tokens) + (0 if self.logprobs is None else LOGPROB_BYTES * len(self.logprobs))

    def attach(self, child: "Node") -> None:
        """Hang a child under this node and count it."""
        if self.children is None:
            self.children = {}
        self.children[child.first_token] = child
        child.parent = self
        self.count(child, 1)

    def detach(self, child: "Node") -> None:
        """Take a child away and no longer count it."""
        assert self.children is not None
        self.count(child, -1)
        del self.children[child.first_token]
        if not self.children:
            self.children = None
        child.parent = None

    def replace(self, child: "Node", successor: "Node") -> None:
        """Put a node of the same first token, probability and weight in a child's place."""
        assert self.children is not None
        self.children[child.first_token] = successor
        successor.parent = self

    def count(self, child: "Node", sign: int) -> None:
        """Add (sign 1) or take back (−1) what a child contributes to the sums over children."""
        if child.probability is None:
            self.counted_weight += sign * child.weight
            return
        self.num_known += sign
        # an exact zero, so that rounding does not pile up over the years
        self.known_mass = self.known_mass + sign * child.probability if self.num_known else 0.0

    def branch(self, vocab_size: int) -> Branch:
        """What is known about the tokens after this node."""
        num_children = len(self.children) if self.children else 0
        num_counted = num_children - self.num_known
        return Branch(self.known_mass, self.num_known, self.counted_weight, num_counted, vocab_size)

    def interior_branch(self, index: int, vocab_size: int) -> Branch:
        """What is known about token `index` of the edge, the one continuation of the prefix before it."""
        if self.logprobs is not None and not math.isnan(self.logprobs[index]):
            return Branch(math.exp(self.logprobs[index]), 1, 0, 0, vocab_size)
        return Branch(0.0, 0, self.weight, 1, vocab_size)

    def first_token_probability(self, vocab_size: int) -> float:
        """Probability of the edge's first token at the parent."""
        parent = self.parent
        assert parent is not None
        assert parent.children is not None
        if not parent.num_known and len(parent.children) < vocab_size:
            # what `Branch` gives where nothing is known and something unseen, without building one
            return (self.weight - DISCOUNT) / parent.counted_weight
        branch = parent.branch(vocab_size)
        if self.probability is not None:
            return branch.known_probability(self.probability)
        return branch.counted_probability(self.weight)

    def token_bits(self, vocab_size: int) -> NDArray[np.float64]:
        """Information −log2 P(token | tokens before) of every token of the edge.

        Returns:
            float64 [num_edge_tokens], bits.
        """
        bits = np.full(self.num_tokens, -math.log2((self.weight - DISCOUNT) / self.weight))
        if self.logprobs is not None:
            bits = np.where(np.isnan(self.logprobs), bits, self.logprobs.astype(np.float64) / -math.log(2.0))
        bits[0] = -math.log2(self.first_token_probability(vocab_size))
        return bits

    def prefix_bits(self, num_tokens: int, vocab_size: int) -> float:
        """Sum of the first `num_tokens` (at least 1) of `token_bits`, without the array where that is possible."""
        first = -math.log2(self.first_token_probability(vocab_size))
        counted = -math.log2((self.weight - DISCOUNT) / self.weight)
        if self.logprobs is None:
            return first + (num_tokens - 1) * counted
        inner = self.logprobs[1:num_tokens]
        num_known = num_tokens - 1 - int(np.count_nonzero(np.isnan(inner)))
        known = float(np.nansum(inner, dtype=np.float64)) / -math.log(2.0)
        return first + known + (num_tokens - 1 - num_known) * counted

    def split(self, num_tokens: int) -> "Node":
        """Cut the edge after `num_tokens` tokens; the new upper node takes this node's place under its parent.

        Returns:
            The upper node. This node stays what it was, with a shorter edge, so that references to it remain valid.
        """
        assert self.parent is not None
        head = None if self.logprobs is None else self.logprobs[:num_tokens].copy()
        tail = None if self.logprobs is None else self.logprobs[num_tokens:].copy()
        upper = Node(self.tokens[: num_tokens * TOKEN_BYTES], head, None)
        upper.weight = self.weight
        self.parent.replace(self, upper)
        self.tokens = self.tokens[num_tokens * TOKEN_BYTES :]
        self.set_logprobs(tail)
        upper.attach(self)
        return upper

    @property
    def joined_bytes(self) -> int:
        """What `memory_bytes` of the only child would be after `merge_into_child`."""
        assert self.children is not None
        (child,) = self.children.values()
        num_tokens = self.num_tokens + child.num_tokens
        has_logprobs = self.logprobs is not None or child.logprobs is not None
        return NODE_BYTES + num_tokens * (TOKEN_BYTES + (LOGPROB_BYTES if has_logprobs else 0))

    def merge_into_child(self) -> None:
        """Undo a split: the only child takes this node's place, with both edges joined."""
        assert self.parent is not None
        assert self.children is not None
        (child,) = self.children.values()
        if self.logprobs is not None or child.logprobs is not None:
            parts = [
                np.full(node.num_tokens, np.nan, dtype=np.float32) if node.logprobs is None else node.logprobs
                for node in (self, child)
            ]
            child.set_logprobs(np.concatenate(parts))
        child.tokens = self.tokens + child.tokens
        child.probability = self.probability
        self.parent.replace(self, child)


def walk(root: Node, data: bytes) -> tuple[Node, Node | None, int, int]:
    """Follow a sequence down from the root.

    Args:
        root: of the trie.
        data: the sequence, 4 bytes per token.

    Returns:
        The deepest node whose whole path the sequence has; the child whose edge it enters but does not have whole, or
        None; the tokens it has of that edge, at least 1 if there is one; the tokens matched in all.
    """
    keys = memoryview(data).cast("I") if sys.byteorder == "little" else np.frombuffer(data, dtype=TOKEN_DTYPE)
    num_tokens = len(keys)
    node, position = root, 0
    while position < num_tokens and node.children is not None:
        child = node.children.get(int(keys[position]))
        if child is None:
            break
        edge = child.tokens
        if not data.startswith(edge, position * TOKEN_BYTES):
            common = common_tokens(edge, data, position)
            return node, child, common, position + common
        position += len(edge) // TOKEN_BYTES
        node = child
    return node, None, 0, position


def ancestry(node: Node) -> Iterator[Node]:
    """A node and its ancestors, upwards, the root excluded."""
    while node.parent is not None:
        yield node
        node = node.parent


def path_bits(node: Node, vocab_size: int) -> float:
    """Information −log2 P of the prefix that ends at a node."""
    return sum(step.prefix_bits(step.num_tokens, vocab_size) for step in ancestry(node))
