"""vLLM's queue of free blocks, with a say in which cached block is given away first."""

from __future__ import annotations

from collections.abc import Callable

from vllm_novakv.backend.compat import FreeKVCacheBlockQueue, KVCacheBlock


class RetentionQueue(FreeKVCacheBlockQueue):
    """Takes the place of a pool's queue, with all its blocks.

    Only blocks that no request references are in the queue, so nothing in use can be chosen. Blocks without a cached
    prefix go first, as in vLLM's queue; what it counts and accepts is unchanged.

    Args:
        queue: the one it replaces.
        choose: takes up to n cached blocks out of this queue and returns them.
        is_pinned: whether a block is given away only when no other is left.
    """

    def __init__(
        self,
        queue: FreeKVCacheBlockQueue,
        choose: Callable[[int], list[KVCacheBlock]],
        is_pinned: Callable[[KVCacheBlock], bool],
    ) -> None:
        # the list's ends and its length: the links between are in the blocks
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self.num_free_blocks = queue.num_free_blocks
        self._choose = choose
        self._is_pinned = is_pinned

    def first(self) -> KVCacheBlock | None:
        """The block that vLLM's queue would give away next."""
        block = self.fake_free_list_head.next_free_block
        return None if block is self.fake_free_list_tail else block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take ``n`` blocks: those without a cached prefix, then chosen ones, then the least recently used."""
        if not n:
            return []
        num_plain = 0
        block = self.fake_free_list_head.next_free_block
        while num_plain < n and block is not self.fake_free_list_tail and block.block_hash is None:
            num_plain += 1
            block = block.next_free_block
        if num_plain == n:
            return super().popleft_n(n)
        blocks = super().popleft_n(num_plain)
        blocks += self._choose(n - num_plain)
        for _ in range(self.num_free_blocks):
            if len(blocks) == n:
                return blocks
            block = self.popleft()
            if self._is_pinned(block):
                self.append(block)
            else:
                blocks.append(block)
        return blocks + super().popleft_n(n - len(blocks))
