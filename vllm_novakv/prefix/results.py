"""What the trie answers with: matches, insertions, distributions of the next token."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Match:
    """The stored sequence that shares the most information with a query.

    Attributes:
        num_tokens: length of the longest common prefix with any stored sequence.
        shared_information_bits: −log2 P of that prefix.
        payload: of a stored sequence that begins with it (the shortest one first met below it); None if nothing
            matches.
        ancestor_tokens: length of the longest stored sequence that is a prefix of the query, 0 if there is none.
        ancestor_payload: its payload.
    """

    num_tokens: int
    shared_information_bits: float
    payload: Any
    ancestor_tokens: int
    ancestor_payload: Any


@dataclass(frozen=True)
class Insertion:
    """What an insertion changed.

    Attributes:
        num_new_tokens: tokens stored that no earlier sequence had at this place.
        evicted_payloads: payloads of the sequences that made room, oldest first, and the one that was replaced.
    """

    num_new_tokens: int
    evicted_payloads: tuple[Any, ...]


@dataclass(frozen=True)
class Continuations:
    """Probability of the next token at a prefix; the parts add up to one.

    Attributes:
        seen: probability by token id, of the tokens that followed this prefix.
        unseen_probability: of each of the others.
        num_unseen: how many others there are.
    """

    seen: dict[int, float]
    unseen_probability: float
    num_unseen: int
