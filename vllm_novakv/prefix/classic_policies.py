"""Policies to compare with: LRU, LFU with decay, GDSF, and the optimum of Belady, which knows the future."""

import heapq
import itertools
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence

from vllm_novakv.prefix.policy import CachedBlock, PrefillCost, RetentionPolicy


class PriorityPolicy(RetentionPolicy):
    """Evicts the candidate of the lowest priority; a block's priority changes only when it is used.

    Of equal priorities the block that became a candidate first goes first, so a prompt goes from its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, int, CachedBlock]] = []
        self._serial = itertools.count()

    @abstractmethod
    def _priority(self, block: CachedBlock, now_s: float) -> float:
        """Priority of a block that has just been used."""

    def evict(self, count: int, now_s: float) -> list[Hashable]:
        chosen: list[Hashable] = []
        while len(chosen) < count and self._heap:
            priority, _, version, block = heapq.heappop(self._heap)
            if version != block.version or not self._is_candidate(block):
                continue
            chosen.append(block.key)
            self._evicted(priority)
            self._drop(block)
        return chosen

    def _evicted(self, priority: float) -> None:
        """A block of this priority has been chosen."""

    def _arrived(self, request_id: Hashable, keys: Sequence[Hashable], now_s: float) -> None:
        return None

    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        for block in path:
            block.priority = self._priority(block, now_s)
            block.version += 1
        for block in reversed(path):
            self._freed(block)

    def _freed(self, block: CachedBlock) -> None:
        if self._is_candidate(block):
            heapq.heappush(self._heap, (block.priority, next(self._serial), block.version, block))


class LRUPolicy(PriorityPolicy):
    """Least recently used: priority = time of the last use, as vLLM's own queue of free blocks has it."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0

    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        self._clock += 1
        super()._used(request_id, path, now_s, output_tokens)

    def _priority(self, block: CachedBlock, now_s: float) -> float:
        return self._clock


class DecayedLFUPolicy(PriorityPolicy):
    """Least frequently used, every use counting 2^(−age / half_life): priority = log₂ Σ_i 2^(t_i / half_life).

    All counts decay alike, so their order, and with it the priority, changes only with a use.

    Args:
        half_life_s: seconds after which a use counts half.

    Raises:
        ValueError: half_life_s is not positive.

    Source: D. Lee et al. (2001), LRFU, IEEE Transactions on Computers 50(12).
    """

    def __init__(self, half_life_s: float = 120.0) -> None:
        super().__init__()
        if not half_life_s > 0:
            raise ValueError(f"half_life_s={half_life_s} must be positive")
        self._half_life_s = half_life_s

    def _priority(self, block: CachedBlock, now_s: float) -> float:
        use = now_s / self._half_life_s
        if block.frequency == 1:
            return use
        high, low = max(use, block.priority), min(use, block.priority)
        return high + math.log2(1.0 + 2.0 ** (low - high))


class GDSFPolicy(PriorityPolicy):
    """Greedy dual size frequency: priority = L + frequency · cost / size, L being that of the last block evicted.

    Blocks are of one size; a block's frequency is forgotten when it is evicted.

    Args:
        cost: of computing a block again.

    Source: L. Cherkasova (1998), Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy,
        HP Laboratories report HPL-98-69.
    """

    def __init__(self, cost: PrefillCost | None = None) -> None:
        super().__init__()
        self._cost = cost or PrefillCost()
        self._inflation = 0.0

    def _priority(self, block: CachedBlock, now_s: float) -> float:
        return self._inflation + block.frequency * self._cost.of_block(block.index)

    def _evicted(self, priority: float) -> None:
        self._inflation = max(self._inflation, priority)


class BeladyPolicy(PriorityPolicy):
    """The optimum that knows the future: evicts the block whose next use is farthest away. For comparison only.

    Requests must end in the order of `paths`. A first block is used no later than the blocks after it, so leaving from
    the end of a prompt is no restriction.

    Args:
        paths: keys of every request to come, in order.

    Source: L. A. Belady (1966), A study of replacement algorithms for a virtual-storage computer.
    """

    def __init__(self, paths: Sequence[Sequence[Hashable]]) -> None:
        super().__init__()
        upcoming: dict[Hashable, int] = {}
        self._next_use: list[list[float]] = []
        for position in range(len(paths) - 1, -1, -1):
            self._next_use.append([upcoming.get(key, math.inf) for key in paths[position]])
            upcoming.update((key, position) for key in paths[position])

    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        self._current = dict(zip((block.key for block in path), self._next_use.pop(), strict=True))
        super()._used(request_id, path, now_s, output_tokens)

    def _priority(self, block: CachedBlock, now_s: float) -> float:
        return -self._current[block.key]
