"""The prefix index beside a running cache: what a cache manager tells it, and what it answers.

    index.arrived(request)          blocks of its prompt stay
    index.admitted(id, hit_tokens)  counted, beside what LRU would have hit
    index.evict(count)              keys of the chunks that go next
    index.ended(id, ...)            its chunks are cached and may go

A chunk is what lies between two places where a request can resume (`PageMap.chunk_tokens`), named by the hash of all
tokens up to its end. The index holds names and counts, never keys or values: whatever it answers, a hit is found by
vLLM's own table.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_novakv.prefix.pages import PageMap
from vllm_novakv.prefix.pins import PinLimitError, PinTable
from vllm_novakv.prefix.policy import RetentionPolicy
from vllm_novakv.prefix.shadow import ShadowLRU


@dataclass(frozen=True)
class Arrival:
    """A request as it comes in.

    Attributes:
        request_id: unique among running requests.
        hashes: of its blocks; the same list grows while tokens are generated.
        prompt: token ids; None if the request has none or they must not be stored.
        num_prompt_tokens: of the prompt.
        pin: name under which the prompt shall be pinned, if any.
        unpin: name of the pin that shall go, if any.
    """

    request_id: str
    hashes: Sequence[bytes]
    prompt: Sequence[int] | None
    num_prompt_tokens: int
    pin: str | None = None
    unpin: str | None = None


@dataclass
class Counts:
    """Totals since the start.

    Attributes:
        requests: admitted requests.
        prompt_tokens: of their prompts.
        hit_tokens: of those, found in the cache.
        lru_hit_tokens: what `ShadowLRU` would have found.
        refused_pins: pins that requests asked for in vain.
        evicted_chunks: chunks that the policy gave up.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    lru_hit_tokens: int = 0
    refused_pins: int = 0
    evicted_chunks: int = 0


class ServedIndex:
    """Retention policy, pins and shadow replay of one cache. Not thread-safe: the scheduler's thread alone calls it.

    Args:
        policy: a new one.
        pages: of the server.
        pins: of the server.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        pages: PageMap,
        pins: PinTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = pages
        self.pins = pins
        self.counts = Counts()
        self.prompts: deque[Sequence[int]] = deque(maxlen=1024)
        """Prompts that were admitted and nobody has taken yet, for the statistics."""
        self._policy = policy
        self._shadow = ShadowLRU(pages)
        self._clock = clock
        self._running: dict[str, Arrival] = {}
        self._admitted: set[str] = set()
        # the block hashes of each chunk that is cached or held
        self._hashes: dict[bytes, tuple[bytes, ...]] = {}
        # chunks that a block hash lies in: several where prompts part inside a chunk
        self._num_chunks_of: dict[bytes, int] = {}

    @property
    def num_chunks(self) -> int:
        """Cached chunks, as far as the index knows."""
        return len(self._policy)

    @property
    def num_running(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._running)

    def is_wanted(self, page_hash: bytes) -> bool:
        """Whether a page lies in a chunk that is cached, or that a running request or a pin holds."""
        return page_hash in self._num_chunks_of

    def arrived(self, arrival: Arrival) -> str | None:
        """A request comes in; its prompt's chunks stay until `ended`.

        Returns:
            Why its pin was refused, if it was.
        """
        keys = self.pages.chunk_keys(arrival.hashes, arrival.num_prompt_tokens)
        self._policy.begin(arrival.request_id, keys, self._clock())
        self._running[arrival.request_id] = arrival
        self._remember(keys, arrival.hashes)
        for pin in self.pins.matching(arrival.prompt) if arrival.prompt is not None else ():
            self._pin(pin.name, arrival.hashes, self.pages.floor(len(pin.tokens)), is_configured=True)
        if arrival.unpin is not None:
            self._unpin(arrival.unpin)
        if arrival.pin is not None:
            try:
                self._pin(arrival.pin, arrival.hashes, arrival.num_prompt_tokens, is_configured=False)
            except PinLimitError as error:
                self.counts.refused_pins += 1
                return str(error)
        return None

    def admitted(self, request_id: str, hit_tokens: int) -> None:
        """A request begins to run; only the first time counts, as in vLLM's own metrics."""
        arrival = self._running.get(request_id)
        if arrival is None or request_id in self._admitted:
            return
        self._admitted.add(request_id)
        self.counts.requests += 1
        self.counts.prompt_tokens += arrival.num_prompt_tokens
        self.counts.hit_tokens += hit_tokens
        self.counts.lru_hit_tokens += self._shadow.hit_tokens(arrival.hashes, arrival.num_prompt_tokens - 1)
        if arrival.prompt is not None:
            self.prompts.append(arrival.prompt)

    def ended(self, request_id: str, num_chunks: int, num_tokens: int, capacity_pages: int) -> None:
        """A request is done or was aborted.

        Args:
            request_id: as it arrived; an unknown one is ignored.
            num_chunks: of its chunks that are in the cache, from the first one on, without gaps.
            num_tokens: that were computed.
            capacity_pages: pages of the pool that no running request holds.
        """
        arrival = self._running.pop(request_id, None)
        if arrival is None:
            return
        was_admitted = request_id in self._admitted
        self._admitted.discard(request_id)
        begun = self.pages.chunk_keys(arrival.hashes, arrival.num_prompt_tokens)
        length = num_chunks * self.pages.chunk_tokens
        keys = self.pages.chunk_keys(arrival.hashes, length) if was_admitted else ()
        self._remember(keys, arrival.hashes)
        num_output_tokens = max(num_tokens - arrival.num_prompt_tokens, 0)
        self._policy.end(request_id, keys, self._clock(), num_output_tokens)
        self._forget(begun)
        if was_admitted:
            self._shadow.served(arrival.hashes, arrival.num_prompt_tokens, num_tokens, capacity_pages)

    def evict(self, count: int) -> list[tuple[bytes | None, ...]]:
        """Give up chunks.

        Args:
            count: chunks wanted.

        Returns:
            Block hashes of up to `count` chunks, the first to go first, with None for those that another chunk needs;
            fewer only if running requests or pins keep all others.
        """
        # the policy's keys are those given to it below
        keys = [key for key in self._policy.evict(count, self._clock()) if isinstance(key, bytes)]
        self.counts.evicted_chunks += len(keys)
        return self._forget(keys)

    def reset(self) -> None:
        """The cache was emptied; what was learned from past requests stays."""
        self.evict(len(self._policy))
        self._shadow.clear()

    def _remember(self, keys: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        step, num_chunks_of = self.pages.hashes_per_chunk, self._num_chunks_of
        for index, key in enumerate(keys):
            if key not in self._hashes:
                own = tuple(hashes[index * step : (index + 1) * step])
                self._hashes[key] = own
                for page_hash in own:
                    num_chunks_of[page_hash] = num_chunks_of.get(page_hash, 0) + 1

    def _forget(self, keys: Sequence[bytes]) -> list[tuple[bytes | None, ...]]:
        """Drop chunks that are neither cached nor held; returns the hashes of each that nothing else needs."""
        return [
            tuple(self._release(page_hash) for page_hash in self._hashes.pop(key))
            for key in keys
            if key in self._hashes and key not in self._policy and not self._policy.is_held(key)
        ]

    def _release(self, page_hash: bytes) -> bytes | None:
        num_chunks = self._num_chunks_of.pop(page_hash) - 1
        if num_chunks:
            self._num_chunks_of[page_hash] = num_chunks
            return None
        return page_hash

    def _pin(self, name: str, hashes: Sequence[bytes], num_tokens: int, is_configured: bool) -> None:
        keys = self.pins.bind(name, hashes, num_tokens, is_configured)
        if keys is None:
            return
        self._remember(keys, hashes)
        # the limit is the table's, in pages
        self._policy.pin(name, keys, 1 << 62)

    def _unpin(self, name: str) -> None:
        try:
            keys = self.pins.unbind(name)
        except KeyError:
            self.counts.refused_pins += 1
            return
        self._policy.unpin(name)
        self._forget(keys)
