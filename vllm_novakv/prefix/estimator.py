"""Probability of the next token at a prefix, from what the model said where it is known and from counts elsewhere.

Continuations of a prefix come in three kinds:
1. known: seen, and the model's probability was recorded; that number is used as it is;
2. counted: seen without a recorded probability; they share what the known ones leave, by how often each was seen;
3. unseen: every other token of the vocabulary; they share the escape probability equally.
"""

from typing import NamedTuple

DISCOUNT = 0.5
"""What method D takes from the count of every distinct continuation and gives to the escape."""

RESERVED_MASS = 2.0**-20
"""Least probability left to counted continuations, where recorded probabilities add up to one or, rounded, to more."""


class Branch(NamedTuple):
    """What is known about the continuations of one prefix, and the probability it implies for each kind.

    With K = known_mass, n = counted_weight, q = num_counted and rest = 1 − K:
    known p stays p; counted with count c gets rest · (c − ½) / n; the escape gets rest · q / 2n, or rest if q = 0.
    The three kinds add up to one.

    Example: tokens a (3 times) and b (once) were seen, neither with a recorded probability, in a vocabulary of 10.
    Then P(a) = 2.5/4, P(b) = 0.5/4, and the 8 unseen tokens share 1/4. Recorded P(a) = 0.6 instead leaves 0.4: b gets
    0.4 · 0.5/1 = 0.2, the unseen ones share 0.2.

    Args:
        known_mass: sum of the recorded probabilities, at least 0.
        num_known: continuations with a recorded probability.
        counted_weight: sequences through the continuations without one.
        num_counted: continuations without one.
        vocab_size: tokens that could follow, at least 2.

    Source: method D of prediction by partial matching, P. G. Howard (1993), The Design and Analysis of Efficient
        Lossless Data Compression Systems, Brown University CS-93-28; the split between known and counted is an
        engineering choice.
    """

    known_mass: float
    num_known: int
    counted_weight: int
    num_counted: int
    vocab_size: int

    @property
    def num_unseen(self) -> int:
        """Tokens of the vocabulary that never followed this prefix."""
        return self.vocab_size - self.num_known - self.num_counted

    @property
    def rest(self) -> float:
        """Probability that the known continuations leave."""
        return max(1.0 - self.known_mass, RESERVED_MASS if self.num_counted else 0.0)

    def known_probability(self, probability: float) -> float:
        """Probability of a known continuation: the recorded one, scaled down only where they add up to too much.

        Args:
            probability: the recorded probability, in (0, 1].
        """
        others = self.num_counted or self.num_unseen
        limit = 1.0 - self.rest if others else 1.0
        if self.known_mass > limit or not others:
            return probability * (limit / self.known_mass)
        return probability

    def counted_probability(self, weight: int) -> float:
        """Probability of a counted continuation: rest · (weight − ½) / n.

        Args:
            weight: sequences through this continuation, 1 to counted_weight.
        """
        total = float(self.counted_weight)
        if self.num_unseen == 0:
            total -= DISCOUNT * self.num_counted  # nothing is left to escape to
        return self.rest * (weight - DISCOUNT) / total

    @property
    def unseen_probability(self) -> float:
        """Probability of each unseen token; 0 if there is none."""
        if self.num_unseen == 0:
            return 0.0
        escape = DISCOUNT * self.num_counted / self.counted_weight if self.num_counted else 1.0
        return self.rest * escape / self.num_unseen
