"""The prefix index in its plainest form: a dictionary of sequences, every answer computed from the definitions."""

import math

import numpy as np


def common_prefix(first, second):
    """Longest common prefix of two tuples."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


class PlainTrie:
    """Sequences with weights; a prefix may have the probability that a model gave its last token."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.weight = {}
        self.payload = {}
        self.recorded = {}

    def insert(self, sequence, logprobs=None, payload=None):
        sequence = tuple(sequence)
        self.weight[sequence] = self.weight.get(sequence, 0) + 1
        self.payload[sequence] = payload
        for index, value in enumerate(logprobs or ()):
            if value is not None:
                self.recorded.setdefault(sequence[: index + 1], math.exp(np.float32(value)))

    def evict(self, sequence):
        del self.weight[sequence]
        del self.payload[sequence]
        self.forget_unstored()

    def forget_unstored(self):
        stored = self.prefixes()
        self.recorded = {prefix: p for prefix, p in self.recorded.items() if prefix in stored}

    def prefixes(self):
        return {sequence[:length] for sequence in self.weight for length in range(1, len(sequence) + 1)}

    def prefix_weight(self, prefix):
        return sum(weight for sequence, weight in self.weight.items() if sequence[: len(prefix)] == prefix)

    def continuations(self, prefix):
        """(probability by seen token, probability of each unseen token)."""
        tokens = sorted({s[len(prefix)] for s in self.weight if len(s) > len(prefix) and s[: len(prefix)] == prefix})
        known = {t: self.recorded[(*prefix, t)] for t in tokens if (*prefix, t) in self.recorded}
        counts = {t: self.prefix_weight((*prefix, t)) for t in tokens if t not in known}
        num_unseen = self.vocab_size - len(tokens)
        mass = sum(known.values())
        if not counts and not num_unseen:
            return {t: p / mass for t, p in known.items()}, 0.0
        limit = 1 - 2**-20 if counts else 1.0
        if mass > limit:
            known = {t: p * limit / mass for t, p in known.items()}
        rest = 1 - min(mass, limit)
        total = sum(counts.values())
        if counts and not num_unseen:
            total -= len(counts) / 2
        seen = known | {t: rest * (count - 0.5) / total for t, count in counts.items()}
        return seen, (1 - sum(seen.values())) / num_unseen if num_unseen else 0.0

    def information_bits(self, sequence):
        bits = 0.0
        for index, token in enumerate(sequence):
            seen, unseen = self.continuations(tuple(sequence[:index]))
            probability = seen.get(token, unseen)
            if probability <= 0:
                return math.inf
            bits -= math.log2(probability)
        return bits

    def match_tokens(self, query):
        return max((len(common_prefix(tuple(query), sequence)) for sequence in self.weight), default=0)

    def pruned(self, epsilon):
        """Weights after cutting every sequence to its longest prefix with P >= epsilon."""
        result = {}
        for sequence, weight in self.weight.items():
            lengths = [
                n for n in range(len(sequence) + 1) if self.information_bits(sequence[:n]) <= -math.log2(epsilon)
            ]
            kept = sequence[: max(lengths)]
            if kept:
                result[kept] = result.get(kept, 0) + weight
        return result


def random_sequence(source, vocab_size, max_tokens=9):
    """Short sequences over few tokens, so that prefixes repeat."""
    return tuple(int(min(source.geometric(0.5) - 1, vocab_size - 1)) for _ in range(source.integers(1, max_tokens + 1)))


def random_logprobs(source, sequence):
    """Values that depend on the prefix alone, as a model's do, some of them missing; None for none at all."""
    if source.random() < 0.4:
        return None
    values = [-((sum(sequence[: i + 1]) * 7 + 3 * i) % 11) / 8 for i in range(len(sequence))]
    return [None if source.random() < 0.3 else value for value in values]
