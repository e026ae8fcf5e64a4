"""Which cache pages a prefix hit needs, by group: the common ground of pins and of the shadow replay.

A group of full attention needs every block of the prefix; a group with a window needs its first blocks (the sink) and
those of the window before the boundary. A request resumes only where every group has what it needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Page = tuple[int, int]
"""Group, number of the block in the sequence."""


@dataclass(frozen=True)
class PageGroup:
    """One KV cache group.

    Args:
        block_tokens: tokens per block.
        window_tokens: tokens before the boundary that are needed; None: all.
        sink_tokens: tokens from the start that are needed beside the window.
    """

    block_tokens: int
    window_tokens: int | None = None
    sink_tokens: int = 0

    def blocks_for_hit(self, num_tokens: int) -> Iterator[int]:
        """Numbers of the blocks that a request resuming at `num_tokens` reads, the last one first.

        Example: blocks of 16, a window of 64 and a sink of 32; a hit of 256 tokens needs 15, 14, 13, 12 and 1, 0.
        """
        end = num_tokens // self.block_tokens
        if self.window_tokens is None:
            yield from range(end - 1, -1, -1)
            return
        start = max(0, num_tokens - self.window_tokens) // self.block_tokens
        yield from range(end - 1, start - 1, -1)
        yield from range(min(-(-self.sink_tokens // self.block_tokens), start) - 1, -1, -1)


@dataclass(frozen=True)
class PageMap:
    """All groups of a server.

    Args:
        groups: in vLLM's order.
        chunk_tokens: tokens between two places where a request can resume.
        hash_tokens: tokens per block hash of a request.

    Example: hashes of 16 tokens and chunks of 128: chunk i ends with hash 8·i + 7, which stands for tokens 0 to
    128·i + 127.
    """

    groups: tuple[PageGroup, ...]
    chunk_tokens: int
    hash_tokens: int

    @property
    def hashes_per_chunk(self) -> int:
        """Block hashes of a request per chunk."""
        return self.chunk_tokens // self.hash_tokens

    def floor(self, num_tokens: int) -> int:
        """The last place at or before `num_tokens` where a request can resume."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens

    def chunk_keys(self, hashes: Sequence[bytes], num_tokens: int) -> tuple[bytes, ...]:
        """Keys of the whole chunks among the first `num_tokens` tokens: the hash at the end of each."""
        step = self.hashes_per_chunk
        return tuple(hashes[step - 1 : num_tokens // self.hash_tokens : step])

    def page_hash(self, hashes: Sequence[bytes], page: Page) -> bytes:
        """The hash under which a page is cached: that of all tokens up to its end."""
        group, number = page
        return hashes[(number + 1) * self.groups[group].block_tokens // self.hash_tokens - 1]

    def pages_for_hit(self, num_tokens: int) -> list[Page]:
        """Pages that a hit of `num_tokens` tokens, a multiple of the chunk, reads."""
        return [(i, number) for i, group in enumerate(self.groups) for number in group.blocks_for_hit(num_tokens)]

    def pages_for_hits(self, boundaries: Iterable[int]) -> list[Page]:
        """Pages of several hits without repetition, in the order in which a finished request frees them."""
        wanted: dict[Page, None] = {}
        for boundary in sorted(set(boundaries), reverse=True):
            wanted.update(dict.fromkeys(self.pages_for_hit(boundary)))
        return sorted(wanted, key=lambda page: (page[0], -page[1]))
