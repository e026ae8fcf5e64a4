"""vLLM's two schedulers with the prefix index beside them; chosen with vLLM's own ``scheduler_cls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_novakv.backend.compat import AsyncScheduler, Request, Scheduler, init_logger
from vllm_novakv.backend.history_manager import resume_within_blocks
from vllm_novakv.backend.prefix_hook import PrefixHook, page_map
from vllm_novakv.backend.prefix_settings import status_directory
from vllm_novakv.config import BAND_BLOCK_TOKENS, NovaKVConfig
from vllm_novakv.prefix.observer import Observer
from vllm_novakv.prefix.pins import Pin, PinTable
from vllm_novakv.prefix.policy import make_policy
from vllm_novakv.prefix.served import ServedIndex
from vllm_novakv.prefix.status import status_file

logger = init_logger(__name__)


class PrefixScheduler(Scheduler):
    """Tells the index of every request that comes, runs and goes.

    `_free_blocks` is private to vLLM's scheduler, and the only place that every finished request passes when its blocks
    are freed. Can go when schedulers or cache managers get a hook there.

    Raises:
        ValueError: at start-up: the pins exceed the limit, the snapshot is damaged or another model's, or the pool is
            too small for ``reuse_within_blocks``.
        NotImplementedError: at start-up: the other layers' blocks do not allow ``reuse_within_blocks``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = NovaKVConfig.from_additional_config(self.vllm_config.additional_config).prefix_index
        assert settings is not None, "validation chooses this class only with a prefix index"
        manager = self.kv_cache_manager
        if settings.reuse_within_blocks:
            resume_within_blocks(manager)
        pages = page_map(manager)
        num_blocks = manager.block_pool.num_gpu_blocks - 1
        pins = PinTable(
            pages, [Pin(pin.name, pin.tokens) for pin in settings.pins], int(settings.max_pinned_ratio * num_blocks)
        )
        index = ServedIndex(make_policy(settings.policy), pages, pins)
        # the engine's number; the rank is 0 in every engine that shares no experts with others
        rank = self.vllm_config.parallel_config.data_parallel_index
        self._novakv_observer = Observer(
            index,
            self.vllm_config.model_config.get_vocab_size(),
            settings.max_index_bytes,
            status_file(status_directory(self.vllm_config, settings), rank),
            _of_rank(settings.snapshot, rank),
            settings.policy,
        )
        self._novakv_hook = PrefixHook(manager, index, settings.allow_request_pins)
        self._novakv_observer.start()
        logger.info(
            "NOVAKV prefix index: policy %s, %d pins of at most %d of %d blocks, %d prompts from the snapshot; a hit "
            "may end at every %dth token",
            settings.policy,
            len(settings.pins),
            pins.max_pages,
            num_blocks,
            self._novakv_observer.trie.num_sequences,
            BAND_BLOCK_TOKENS if settings.reuse_within_blocks else pages.chunk_tokens,
        )

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self._novakv_hook.arrived(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for request in output.scheduled_new_reqs:
            self._novakv_hook.admitted(request.req_id, request.num_computed_tokens)
        return output

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._novakv_hook.ended(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        is_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if is_reset:
            self._novakv_hook.reset()
        return is_reset

    def shutdown(self) -> None:
        super().shutdown()
        self._novakv_observer.close()


class PrefixAsyncScheduler(PrefixScheduler, AsyncScheduler):
    """The same for asynchronous scheduling, vLLM's default."""


def _of_rank(path: Path | None, rank: int) -> Path | None:
    return path if path is None or not rank else path.with_name(f"{path.name}.{rank}")
