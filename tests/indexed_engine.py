"""The simulated engine of `engine_simulation` with the prefix index beside it, as the scheduler of a server has it."""

import itertools

from engine_simulation import Engine, Setup

from vllm_novakv.backend.prefix_hook import PrefixHook, page_map
from vllm_novakv.prefix.pins import PinTable
from vllm_novakv.prefix.policy import make_policy
from vllm_novakv.prefix.served import ServedIndex


class IndexedEngine(Engine):
    """Unless given a clock, time passes by one second per call to the index."""

    def __init__(self, setup: Setup, policy="expected-reuse", pins=(), max_pinned_blocks=None, seconds=None) -> None:
        super().__init__(setup)
        pages = page_map(self.manager)
        limit = setup.num_blocks if max_pinned_blocks is None else max_pinned_blocks
        ticks = itertools.count()
        self.index = ServedIndex(
            make_policy(policy),
            pages,
            PinTable(pages, list(pins), limit),
            clock=seconds or (lambda: float(next(ticks))),
        )
        self.hook = PrefixHook(self.manager, self.index, takes_request_pins=True)

    def add(self, prompt, max_tokens=1, **extra_args):
        request = super().add(prompt, max_tokens)
        request.sampling_params.extra_args = extra_args
        self.hook.arrived(request)
        return request

    def reset_prefix_cache(self, with_running):
        is_reset = super().reset_prefix_cache(with_running)
        if is_reset:
            self.hook.reset()
        return is_reset

    def _add_chunk(self, step, request, length, is_whole, ids):
        if is_whole:
            self.hook.admitted(request.request_id, request.num_computed_tokens)
        super()._add_chunk(step, request, length, is_whole, ids)

    def _finish(self, request, status):
        super()._finish(request, status)
        self.hook.ended(request)

    def check_idle(self):
        super().check_idle()
        assert not self.index.num_running
        # the list of free blocks is whole: as many blocks as counted, each of them once
        blocks = self.pool.free_block_queue.get_all_free_blocks()
        assert len({block.block_id for block in blocks}) == len(blocks) == self.pool.get_num_free_blocks()
        assert self.index.num_chunks <= 2 * self.setup.num_blocks
        self.index.evict(self.index.num_chunks)
        pinned = {key for pin in self.index.pins.bound.values() for key in pin.keys}
        assert set(self.index._hashes) == pinned
        assert set(self.index._num_chunks_of) == {own for key in pinned for own in self.index._hashes[key]}
