"""Which cached blocks go first: the interface that a cache manager asks.

A block's key stands for its tokens and for all tokens before it, as vLLM's block hashes do, so the cached blocks form a
tree. Only a block without cached children is evicted, because a block is of no use without those before it.

    policy.begin(request_id, keys, now_s)     a request arrives: its blocks must stay
    policy.evict(count, now_s)                room is needed: these blocks go
    policy.end(request_id, keys, now_s, ...)  the request is done: its blocks are cached and may go
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillCost:
    """Relative cost of computing a block again: 1 + depth / break_even, depth being the tokens before the block.

    Projections cost the same at every depth; attention grows with it and costs as much at `break_even_tokens`.

    Example: with break_even_tokens = 28,000 a block at depth 56,000 costs three times one at the start.

    Args:
        break_even_tokens: 2 · parameters / (4 · layers · heads · head_size), about 28,000 for a model of 8 billion
            parameters with 36 layers of 4,096; None: every block costs 1.
        block_tokens: tokens per block.

    Raises:
        ValueError: a number is not positive.

    Source: engineering choice: floating-point operations of a dense transformer.
    """

    break_even_tokens: float | None = None
    block_tokens: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or (self.break_even_tokens is not None and not self.break_even_tokens > 0):
            raise ValueError(f"{self} needs positive numbers")

    def of_block(self, index: int) -> float:
        """Cost of the block that has `index` blocks before it."""
        if self.break_even_tokens is None:
            return 1.0
        return 1.0 + index * self.block_tokens / self.break_even_tokens


class CachedBlock:
    """A cached block in the tree.

    Attributes:
        key: the caller's.
        parent: None for the first block of a prompt.
        index: blocks before it.
        num_children: cached blocks that follow it directly.
        frequency: requests that used it since it was cached.
        priority: what the policy gave it; the lowest goes first.
        version: changes with the priority.
    """

    __slots__ = ("frequency", "index", "key", "num_children", "parent", "priority", "version")

    def __init__(self, key: Hashable, parent: "CachedBlock | None") -> None:
        self.key = key
        self.parent = parent
        self.index: int = 0 if parent is None else parent.index + 1
        self.num_children = 0
        self.frequency = 0
        self.priority = 0.0
        self.version = 0


class RetentionPolicy(ABC):
    """Keeps the tree of cached blocks and says which of them to evict. Not thread-safe: one cache manager, one policy.

    Blocks of running requests and pinned blocks are never chosen. A policy sees what happened so far and nothing else.
    """

    def __init__(self) -> None:
        self._blocks: dict[Hashable, CachedBlock] = {}
        self._held: Counter[Hashable] = Counter()
        self._running: dict[Hashable, tuple[Hashable, ...]] = {}
        self._pins: dict[Hashable, tuple[Hashable, ...]] = {}

    def __len__(self) -> int:
        """Cached blocks."""
        return len(self._blocks)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a block is cached."""
        return key in self._blocks

    def is_held(self, key: Hashable) -> bool:
        """Whether a running request or a pin keeps a block, cached or not."""
        return key in self._held

    def begin(self, request_id: Hashable, keys: Sequence[Hashable], now_s: float) -> None:
        """A request arrives; its blocks stay until `end`.

        Args:
            request_id: any name that no running request has.
            keys: of its prompt's blocks, the first block first, cached or not.
            now_s: seconds on a clock that does not go back.

        Raises:
            ValueError: a running request has this name.
        """
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already; end it first")
        self._running[request_id] = tuple(keys)
        self._held.update(self._running[request_id])
        self._arrived(request_id, self._running[request_id], now_s)

    def end(self, request_id: Hashable, keys: Sequence[Hashable], now_s: float, output_tokens: int = 0) -> None:
        """A request is done or was aborted; the blocks that it leaves in the cache may be evicted.

        Args:
            request_id: as given to `begin`.
            keys: of its blocks that are in the cache, the first block first, without gaps.
            now_s: seconds.
            output_tokens: tokens it generated, as far as known.

        Raises:
            KeyError: no running request has this name.
        """
        begun = self._running.pop(request_id)
        self._unhold(begun)
        path: list[CachedBlock] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                block = CachedBlock(key, path[-1] if path else None)
                self._blocks[key] = block
                if path:
                    path[-1].num_children += 1
            block.frequency += 1
            path.append(block)
        self._used(request_id, path, now_s, output_tokens)
        # blocks that this request held and did not use up to its end may be candidates again
        self._offer(begun)

    def pin(self, name: Hashable, keys: Sequence[Hashable], max_pinned_blocks: int) -> None:
        """Keep blocks, once they are cached, until `unpin`.

        Args:
            name: any name that no pin has.
            keys: of the blocks, the first block of the prompt first, cached or not.
            max_pinned_blocks: bound of all different pinned blocks together.

        Raises:
            ValueError: the name is taken, or the pins would exceed the bound.
        """
        if name in self._pins:
            raise ValueError(f"pin {name!r} exists; unpin it first")
        pinned = len(set(keys).union(*self._pins.values()))
        if pinned > max_pinned_blocks:
            raise ValueError(
                f"pin {name!r} of {len(keys)} blocks makes {pinned} pinned blocks, {max_pinned_blocks} are allowed; "
                "pin a shorter prefix or unpin another one"
            )
        self._pins[name] = tuple(keys)
        self._held.update(self._pins[name])

    def unpin(self, name: Hashable) -> None:
        """Treat the blocks of a pin like any others again.

        Raises:
            KeyError: there is no such pin.
        """
        keys = self._pins.pop(name)
        self._unhold(keys)
        self._offer(keys)

    @property
    def num_pinned(self) -> int:
        """Different pinned blocks, cached or not."""
        return len(set().union(*self._pins.values()))

    def discard(self, key: Hashable) -> None:
        """A block has left the cache for another reason, and with it, as far as use goes, all that follow it.

        Args:
            key: of a cached block without cached children.

        Raises:
            ValueError: the block is not cached or has cached children.
        """
        block = self._blocks.get(key)
        if block is None or block.num_children:
            raise ValueError(f"block {key!r} is not cached or not the last of its prompt; discard later blocks first")
        self._drop(block)

    @abstractmethod
    def evict(self, count: int, now_s: float) -> list[Hashable]:
        """Choose blocks to evict; they are no longer cached when this returns.

        Args:
            count: blocks wanted.
            now_s: seconds.

        Returns:
            Up to `count` keys, fewer only if all other blocks are in use.
        """

    @abstractmethod
    def _arrived(self, request_id: Hashable, keys: Sequence[Hashable], now_s: float) -> None:
        """A request with these blocks has arrived."""

    @abstractmethod
    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        """A request that used these blocks, all of its path, has ended."""

    @abstractmethod
    def _freed(self, block: CachedBlock) -> None:
        """A block may have become a candidate: a request or its last child has left it."""

    def _unhold(self, keys: Sequence[Hashable]) -> None:
        self._held.subtract(keys)
        for key in keys:
            if not self._held[key]:
                del self._held[key]

    def _offer(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._freed(block)

    def _is_candidate(self, block: CachedBlock) -> bool:
        return not block.num_children and block.key not in self._held and self._blocks.get(block.key) is block

    def _drop(self, block: CachedBlock) -> None:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.num_children -= 1
            self._freed(block.parent)


def policy_names() -> tuple[str, ...]:
    """Names that `make_policy` takes."""
    return ("lru", "lfu", "gdsf", "expected-reuse")


def make_policy(name: str, cost: PrefillCost | None = None) -> RetentionPolicy:
    """A new policy by name.

    Args:
        name: one of `policy_names`.
        cost: of computing a block again, for the policies that weigh it.

    Raises:
        ValueError: there is no such policy.
    """
    # imported here because they build on this module
    from vllm_novakv.prefix.classic_policies import DecayedLFUPolicy, GDSFPolicy, LRUPolicy
    from vllm_novakv.prefix.retention import ExpectedReusePolicy

    makers: dict[str, Callable[[], RetentionPolicy]] = {
        "lru": LRUPolicy,
        "lfu": DecayedLFUPolicy,
        "gdsf": lambda: GDSFPolicy(cost),
        "expected-reuse": lambda: ExpectedReusePolicy(cost),
    }
    if name not in makers:
        raise ValueError(f"policy {name!r} is unknown; choose one of {', '.join(policy_names())}")
    return makers[name]()
