"""The reading half of the trie: matches, probabilities, shared information, a frozen copy."""

import math
import threading

import numpy as np

from vllm_novakv.prefix.node import Node, path_bits, walk
from vllm_novakv.prefix.results import Continuations, Match
from vllm_novakv.prefix.tokens import TOKEN_BYTES, TOKEN_DTYPE, Tokens, common_tokens, encode
from vllm_novakv.prefix.view import TrieView, build_view


class TrieReader:
    """What any number of threads may ask of a trie beside its writer; see `trie.Trie`.

    Args:
        vocab_size: token ids are below it; at least 2.

    Raises:
        ValueError: vocab_size is out of range.
    """

    def __init__(self, vocab_size: int) -> None:
        if not 2 <= vocab_size <= 1 << 32:
            raise ValueError(f"vocab_size={vocab_size} must be 2 to {1 << 32}")
        self.vocab_size = vocab_size
        self._lock = threading.RLock()
        self._root = Node(b"", None, None)

    def match(self, tokens: Tokens) -> Match:
        """Find the stored sequence with the most shared information: argmax_s −log2 P(query ∧ s).

        Args:
            tokens: int [n], the query.

        Returns:
            The match; zeros and None if no stored sequence begins like the query.

        Raises:
            ValueError: a token is out of range.

        Source: arXiv:2604.15356, section 7.3, best-match lookup.
        """
        data = self._encode(tokens)
        with self._lock:
            node, child, common, position = walk(self._root, data)
            below = node if child is None else child
            bits = below.prefix_bits(common, self.vocab_size) if below is not node else 0.0
            bits += path_bits(node, self.vocab_size)
            ancestor = node
            depth = position - common
            while not ancestor.own_weight and ancestor.parent is not None:
                depth -= ancestor.num_tokens
                ancestor = ancestor.parent
            while position and not below.own_weight and below.children:
                below = next(iter(below.children.values()))
            return Match(position, bits, below.payload, depth, ancestor.payload)

    def information_bits(self, tokens: Tokens) -> float:
        """Information −log2 P of a sequence, stored or not; after the stored part each token is one of the unseen.

        Args:
            tokens: int [n].

        Returns:
            Bits; infinite if the estimate leaves nothing to a token.
        """
        data = self._encode(tokens)
        with self._lock:
            node, child, common, position = walk(self._root, data)
            bits = path_bits(node, self.vocab_size)
            if child is not None:
                bits += child.prefix_bits(common, self.vocab_size)
                branch = child.interior_branch(common, self.vocab_size)
            else:
                branch = node.branch(self.vocab_size)
        num_left = len(data) // TOKEN_BYTES - position
        if not num_left:
            return bits
        unseen = branch.unseen_probability
        return math.inf if unseen == 0.0 else bits - math.log2(unseen) + (num_left - 1) * math.log2(self.vocab_size)

    def shared_information_bits(self, first: Tokens, second: Tokens) -> float:
        """Information that two sequences share, d_T = −log2 P(first ∧ second), ∧ being the longest common prefix.

        Args:
            first: int [n].
            second: int [m].

        Returns:
            Bits, 0 if the first tokens differ already.

        Source: arXiv:2604.15356, definition 2, where it is called a metric although it grows with what is shared.
        """
        left, right = self._encode(first), self._encode(second)
        common = common_tokens(left, right)
        return self.information_bits(np.frombuffer(left, dtype=TOKEN_DTYPE, count=common))

    def continuations(self, tokens: Tokens) -> Continuations:
        """Probability of every next token after a prefix, stored or not.

        Args:
            tokens: int [n], the prefix; may be empty.
        """
        data = self._encode(tokens)
        with self._lock:
            node, child, common, position = walk(self._root, data)
            if position < len(data) // TOKEN_BYTES:
                return Continuations({}, 1.0 / self.vocab_size, self.vocab_size)
            if child is not None:
                branch = child.interior_branch(common, self.vocab_size)
                token = int.from_bytes(child.tokens[common * TOKEN_BYTES : (common + 1) * TOKEN_BYTES], "little")
                known = branch.known_mass if branch.num_known else None
                seen = {token: branch.counted_probability(child.weight) if known is None else known}
            else:
                branch = node.branch(self.vocab_size)
                children = node.children or {}
                seen = {key: other.first_token_probability(self.vocab_size) for key, other in children.items()}
            return Continuations(seen, branch.unseen_probability, branch.num_unseen)

    def view(self) -> TrieView:
        """Copy the trie into columns, so that slow readers hold the lock only while it is copied."""
        with self._lock:
            return build_view(self._root, self.vocab_size)

    def _encode(self, tokens: Tokens) -> bytes:
        return encode(tokens, self.vocab_size)
