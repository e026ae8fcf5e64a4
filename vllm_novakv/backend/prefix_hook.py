"""Connects a `ServedIndex` to vLLM's cache manager: one replaced queue, and a call when a request comes and goes.

vLLM's table of cached blocks, its reference counts and its managers are left alone. The index says which chunk to give
up; its pages, in all groups, are looked up in vLLM's table when that happens, so there is no second account of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from vllm_novakv.backend.compat import (
    KVCacheBlock,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
    cached_blocks,
    hash_and_group,
    init_logger,
)
from vllm_novakv.backend.retention_queue import RetentionQueue
from vllm_novakv.backend.specs import NovaBandSpec
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.prefix.pages import PageGroup, PageMap
from vllm_novakv.prefix.served import Arrival, ServedIndex

PIN_ARGUMENT = "novakv_pin"
UNPIN_ARGUMENT = "novakv_unpin"

logger = init_logger(__name__)


def page_map(manager: KVCacheManager) -> PageMap:
    """What a prefix hit needs in each group of a cache manager."""
    coordinator = manager.coordinator
    return PageMap(
        groups=tuple(_page_group(single.kv_cache_spec) for single in coordinator.single_type_managers),
        chunk_tokens=max(coordinator.scheduler_block_size, BLOCK_TOKENS),
        hash_tokens=manager.block_pool.hash_block_size,
    )


def _page_group(spec: Any) -> PageGroup:
    if isinstance(spec, NovaBandSpec):
        return PageGroup(spec.block_size, spec.prompt_recent_tokens, spec.sink_tokens)
    if isinstance(spec, SlidingWindowSpec):
        return PageGroup(spec.block_size, spec.sliding_window)
    return PageGroup(spec.block_size)


class PrefixHook:
    """The index's hands inside vLLM's block pool.

    Args:
        manager: vLLM's, with prefix caching; no request has used it yet.
        index: for `page_map` of the same manager.
        takes_request_pins: whether ``novakv_pin`` and ``novakv_unpin`` of a request are honoured.
    """

    def __init__(self, manager: KVCacheManager, index: ServedIndex, takes_request_pins: bool) -> None:
        self._pool = manager.block_pool
        self._index = index
        self._takes_request_pins = takes_request_pins
        pages = index.pages
        # (group, hashes of a chunk per page of the group)
        self._groups = [(i, group.block_tokens // pages.hash_tokens) for i, group in enumerate(pages.groups)]
        self._pages_per_chunk = sum(pages.hashes_per_chunk // per_page for _, per_page in self._groups)
        self._full_groups = [i for i, group in enumerate(pages.groups) if group.window_tokens is None]
        # Where a request can resume inside a chunk, the blocks behind the last whole one of a request are kept a while:
        # last hash -> hashes, the oldest first. The policy does not see them, so they get 1/32 of the pool.
        self._keeps_rests = bool(manager.coordinator.enable_partial_hash_hits)
        self._rests: OrderedDict[Any, list[Any]] = OrderedDict()
        self._max_rest_pages = self._pool.num_gpu_blocks // 32
        self._num_rest_pages = 0
        # a look-ahead that spares calls; too small a pool to matter gets none
        self._batch = max(1, self._pool.num_gpu_blocks // 1024)
        # blocks of chunks that the index gave up and nobody has taken yet: block, its key in vLLM's table, its hash
        self._given_up: deque[tuple[KVCacheBlock, Any, bytes]] = deque()
        self._queue = RetentionQueue(self._pool.free_block_queue, self._choose, self._is_pinned)
        self._pool.free_block_queue = self._queue

    def arrived(self, request: Request) -> None:
        """A request has entered the scheduler."""
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        pin, unpin = extra.get(PIN_ARGUMENT), extra.get(UNPIN_ARGUMENT)
        is_plain = not (request.cache_salt or request.lora_request or request.mm_features)
        refusal = self._index.arrived(
            Arrival(
                request.request_id,
                request.block_hashes,
                request.prompt_token_ids if is_plain else None,
                request.num_prompt_tokens,
                str(pin) if pin is not None and self._takes_request_pins else None,
                str(unpin) if unpin is not None and self._takes_request_pins else None,
            )
        )
        if refusal is not None:
            logger.warning("%s of request %s is refused: %s", PIN_ARGUMENT, request.request_id, refusal)
        if (pin is not None or unpin is not None) and not self._takes_request_pins:
            logger.warning_once(
                "%s and %s of requests are ignored; the setting prefix_index.allow_request_pins admits them",
                PIN_ARGUMENT,
                UNPIN_ARGUMENT,
            )

    def admitted(self, request_id: str, hit_tokens: int) -> None:
        """A request runs for the first time, or again."""
        self._index.admitted(request_id, hit_tokens)

    def ended(self, request: Request) -> None:
        """vLLM has freed a request's blocks."""
        pages, hashes = self._index.pages, request.block_hashes
        num_tokens = min(request.num_computed_tokens, len(hashes) * pages.hash_tokens)
        num_chunks = 0
        for key in pages.chunk_keys(hashes, num_tokens):
            if self._pool.get_cached_block(key, self._full_groups) is None:
                break
            num_chunks += 1
        self._index.ended(request.request_id, num_chunks, num_tokens, self._pool.get_num_free_blocks())
        first = pages.floor(num_tokens) // pages.hash_tokens
        if self._keeps_rests:
            self._keep_rest(hashes[first : num_tokens // pages.hash_tokens])
        else:
            self._release_rest(hashes[first:])

    def reset(self) -> None:
        """vLLM has emptied its prefix cache."""
        self._given_up.clear()
        self._rests.clear()
        self._num_rest_pages = 0
        self._index.reset()

    def _keep_rest(self, hashes: list[Any]) -> None:
        if not hashes:
            return
        self._num_rest_pages -= self._rest_pages(self._rests.pop(hashes[-1], []))
        self._rests[hashes[-1]] = hashes
        self._num_rest_pages += self._rest_pages(hashes)
        while self._num_rest_pages > self._max_rest_pages:
            _, oldest = self._rests.popitem(last=False)
            self._num_rest_pages -= self._rest_pages(oldest)
            self._release_rest(oldest)

    def _rest_pages(self, hashes: list[Any]) -> int:
        return sum(-(-len(hashes) // per_page) for _, per_page in self._groups)

    def _release_rest(self, hashes: list[Any]) -> None:
        """Make the blocks behind a request's last whole chunk the first to go.

        They serve no hit, unless requests can resume inside a chunk: then these are the ones kept longest.
        """
        found = {
            block.block_id: block
            for group, per_page in self._groups
            if per_page == 1 or self._keeps_rests
            for block, _ in cached_blocks(self._pool, hashes, group)
            if block.ref_cnt == 0 and not (self._keeps_rests and self._is_of_a_chunk(block))
        }
        self._pool.evict_blocks(set(found))
        for block in found.values():
            self._queue.remove(block)
        self._queue.prepend_n(list(found.values()))

    def _choose(self, count: int) -> list[KVCacheBlock]:
        chosen = self._sweep(count)
        while len(chosen) < count:
            # as few chunks as may do: those given up early are out of the policy's sight
            num_chunks = max((count - len(chosen)) // self._pages_per_chunk, self._batch)
            if not self._given_up and not self._give_up(num_chunks):
                break
            while self._given_up and len(chosen) < count:
                block, key, page_hash = self._given_up.popleft()
                is_free = block.ref_cnt == 0 and block.prev_free_block is not None
                if is_free and block.block_hash == key and not self._index.is_wanted(page_hash):
                    self._queue.remove(block)
                    chosen.append(block)
        return chosen

    def _give_up(self, num_chunks: int) -> bool:
        evicted = self._index.evict(num_chunks)
        for hashes in evicted:
            for group, per_page in self._groups:
                for block, page_hash in cached_blocks(self._pool, hashes[per_page - 1 :: per_page], group):
                    self._given_up.append((block, block.block_hash, page_hash))
        return bool(evicted)

    def _sweep(self, count: int) -> list[KVCacheBlock]:
        """Look at a quarter as many blocks at the front; take those of no chunk of the index: duplicates and remains.

        Others go to the back, so that in time the sweep sees all blocks.
        """
        found: list[KVCacheBlock] = []
        for _ in range(-(-count // 4)):
            block = self._queue.first()
            if block is None:
                break
            self._queue.remove(block)
            if not self._is_of_a_chunk(block):
                found.append(block)
            else:
                self._queue.append(block)
        return found

    def _is_of_a_chunk(self, block: KVCacheBlock) -> bool:
        if block.block_hash is None:
            return False
        page_hash, group = hash_and_group(block)
        # a page that was never filled has the hash of its latest part, which may lie in another page's chunk
        is_whole = block.block_hash_num_tokens % self._index.pages.groups[group].block_tokens == 0
        return is_whole and self._index.is_wanted(page_hash)

    def _is_pinned(self, block: KVCacheBlock) -> bool:
        if block.block_hash is None:
            return False
        page_hash, group = hash_and_group(block)
        return self._index.pins.is_pinned(group, page_hash)
