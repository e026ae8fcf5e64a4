"""The trie as columns: a frozen copy for slow readers, and the way back from a file."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.node import Node
from vllm_novakv.prefix.tokens import TOKEN_BYTES, TOKEN_DTYPE


@dataclass(frozen=True)
class TrieColumns:
    """What defines a trie, node by node, parents before children, the root at index 0.

    Attributes:
        parent: int64 [num_nodes], index of each node's parent; -1 for the root.
        tokens: edge tokens, little-endian uint32, by node; empty for the root.
        logprobs: log-probabilities of the edge tokens (float32, NaN where unknown) or None, by node.
        own_weight: int64 [num_nodes], insertions that end at the node; a stored sequence ends where it is positive.
        order: int64 [num_nodes], number of the latest of those; 0 where none ends.
        payload: by node.
    """

    parent: NDArray[np.int64]
    tokens: tuple[bytes, ...]
    logprobs: tuple[NDArray[np.float32] | None, ...]
    own_weight: NDArray[np.int64]
    order: NDArray[np.int64]
    payload: tuple[Any, ...]


@dataclass(frozen=True)
class TrieView(TrieColumns):
    """A frozen copy of a trie with what follows from its columns.

    Attributes:
        depth_tokens: int64 [num_nodes], length of the prefix.
        information_bits: float64 [num_nodes], −log2 P of the prefix.
        weight: int64 [num_nodes], insertions through or at the node.
    """

    depth_tokens: NDArray[np.int64]
    information_bits: NDArray[np.float64]
    weight: NDArray[np.int64]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Indices of the nodes where a stored sequence ends, ascending: int64 [num_sequences]."""
        return np.flatnonzero(self.own_weight)

    def path(self, index: int) -> list[int]:
        """Indices of the nodes from below the root to a node, that node included."""
        steps = []
        while index > 0:
            steps.append(index)
            index = int(self.parent[index])
        return steps[::-1]

    def sequence(self, index: int) -> NDArray[np.uint32]:
        """Token ids of the prefix that ends at a node: uint32 [depth_tokens[index]]."""
        edges = b"".join(self.tokens[step] for step in self.path(index))
        return np.array(memoryview(edges).cast("I"), dtype=TOKEN_DTYPE) if edges else np.empty(0, dtype=TOKEN_DTYPE)


def build_view(root: Node, vocab_size: int) -> TrieView:
    """Copy a trie into columns; children keep their order.

    Args:
        root: of the trie.
        vocab_size: of the trie.
    """
    nodes: list[Node] = []
    parents: list[int] = []
    depths: list[int] = []
    bits: list[float] = []
    stack: list[tuple[Node, int, int, float]] = [(root, -1, 0, 0.0)]
    while stack:
        node, parent, depth, before = stack.pop()
        index = len(nodes)
        depth += node.num_tokens
        if node.parent is not None:
            before += node.prefix_bits(node.num_tokens, vocab_size)
        nodes.append(node)
        parents.append(parent)
        depths.append(depth)
        bits.append(before)
        # reversed, so that the first child comes out first
        stack.extend((child, index, depth, before) for child in reversed((node.children or {}).values()))
    return TrieView(
        parent=np.array(parents, dtype=np.int64),
        tokens=tuple(node.tokens for node in nodes),
        logprobs=tuple(node.logprobs for node in nodes),
        own_weight=np.array([node.own_weight for node in nodes], dtype=np.int64),
        order=np.array([node.order for node in nodes], dtype=np.int64),
        payload=tuple(node.payload for node in nodes),
        depth_tokens=np.array(depths, dtype=np.int64),
        information_bits=np.array(bits, dtype=np.float64),
        weight=np.array([node.weight for node in nodes], dtype=np.int64),
    )


def build_nodes(columns: TrieColumns, vocab_size: int) -> list[Node]:
    """Nodes of the trie that columns describe, linked, weighted and checked; the root first.

    Args:
        columns: see `TrieColumns`.
        vocab_size: bound of the token ids.

    Raises:
        ValueError: the columns are not those of a trie.
    """
    parent, own_weight, order = columns.parent, columns.own_weight, columns.order
    num_nodes = len(parent)
    lengths = {len(column) for column in (columns.tokens, columns.logprobs, own_weight, order, columns.payload)}
    if not num_nodes or lengths != {num_nodes}:
        raise ValueError("the columns differ in length")
    if parent[0] != -1 or np.any(parent[1:] < 0) or np.any(parent[1:] >= np.arange(1, num_nodes)):
        raise ValueError("a node comes before its parent")
    is_end = own_weight > 0
    if np.any(own_weight < 0) or np.any((order > 0) != is_end) or len(np.unique(order[is_end])) != is_end.sum():
        raise ValueError("weights and insertion numbers do not belong together")
    if columns.tokens[0] or is_end[0]:
        raise ValueError("the root is not empty")
    weight = own_weight.copy()
    for index in range(num_nodes - 1, 0, -1):
        weight[parent[index]] += weight[index]
    nodes: list[Node] = []
    for index in range(num_nodes):
        tokens, logprobs = columns.tokens[index], columns.logprobs[index]
        if index and (not tokens or not weight[index]):
            raise ValueError(f"node {index} has no tokens or leads nowhere")
        if logprobs is not None and (len(logprobs) * TOKEN_BYTES != len(tokens) or np.any(logprobs > 0)):
            raise ValueError(f"node {index} has log-probabilities that do not fit its tokens")
        if index and int(np.frombuffer(tokens, dtype=TOKEN_DTYPE).max()) >= vocab_size:
            raise ValueError(f"node {index} has a token beyond vocab_size={vocab_size}")
        node = Node(tokens, logprobs, None)
        node.weight, node.own_weight, node.order = int(weight[index]), int(own_weight[index]), int(order[index])
        node.payload = columns.payload[index]
        if index:
            above = nodes[int(parent[index])]
            if above.children is not None and node.first_token in above.children:
                raise ValueError(f"node {index} begins with the same token as a sibling")
            above.attach(node)
        nodes.append(node)
    return nodes
