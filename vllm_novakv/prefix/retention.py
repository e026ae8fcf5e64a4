"""The retention policy of this package: keep what is expected to save most computation per byte and second.

value of a block = rate of its reuse (`return_model.py`) · cost of computing it again, per block, all of equal size

The blocks that one request used last form a segment; they are reused together or not at all, so they share a rate, and
a segment goes from its end. What is known of a block outlives the block: that evicted blocks are asked for again is
how the policy learns.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.policy import CachedBlock, PrefillCost, RetentionPolicy
from vllm_novakv.prefix.return_model import ReturnModel

NUM_FEATURES = 10

PLAN_S = 1.0
"""Seconds for which an order of eviction stays good enough."""


@dataclass(slots=True)
class Segment:
    """The blocks that a request was the last to use.

    Attributes:
        sample: its number in the model.
        features: what the model sees of it.
        used_s: when.
        num_blocks: blocks of the request, whoever used them later.
        turn: 1 for a prompt that begins something new, 2 for its first continuation, and so on.
        output_tokens: tokens that the request generated.
        gap_s: seconds since the prompt that it continues, 0 if it continues none.
        num_owned: cached blocks that no later request used.
        blocks: those, among others, from the start of the prompt.
    """

    sample: int
    features: NDArray[np.float64]
    used_s: float
    num_blocks: int
    turn: int
    output_tokens: int
    gap_s: float
    num_owned: int = 0
    blocks: list[CachedBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request began.

    Attributes:
        num_known: leading blocks of its prompt that earlier requests had used.
        uses: earlier requests that used the last of those.
        continued: the segment that it continues, having more than half of its blocks; None if it begins anew.
        now_s: when.
    """

    num_known: int
    uses: int
    continued: Segment | None
    now_s: float

    @property
    def gap_s(self) -> float:
        """Seconds since the prompt that it continues; 0 if it begins anew."""
        return max(self.now_s - self.continued.used_s, 0.0) if self.continued else 0.0


class ExpectedReusePolicy(RetentionPolicy):
    """Evicts where expected reuse times recomputation cost per byte is lowest, learned from past requests alone.

    Args:
        cost: of computing a block again.
        max_evicted_blocks: evicted blocks that are remembered; those evicted first are forgotten.
        model: None for a new one.

    Raises:
        ValueError: max_evicted_blocks is not positive.

    Source: engineering choice; section 7.3 of arXiv:2604.15356 leaves open what to evict.
    """

    def __init__(
        self, cost: PrefillCost | None = None, max_evicted_blocks: int = 1 << 18, model: ReturnModel | None = None
    ) -> None:
        super().__init__()
        if max_evicted_blocks < 1:
            raise ValueError(f"max_evicted_blocks={max_evicted_blocks} must be positive")
        self._cost = cost or PrefillCost()
        self._max_evicted_blocks = max_evicted_blocks
        self._model = model or ReturnModel(NUM_FEATURES)
        # the segment of a block and the number of requests that used it, for cached and for evicted blocks
        self._owners: dict[Hashable, tuple[Segment, int]] = {}
        self._evicted: OrderedDict[Hashable, tuple[Segment, int]] = OrderedDict()
        self._segments: dict[int, Segment] = {}
        self._arrivals: dict[Hashable, Arrival] = {}
        self._plan: list[Segment] = []
        self._planned_s = -math.inf

    def evict(self, count: int, now_s: float) -> list[Hashable]:
        chosen: list[Hashable] = []
        is_new = now_s - self._planned_s >= PLAN_S
        if is_new:
            self._make_plan(now_s)
        while len(chosen) < count:
            before = len(chosen)
            waiting = []
            while self._plan and len(chosen) < count:
                segment = self._plan.pop()
                self._evict_from(segment, count, chosen)
                if segment.blocks:
                    waiting.append(segment)
            self._plan.extend(reversed(waiting))
            if len(chosen) == before:
                if is_new:
                    break
                # the plan is used up: what was used since it was made comes next
                self._make_plan(now_s)
                is_new = True
        return chosen

    def _evict_from(self, segment: Segment, count: int, chosen: list[Hashable]) -> None:
        blocks = segment.blocks
        while blocks and len(chosen) < count:
            block = blocks[-1]
            is_ours = self._blocks.get(block.key) is block and self._owners[block.key][0] is segment
            if is_ours and not self._is_candidate(block):
                return
            blocks.pop()
            if is_ours:
                chosen.append(block.key)
                self._drop(block)

    def _drop(self, block: CachedBlock) -> None:
        super()._drop(block)
        self._evicted[block.key] = owner = self._owners.pop(block.key)
        self._disown(owner[0])
        while len(self._evicted) > self._max_evicted_blocks:
            self._evicted.popitem(last=False)

    def _disown(self, segment: Segment) -> None:
        segment.num_owned -= 1
        if not segment.num_owned:
            segment.blocks.clear()
            del self._segments[segment.sample]

    def _make_plan(self, now_s: float) -> None:
        """Order the segments by value, the highest first: the plan is worked off from its end."""
        self._planned_s = now_s
        segments = list(self._segments.values())
        if not segments:
            self._plan = []
            return
        classes = self._model.classify(np.stack([segment.features for segment in segments]))
        used_s = np.array([segment.used_s for segment in segments])
        costs = np.array([self._cost.of_block(segment.num_blocks - 1) for segment in segments])
        value = self._model.value(classes, np.maximum(now_s - used_s, 0.0)) * costs
        # among equals the one used longest ago goes first
        self._plan = [segments[i] for i in np.lexsort((used_s, value))[::-1]]

    def _arrived(self, request_id: Hashable, keys: Sequence[Hashable], now_s: float) -> None:
        num_known, uses = 0, 0
        owner: Segment | None = None
        for key in keys:
            known = self._owners.get(key) or self._evicted.get(key)
            if known is None:
                break
            owner, uses = known
            num_known += 1
        # sharing the smaller part of an earlier prompt, such as its system prompt, is no continuation of it
        continued = owner if owner is not None and 2 * num_known > owner.num_blocks else None
        if continued is not None:
            self._model.returned(continued.sample, now_s)
        self._arrivals[request_id] = Arrival(num_known, uses, continued, now_s)

    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        arrival = self._arrivals.pop(request_id)
        if not path:
            return
        continued = arrival.continued
        features = self._describe(arrival, path, output_tokens)
        segment = Segment(
            sample=self._model.add(features, now_s),
            features=features,
            used_s=now_s,
            num_blocks=len(path),
            turn=1 if continued is None else continued.turn + 1,
            output_tokens=output_tokens,
            gap_s=arrival.gap_s,
            num_owned=len(path),
            blocks=list(path),
        )
        self._segments[segment.sample] = segment
        for block in path:
            earlier = self._owners.pop(block.key, None)
            if earlier is not None:
                self._disown(earlier[0])
            else:
                earlier = self._evicted.pop(block.key, None)
            self._owners[block.key] = (segment, 1 if earlier is None else earlier[1] + 1)

    def _describe(self, arrival: Arrival, path: Sequence[CachedBlock], output_tokens: int) -> NDArray[np.float64]:
        """What the model sees of a request: float64 [NUM_FEATURES], logarithms of counts and seconds."""
        continued = arrival.continued
        is_continuation = continued is not None
        return np.log1p(
            np.array(
                [
                    continued.turn if continued else 0,
                    len(path),
                    max(len(path) - arrival.num_known, 0),
                    output_tokens,
                    arrival.gap_s,
                    float(is_continuation),
                    arrival.uses if is_continuation else 0,
                    continued.output_tokens if continued else 0,
                    continued.gap_s if continued else 0.0,
                    float(arrival.num_known == 0),
                ],
                dtype=np.float64,
            )
        )

    def _freed(self, block: CachedBlock) -> None:
        return None
