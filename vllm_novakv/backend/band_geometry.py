"""Which 16-token blocks of a sequence the BF16 band holds: pure arithmetic on positions, nothing else.

A query at position p attends exactly (from BF16) to key j when j < sink or j > p - recent, and to the quantized
history otherwise. That depends on positions alone, so an answer does not depend on chunking, batching, prefix hits or
preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_novakv.codec.layout import BLOCK_TOKENS as BOUNDARY_TOKENS
from vllm_novakv.config import BAND_BLOCK_TOKENS


@dataclass(frozen=True)
class BandGeometry:
    """Block arithmetic of one band.

    A sequence can be resumed at multiples of 128 tokens (the history's blocks), short of its last token, which is
    recomputed for its logits. The band therefore holds its window back to ``recent`` tokens before the latest such
    boundary, so that a later request which shares the prefix finds every block that its first query reads.

    Args:
        sink_tokens: first tokens held, a multiple of 16.
        recent_tokens: latest tokens attended exactly, a multiple of 16.

    Example:
        With sink 64 and recent 256, after 1,000 tokens the boundary is 896 and the window starts at token 640:

        >>> geometry = BandGeometry(sink_tokens=64, recent_tokens=256)
        >>> geometry.num_sink_blocks, geometry.window_start_block(1000)
        (4, 40)
        >>> geometry.is_held(3, 1000), geometry.is_held(4, 1000), geometry.is_held(40, 1000)
        (True, False, True)
    """

    sink_tokens: int
    recent_tokens: int

    @property
    def num_sink_blocks(self) -> int:
        """Blocks that hold the sink."""
        return self.sink_tokens // BAND_BLOCK_TOKENS

    @property
    def max_window_blocks(self) -> int:
        """Most blocks that the window spans: ``recent`` before a boundary and up to 128 tokens after it."""
        return (self.recent_tokens + BOUNDARY_TOKENS) // BAND_BLOCK_TOKENS

    def window_start_block(self, num_tokens: int) -> int:
        """First block of the window once ``num_tokens`` tokens are stored."""
        return self.tail(max(0, num_tokens - 1)).start

    def tail(self, num_tokens: int) -> range:
        """Blocks of the latest ``recent`` tokens before the last 128-token boundary that is at most ``num_tokens``."""
        boundary = num_tokens // BOUNDARY_TOKENS * BOUNDARY_TOKENS
        return range(max(0, boundary - self.recent_tokens) // BAND_BLOCK_TOKENS, boundary // BAND_BLOCK_TOKENS)

    def is_held(self, block: int, num_tokens: int) -> bool:
        """Whether block number ``block`` of a sequence must be held once ``num_tokens`` tokens are stored."""
        return block < self.num_sink_blocks or block >= self.window_start_block(num_tokens)

    def blocks_for_hit(self, num_tokens: int) -> tuple[range, range]:
        """Sink and tail blocks that a request resuming at ``num_tokens`` (a multiple of 128) reads."""
        tail = self.tail(num_tokens)
        return range(min(self.num_sink_blocks, tail.start)), tail

    def steady_blocks(self, num_tokens: int) -> int:
        """Most blocks that a decoding request of up to ``num_tokens`` tokens holds.

        It holds one more for a step or two in 128: a token after a boundary is stored before the window moves on.
        """
        return min(-(-num_tokens // BAND_BLOCK_TOKENS), self.num_sink_blocks + self.max_window_blocks)

    def peak_blocks(self, num_tokens: int, max_steps_in_flight: int) -> int:
        """Most blocks that a request of up to ``num_tokens`` tokens holds while its prompt is computed.

        While a chunk runs, both the window before it (its first queries read it) and the one after it are held; one
        more for each further step that is scheduled before the first has finished.
        """
        windows = (1 + max_steps_in_flight) * self.max_window_blocks
        return min(-(-num_tokens // BAND_BLOCK_TOKENS), self.num_sink_blocks + windows)
