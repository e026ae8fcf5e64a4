"""Block manager of the packed history: vLLM's for full attention, and hits that end inside a block.

A block of 128 tokens is cached under the hash of all tokens up to its end, so a request that parts from another inside
it would not find it. After `resume_within_blocks` a block also gets a name for every 16 tokens of it. A request that
finds one takes a copy of the block, by vLLM's own copy-on-write: the worker copies the page before the step's kernels
run, both pages are referenced until the copy is scheduled, and the request overwrites what follows the shared tokens.

vLLM switches this on for state-space models alone; the switch is the coordinator's ``enable_partial_hash_hits``, which
is read at each look-up. Can go when vLLM offers it for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_novakv.backend.band_manager import BandManager
from vllm_novakv.backend.compat import FullAttentionManager, KVCacheBlock, KVCacheManager, Request
from vllm_novakv.config import BAND_BLOCK_TOKENS


class HistoryManager(FullAttentionManager):
    """Manager of one `NovaHistorySpec` group; vLLM's own unless hits may end inside a block."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        # Request id -> parts of 16 tokens, from its start, that have a name.
        self._num_named: dict[str, int] = {}
        # Block id -> first token (position in the sequence) among those named in the step that is being scheduled.
        self._written_from: dict[int, int] = {}

    @property
    def resumes_within_blocks(self) -> bool:
        """Whether a hit may end inside a block."""
        return bool(self.cache_hit_alignment_tokens < self.block_size)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that the next allocation takes from the pool; more than there are if the request must wait a step.

        The copy is made before the step's kernels run, so tokens that the same step writes cannot be copied. vLLM's
        manager of state-space layers lets such a request wait in the same way.
        """
        if self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens):
            written_from = self._written_from.get(new_computed_blocks[-1].block_id)
            if written_from is not None and written_from < num_local_computed_tokens:
                return int(self.block_pool.num_gpu_blocks + 1)
        return int(
            super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap=apply_admission_cap,
                prefill_end=prefill_end,
            )
        )

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Register the hashes of full blocks and, where hits may end inside a block, the names of their parts."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        if self.resumes_within_blocks:
            self._name_parts(request, num_cached, num_tokens)

    def _name_parts(self, request: Request, first_block: int, num_tokens: int) -> None:
        """Name the parts of the request's own blocks, ``first_block`` and later, up to ``num_tokens`` tokens.

        Example: with 300 tokens, block 2 holds tokens 256 to 299 and gets names at 288 and 272; when it is full, vLLM
        replaces them by its hash at 384, and it gets names at 368, 352, ..., 272.
        """
        part_tokens = self.cache_hit_alignment_tokens
        parts_per_block = self.block_size // part_tokens
        start = max(self._num_named.get(request.request_id, 0), first_block * parts_per_block)
        end = min(num_tokens // part_tokens, len(request.block_hashes))
        if end <= start:
            return
        self._num_named[request.request_id] = end
        blocks = self.req_to_blocks[request.request_id]
        for number in range(start // parts_per_block, -(-end // parts_per_block)):
            block, first_part = blocks[number], number * parts_per_block
            written_from = max(start, first_part) * part_tokens
            self._written_from[block.block_id] = min(self._written_from.get(block.block_id, written_from), written_from)
            # the longest first: vLLM drops shorter names when a block gets a longer one
            for part in range(min(end, first_part + parts_per_block - 1), first_part, -1):
                self.block_pool.cache_partial_block(
                    request, block, part * part_tokens, self.kv_cache_group_id, self.block_size
                )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Drop the request and return its blocks, which vLLM frees."""
        self._num_named.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    def new_step_starts(self) -> None:
        """What was named so far is written before the copies of the step that is scheduled next."""
        self._written_from.clear()


def resume_within_blocks(manager: KVCacheManager) -> None:
    """Let prefix hits of a cache manager end at multiples of 16 tokens, the band's blocks, instead of 128.

    Args:
        manager: vLLM's, with prefix caching; no request has used it yet.

    Raises:
        ValueError: the pool has no block to spare for a copy.
        NotImplementedError: layers that are not quantized have blocks of another size.
    """
    coordinator, pool = manager.coordinator, manager.block_pool
    managers = coordinator.single_type_managers
    sizes = {single.block_size for single in managers if not isinstance(single, HistoryManager)}
    if others := (sizes | {pool.hash_block_size}) - {BAND_BLOCK_TOKENS}:
        raise NotImplementedError(
            f"prefix_index.reuse_within_blocks: layers that are not quantized have blocks of {min(others)} tokens, "
            f"they must be of {BAND_BLOCK_TOKENS}; drop the setting"
        )
    needed = sum(_most_blocks(single, manager.max_model_len) for single in managers)
    num_copies = sum(isinstance(single, HistoryManager) for single in managers)
    if (num_blocks := pool.num_gpu_blocks - 1) < needed + num_copies:
        raise ValueError(
            f"prefix_index.reuse_within_blocks: the longest request takes {needed} of {num_blocks} blocks, and a copy "
            f"of its last one {num_copies} more; give the cache more memory, lower --max-model-len or drop the setting"
        )
    coordinator.enable_partial_hash_hits = True
    for single in managers:
        single.cache_hit_alignment_tokens = BAND_BLOCK_TOKENS


def _most_blocks(manager: Any, num_tokens: int) -> int:
    """Most blocks that a request of ``num_tokens`` tokens takes in one group."""
    if isinstance(manager, BandManager):
        return manager.kv_cache_spec.peak_blocks(num_tokens, is_resumed=True)
    num_blocks = -(-num_tokens // manager.block_size)
    return min(num_blocks, manager.max_admission_blocks_per_request or num_blocks)
