"""What vLLM's own order, least recently used, would have hit: a replay beside the real cache, of page names alone."""

from collections import OrderedDict
from collections.abc import Sequence

from vllm_novakv.prefix.pages import PageMap


class ShadowLRU:
    """An LRU cache of page names that sees the requests of the real one.

    An estimate, not a copy: a request leaves its pages when it ends, with the places where later requests can be
    expected to resume; what running requests hold is subtracted from the capacity.

    Args:
        pages: of the server.

    Source: engineering choice.
    """

    def __init__(self, pages: PageMap) -> None:
        self._map = pages
        # the page used longest ago comes first
        self._cached: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        """Cached pages."""
        return len(self._cached)

    def clear(self) -> None:
        """Forget everything, as vLLM does when its prefix cache is reset."""
        self._cached.clear()

    def hit_tokens(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """Tokens that would have been found.

        Args:
            hashes: of the request's blocks.
            max_tokens: the longest hit allowed, the prompt without its last token.
        """
        return self._hit(hashes, self._shared(hashes, max_tokens))

    def served(self, hashes: Sequence[bytes], num_prompt_tokens: int, num_tokens: int, capacity_pages: int) -> None:
        """A request has ended: cache its pages and let those used longest ago go.

        Args:
            hashes: of its blocks.
            num_prompt_tokens: of its prompt.
            num_tokens: computed tokens, generated ones included.
            capacity_pages: pages that are not in use by running requests.
        """
        shared = self._shared(hashes, num_prompt_tokens - 1)
        boundaries = {
            self._map.floor(num_prompt_tokens - 1),
            self._map.floor(num_prompt_tokens),
            self._map.floor(num_tokens),
            shared,
            self._hit(hashes, shared),
        }
        num_chunks = len(self._map.chunk_keys(hashes, num_tokens))
        pages = self._map.pages_for_hits(
            boundary for boundary in boundaries if boundary <= num_chunks * self._map.chunk_tokens
        )
        names = dict.fromkeys((page[0], self._map.page_hash(hashes, page)) for page in pages)
        for name in names.keys() & self._cached.keys():
            del self._cached[name]
        self._cached.update(names)
        while len(self._cached) > max(capacity_pages, 0):
            self._cached.popitem(last=False)

    def _shared(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """Leading tokens, whole chunks, that all groups of full attention have."""
        length = min(self._map.floor(max_tokens), len(hashes) // self._map.hashes_per_chunk * self._map.chunk_tokens)
        for group, shape in enumerate(self._map.groups):
            if shape.window_tokens is not None:
                continue
            number = 0
            while (number + 1) * shape.block_tokens <= length and self._has(hashes, group, number):
                number += 1
            length = min(length, self._map.floor(number * shape.block_tokens))
        return length

    def _hit(self, hashes: Sequence[bytes], length: int) -> int:
        windowed = [group for group, shape in enumerate(self._map.groups) if shape.window_tokens is not None]
        while length > 0:
            missing = next(
                (
                    (group, number)
                    for group in windowed
                    for number in self._map.groups[group].blocks_for_hit(length)
                    if not self._has(hashes, group, number)
                ),
                None,
            )
            if missing is None:
                return length
            # no boundary after the missing page that has it in its window can be hit
            length = self._map.floor(min(length - 1, missing[1] * self._map.groups[missing[0]].block_tokens))
        return 0

    def _has(self, hashes: Sequence[bytes], group: int, number: int) -> bool:
        return (group, self._map.page_hash(hashes, (group, number))) in self._cached
