"""Which 16-token blocks of a sequence the BF16 band holds: pure arithmetic on positions, nothing else.

A query at position p of a request whose prompt has P tokens attends exactly (from BF16) to key j when j < sink or
j > p - w, and to the quantized history otherwise. The window w is ``prompt_recent`` for a token of the prompt (p < P)
and ``recent``, which is no wider, for a generated one. So an answer depends on the request's tokens and prompt length,
not on chunking, batching, preemption or prefix hits. One exception: a hit that reaches into tokens which an earlier
request generated reuses their keys and values as they were computed then.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_novakv.codec.layout import BLOCK_TOKENS as BOUNDARY_TOKENS
from vllm_novakv.config import BAND_BLOCK_TOKENS


@dataclass(frozen=True)
class BandGeometry:
    """Block arithmetic of one band.

    A sequence can be resumed at multiples of 128 tokens (the history's blocks), and of 16 with ``reuse_within_blocks``,
    short of its last token, which is recomputed for its logits. While its prompt is computed, the band therefore holds
    ``prompt_recent`` tokens before the latest multiple of 128: the next query reads them, and so does the first one of
    a later request that shares the prefix. Afterwards it holds ``recent`` tokens before that boundary; the others are
    freed, but stay cached.

    Args:
        sink_tokens: first tokens held, a multiple of 16.
        recent_tokens: latest tokens that a generated token attends exactly, a multiple of 16.
        prompt_recent_tokens: the same for a token of the prompt; a multiple of 16, at least ``recent_tokens``.

    Example:
        With sink 64, recent 256 and prompt_recent 512, after 1,000 tokens the boundary is 896. The window starts at
        token 384 if the prompt goes on, and at token 640 if it has ended:

        >>> geometry = BandGeometry(sink_tokens=64, recent_tokens=256, prompt_recent_tokens=512)
        >>> geometry.window_start_block(1000, 2000), geometry.window_start_block(1000, 1000)
        (24, 40)
        >>> geometry.num_sink_blocks, geometry.tail(1000)
        (4, range(24, 56))
        >>> geometry.is_required(3, 1000), geometry.is_required(4, 1000), geometry.is_required(24, 1000)
        (True, False, True)
    """

    sink_tokens: int
    recent_tokens: int
    prompt_recent_tokens: int

    @property
    def num_sink_blocks(self) -> int:
        """Blocks that hold the sink."""
        return self.sink_tokens // BAND_BLOCK_TOKENS

    def window_start_block(self, num_tokens: int, num_prompt_tokens: int | None = None) -> int:
        """First block of the window once ``num_tokens`` tokens are stored; the window is wide until the prompt ends.

        Args:
            num_tokens: tokens stored; the next query is at this position.
            num_prompt_tokens: tokens of the prompt; ``None`` where it is not known, for the wide window.
        """
        is_prompt = num_prompt_tokens is None or num_tokens < num_prompt_tokens
        recent = self.prompt_recent_tokens if is_prompt else self.recent_tokens
        boundary = max(0, num_tokens - 1) // BOUNDARY_TOKENS * BOUNDARY_TOKENS
        return max(0, boundary - recent) // BAND_BLOCK_TOKENS

    def tail(self, num_tokens: int) -> range:
        """Blocks of the ``prompt_recent`` tokens before the last 128-token boundary that is at most ``num_tokens``."""
        return self._window_before(num_tokens // BOUNDARY_TOKENS * BOUNDARY_TOKENS)

    def _window_before(self, position: int) -> range:
        """Blocks of the ``prompt_recent`` tokens before a position, a multiple of 16."""
        return range(max(0, position - self.prompt_recent_tokens) // BAND_BLOCK_TOKENS, position // BAND_BLOCK_TOKENS)

    def is_required(self, block: int, num_tokens: int) -> bool:
        """Whether an allocation up to ``num_tokens`` tokens must make block number ``block`` a real one.

        The window is the wide one: the block may be read by the prompt's next chunk or by a later request's.
        """
        return block < self.num_sink_blocks or block >= self.window_start_block(num_tokens)

    def blocks_for_hit(self, num_tokens: int) -> tuple[range, range]:
        """Sink and tail blocks that a request resuming at ``num_tokens`` (a multiple of 16) reads."""
        tail = self._window_before(num_tokens)
        return range(min(self.num_sink_blocks, tail.start)), tail

    def steady_blocks(self, num_tokens: int) -> int:
        """Most blocks that a decoding request of up to ``num_tokens`` tokens holds.

        It holds one more for a step or two in 128: a token after a boundary is stored before the window moves on.
        """
        return self._held_blocks(num_tokens, 1, self.recent_tokens)

    def peak_blocks(self, num_tokens: int, num_windows: int) -> int:
        """Most blocks that a request of up to ``num_tokens`` tokens holds while its prompt is computed.

        While a chunk runs, both the window before it (its first queries read it) and the one after it are held; one
        more for each further step that is scheduled before the first has finished. A prompt that is one chunk has no
        window before it: ``num_windows`` is 1.
        """
        return self._held_blocks(num_tokens, num_windows, self.prompt_recent_tokens)

    def _held_blocks(self, num_tokens: int, num_windows: int, recent: int) -> int:
        # a window spans `recent` tokens before a boundary and up to 128 after it
        window = (recent + BOUNDARY_TOKENS) // BAND_BLOCK_TOKENS
        return min(-(-num_tokens // BAND_BLOCK_TOKENS), self.num_sink_blocks + num_windows * window)
