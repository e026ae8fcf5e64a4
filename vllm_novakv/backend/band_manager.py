"""Block manager of the BF16 band: which blocks a request holds, and which stay cached for later requests.

vLLM owns every block (reference counts, prefix hashes, eviction, preemption); this manager only decides which entries
of a request's block table are real. The others are vLLM's null block, and their tokens live in the history alone.

Required blocks (always allocated): the sink, and the window back to ``prompt_recent`` tokens before the latest
128-token boundary; once the prompt is computed, it shrinks to ``recent`` tokens. Blocks between are optional: tokens of
a chunk that leave the window inside the chunk. They are attended from the chunk's own keys and values; a block for them
serves only a later request that resumes there. They are allocated
- for a boundary at which another request is already known to have diverged (vLLM's ``shared_prefix_boundary``), and
- while the pool has blocks that hold no cached prefix, where they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm_novakv.backend.compat import (
    BlockHashList,
    BlockPool,
    KVCacheBlock,
    KVCacheSpec,
    Request,
    SingleTypeKVCacheManager,
    init_logger,
    names_per_cached_prefix,
    num_uncached_free_blocks,
    resolve_block_hashes,
)
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.config import BAND_BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm_novakv.backend.specs import NovaBandSpec

logger = init_logger(__name__)


class BandManager(SingleTypeKVCacheManager):
    """Manager of one `NovaBandSpec` group.

    Raises:
        NotImplementedError: at start-up, when vLLM changed the block size to give all layers one page size.
    """

    kv_cache_spec: NovaBandSpec

    def __init__(self, kv_cache_spec: NovaBandSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        if self.block_size != BAND_BLOCK_TOKENS:
            raise NotImplementedError(
                f"vLLM stretched the band's blocks to {self.block_size} tokens to match the pages of layers that are "
                f"not quantized; they must hold {BAND_BLOCK_TOKENS}. Drop the setting skip_layers, or serve this model "
                "without NOVAKV"
            )
        self.geometry = kv_cache_spec.geometry
        # Request id -> first window block when blocks were last freed: everything between sink and it is null.
        self._freed_until: dict[str, int] = {}
        # Request id -> boundaries (tokens) whose tail a later request is expected to need.
        self._boundaries: dict[str, set[int]] = {}
        # Request id -> (first block number, blocks) of its latest allocation, until `cache_blocks` has seen it.
        self._in_allocation: dict[str, tuple[int, list[KVCacheBlock]]] = {}
        # Request id -> optional blocks of its latest step.
        self._optional: dict[str, list[int]] = {}
        self._names_per_block = 1.0
        self._num_uncached_calls = 0
        self._log_sizes()

    def _log_sizes(self) -> None:
        spec = self.kv_cache_spec
        elements = 2 * spec.head_size
        heads = spec.num_layers * spec.num_kv_heads
        # Once, however many groups vLLM makes of the layers. vLLM itself logs how many tokens and requests fit.
        logger.info_once(
            "NOVAKV cache: %.3f bits per element, %d bytes per token of history in %d layers (BF16: %d); BF16 band of "
            "%d first and %d latest tokens (%d for a prompt's tokens), %d blocks of %d tokens a decoding request",
            8 * spec.history_record_bytes / elements,
            heads * spec.history_record_bytes,
            spec.num_layers,
            heads * elements * 2,
            spec.sink_tokens,
            spec.recent_tokens,
            spec.prompt_recent_tokens,
            self.geometry.steady_blocks(spec.max_model_len),
            BAND_BLOCK_TOKENS,
        )
        if self.enable_caching:
            step = max(self.scheduler_block_size, BLOCK_TOKENS)
            logger.info_once(
                "NOVAKV prefix cache: the smallest cacheable prefix is %d tokens, of a prompt of at least %d; longer "
                "ones count in steps of %d",
                step,
                step + 1,
                step,
            )

    @property
    def _step_tokens(self) -> int:
        """Tokens between two places where a request can resume."""
        return min(self.cache_hit_alignment_tokens, BLOCK_TOKENS)

    def _tail(self, num_tokens: int) -> range:
        """Blocks to keep for a request that resumes at the last such place up to ``num_tokens``.

        They reach back far enough for the 128-token boundary before it, where it resumes if the history's part of a
        block is gone.
        """
        end = num_tokens // self._step_tokens * self._step_tokens
        return range(self.geometry.tail(end).start, end // BAND_BLOCK_TOKENS)

    def _num_uncached(self) -> int:
        """Free blocks that hold no cached prefix, estimated.

        Where parts of blocks have names too, the names per block are counted now and then: on average, a call looks at
        256 blocks of the pool.
        """
        if self._step_tokens < BLOCK_TOKENS:
            if self._num_uncached_calls % (self.block_pool.num_gpu_blocks // 256 + 1) == 0:
                self._names_per_block = names_per_cached_prefix(self.block_pool)
            self._num_uncached_calls += 1
        return num_uncached_free_blocks(self.block_pool, self._names_per_block)

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
        """Blocks that the next allocation takes from the pool: required ones, and hits to be taken off the free list.

        With ``apply_admission_cap``, ``num_tokens`` is the whole sequence, and the answer is what it needs at its peak.
        """
        num_evictable = self._get_num_evictable_blocks(new_computed_blocks) if new_computed_blocks else 0
        held = self.req_to_blocks.get(request_id) or new_computed_blocks
        if apply_admission_cap:
            peak = self.kv_cache_spec.peak_blocks(num_tokens, is_resumed=total_computed_tokens > 0)
            num_held = sum(not block.is_null for block in held)
            return max(peak - num_held, 0) + num_evictable
        num_blocks = -(-num_tokens // self.block_size)
        # fifteen decode steps of sixteen
        if num_blocks <= len(held):
            return num_evictable
        required = sum(self.geometry.is_required(block, num_tokens) for block in range(len(held), num_blocks))
        return required + num_evictable

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take over the blocks of a prefix hit; the hole between sink and tail is null already."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._boundaries.setdefault(request_id, set()).add(num_local_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Extend the request's blocks to ``num_tokens`` tokens: required blocks are real, optional ones null for now.

        `cache_blocks`, which vLLM calls next, may replace nulls in the returned list before vLLM reads it.
        """
        blocks = self.req_to_blocks[request_id]
        first, end = len(blocks), -(-num_tokens // self.block_size)
        if first >= end:
            self._in_allocation.pop(request_id, None)
            return []
        numbers = range(first, end)
        is_required = [self.geometry.is_required(number, num_tokens) for number in numbers]
        real = iter(self.block_pool.get_new_blocks(sum(is_required)))
        new_blocks = [next(real) if required else self._null_block for required in is_required]
        blocks.extend(new_blocks)
        self._in_allocation[request_id] = (first, new_blocks)
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Give optional blocks of this allocation a real block where that pays, then register full blocks' hashes."""
        request_id = request.request_id
        boundaries = self._boundaries.setdefault(request_id, set())
        for position in (*replay_boundaries, request.num_prompt_tokens, request.shared_prefix_boundary):
            boundaries.add(position // self._step_tokens * self._step_tokens)
        self._fill_optional_blocks(request)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def _fill_optional_blocks(self, request: Request) -> None:
        first, new_blocks = self._in_allocation.pop(request.request_id, (0, []))
        nulls = [first + i for i, block in enumerate(new_blocks) if block.is_null]
        if not nulls:
            return
        # Half of the blocks without a cached prefix, a quarter of all: other requests of this step need some.
        if self._num_uncached() // 2 >= len(nulls):
            wanted = nulls
        else:
            tail = self._tail(request.shared_prefix_boundary)
            wanted = [number for number in nulls if number in tail]
            if len(wanted) > self.block_pool.get_num_free_blocks() // 4:
                wanted = []
        blocks = self.req_to_blocks[request.request_id]
        for number, block in zip(wanted, self.block_pool.get_new_blocks(len(wanted)), strict=True):
            blocks[number] = new_blocks[number - first] = block
        self._optional[request.request_id] = wanted

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that left the window, given that ``processed_computed_tokens`` tokens are done.

        A resumed request's prompt is still its first ``num_prompt_tokens`` tokens: those that it had generated are
        computed again with the short window.

        Optional blocks are freed at the request's next step, even while their own is in flight: no step of the request
        reads them, and who gets them writes in a later step. So they never take room from their own request.
        """
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        start = max(self._freed_until.get(request_id, 0), self.geometry.num_sink_blocks)
        end = min(self.geometry.window_start_block(processed_computed_tokens, num_prompt_tokens), len(blocks))
        if end <= start and request_id not in self._optional:
            return
        self._freed_until[request_id] = max(start, end)
        numbers = (*self._optional.pop(request_id, ()), *range(start, end))
        released = {number: blocks[number] for number in numbers if not blocks[number].is_null}
        if not released:
            return
        for number in released:
            blocks[number] = self._null_block
        self._release(request_id, released)

    def _release(self, request_id: str, released: dict[int, KVCacheBlock]) -> None:
        """Free blocks; those that no later request is expected to need lose their hash, so that they are reused first.

        While the pool has blocks without a cached prefix, every block keeps its hash: that costs nothing.
        """
        if self.enable_caching and self._num_uncached() <= 0:
            wanted = {n for boundary in self._boundaries.get(request_id, ()) for n in self._tail(boundary)}
            self.block_pool.evict_blocks(
                {
                    block.block_id
                    for number, block in released.items()
                    if number not in wanted and block.ref_cnt == 1 and block.block_hash is not None
                }
            )
        # Later blocks first: they are the ones that a longer prefix needs.
        self.block_pool.free_blocks([released[number] for number in sorted(released, reverse=True)])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Drop the request and return its blocks, which vLLM frees."""
        states: tuple[dict[str, Any], ...] = (
            self._freed_until,
            self._boundaries,
            self._in_allocation,
            self._optional,
        )
        for state in states:
            state.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Longest prefix, a multiple of ``alignment_tokens`` and of 16, whose sink and tail blocks are all cached.

        Returns:
            One list of ``length / 16`` blocks per group with nulls between sink and tail, and the length in tokens.
        """
        if drop_eagle_block or dcp_world_size > 1 or pcp_world_size > 1:
            raise NotImplementedError("speculative decoding and context parallelism are refused at start-up")
        geometry = cast("NovaBandSpec", kv_cache_spec).geometry
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        boundary_tokens = max(alignment_tokens, BAND_BLOCK_TOKENS)

        def lookup(numbers: Iterable[int]) -> tuple[dict[int, list[KVCacheBlock]], int | None]:
            found: dict[int, list[KVCacheBlock]] = {}
            for number in numbers:
                cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
                if not cached:
                    return found, number
                found[number] = cached
            return found, None

        length = max_length // boundary_tokens * boundary_tokens
        while length > 0:
            sink, tail = geometry.blocks_for_hit(length)
            # From the end, so that one miss rules out every boundary whose tail contains it.
            found, missing = lookup(reversed(tail))
            if missing is None:
                sink_found, missing = lookup(sink)
                if missing is None:
                    hit = tuple([block_pool.null_block] * (length // BAND_BLOCK_TOKENS) for _ in kv_cache_group_ids)
                    for number, cached in (found | sink_found).items():
                        for group, block in zip(hit, cached, strict=True):
                            group[number] = block
                    return hit, length
            length = missing * BAND_BLOCK_TOKENS // boundary_tokens * boundary_tokens
        return tuple([] for _ in kv_cache_group_ids), 0
