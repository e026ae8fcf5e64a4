"""A scheduler and a worker around vLLM's real KVCacheManager, with a model of what every cache page holds.

The scheduler makes the calls that vLLM's makes, in the same order. The worker knows block ids only as the scheduler
sends them: whole lists for new and resumed requests, appended ids for running ones. Nothing here looks into the
manager's own lists except the final check for leaks.

A token is identified by its prefix: ``contents[p]`` is a hash of tokens 0..p. A page remembers, for each of its tokens,
which group wrote which content; before attention, every key that the operations read is looked up.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from vllm_novakv.backend.band_geometry import BandGeometry
from vllm_novakv.backend.history_manager import resume_within_blocks
from vllm_novakv.backend.specs import CacheShape, NovaBandSpec, NovaHistorySpec
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.config import BAND_BLOCK_TOKENS

NUM_KV_HEADS, HEAD_SIZE, RECORD_BYTES = 3, 64, 36
VOCABULARY = 256
MAX_TOKENS = 20_000
POSITIONS = np.arange(MAX_TOKENS)
# Prefixes are equal when, and except for a chance of 2^-64 only when, the sums of these over their tokens are.
TOKEN_HASHES = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (MAX_TOKENS, VOCABULARY))


@dataclass(frozen=True)
class Setup:
    """One server, with layers of SmolLM2's shape.

    Args:
        num_blocks: of the pool, the null block included.
        full_layers: quantized layers.
        skipped_layers: full-attention layers on vLLM's own backend.
        sliding_layers: layers with a window of ``sliding_window`` tokens, on vLLM's own backend.
        reserves_full_prompt: vLLM's ``scheduler_reserve_full_isl``.
        prompt_recent_tokens: shorter than a server's default, so that short prompts have a hole.
        reuses_within_blocks: hits may end inside a history block, which is then copied.
        Others: as vLLM and `BandGeometry` name them.
    """

    num_blocks: int
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_steps_in_flight: int = 1
    has_prefix_caching: bool = True
    reserves_full_prompt: bool = True
    full_layers: int = 2
    skipped_layers: int = 0
    sliding_layers: int = 0
    sliding_window: int = 128
    sink_tokens: int = 64
    recent_tokens: int = 256
    prompt_recent_tokens: int = 512
    reuses_within_blocks: bool = False

    @property
    def geometry(self) -> BandGeometry:
        return BandGeometry(self.sink_tokens, self.recent_tokens, self.prompt_recent_tokens)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The specs of all layers; every page has the same size."""
        shape = CacheShape(record_bytes=RECORD_BYTES)
        page_bytes = shape.page_bytes(NUM_KV_HEADS, HEAD_SIZE)
        layer = {"num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE, "page_size_padded": page_bytes}
        dense = FullAttentionSpec(block_size=BAND_BLOCK_TOKENS, dtype=torch.bfloat16, **layer)
        band = NovaBandSpec(
            block_size=BAND_BLOCK_TOKENS,
            dtype=torch.uint8,
            state_content_bytes=shape.band_content_bytes(HEAD_SIZE),
            dcp_sharded=False,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            prompt_recent_tokens=self.prompt_recent_tokens,
            max_steps_in_flight=self.max_steps_in_flight,
            max_model_len=self.max_model_len,
            max_chunk_tokens=self.max_num_batched_tokens,
            history_record_bytes=RECORD_BYTES,
            num_layers=30,
            **layer,
        )
        sliding = SlidingWindowSpec(
            block_size=BAND_BLOCK_TOKENS, dtype=torch.bfloat16, sliding_window=self.sliding_window, **layer
        )
        specs: dict[str, KVCacheSpec] = {}
        for i in range(self.full_layers):
            specs[f"layer.{i}"] = shape.history_spec(dense)
            specs[f"layer.{i}.band"] = band
        specs |= {f"skipped.{i}": dense for i in range(self.skipped_layers)}
        return specs | {f"sliding.{i}": sliding for i in range(self.sliding_layers)}

    def vllm_config(self) -> SimpleNamespace:
        """The part of a ``VllmConfig`` that vLLM reads from specs to block pool."""
        return SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=self.max_model_len,
                original_max_model_len=self.max_model_len,
                supports_kv_cache_grouping=False,  # read by 0.33
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            cache_config=SimpleNamespace(
                num_gpu_blocks=None,
                num_gpu_blocks_override=self.num_blocks,
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
                prefix_cache_retention_interval=0,  # vLLM's default
                enable_prefix_caching=self.has_prefix_caching,
                prefix_match_unit=None,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            device_config=SimpleNamespace(device_type="cpu"),
            speculative_config=None,
            kv_transfer_config=None,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=self.max_steps_in_flight * self.max_num_batched_tokens,
        )

    def start(self) -> tuple[KVCacheConfig, SimpleNamespace]:
        """What vLLM's engine core does at start-up: group the layers, check the memory, note the pool's size."""
        vllm_config = self.vllm_config()
        kv_cache_config = plan_kv_cache(vllm_config, self.kv_cache_specs())
        vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        return kv_cache_config, vllm_config

    def reported_requests(self) -> float:
        """Requests of the longest length that fit at the same time, as vLLM reports them at start-up."""
        kv_cache_config, vllm_config = self.start()
        return kv_cache_utils.get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)


def plan_kv_cache(vllm_config: SimpleNamespace, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """vLLM's plan for one worker, as its scheduler gets it; the memory is given by ``num_gpu_blocks_override``."""
    memory_bytes = 10**9
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        configs = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], [memory_bytes])
    else:  # 0.33
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
        groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
        configs = planning.get_kv_cache_configs(vllm_config, [specs], [memory_bytes], groups)
    return kv_cache_utils.generate_scheduler_kv_cache_config(configs)


def prefix_hashes(tokens: list[int]) -> np.ndarray:
    """``[len(tokens)]`` int64, one hash per position, of all tokens up to it."""
    return TOKEN_HASHES[POSITIONS[: len(tokens)], tokens].cumsum()


def continuation(tokens: list[int], length: int) -> list[int]:
    """What the model answers: ``length`` tokens that depend on the prompt alone, as greedy decoding's do."""
    return list(random.Random(bytes(tokens)).randbytes(length))


class SimulatedRequest(Request):
    """A request of vLLM's together with the answer that it will get."""

    def __init__(self, request_id: str, prompt: list[int], max_tokens: int, setup: Setup) -> None:
        hasher = (
            kv_cache_utils.get_request_block_hasher(BAND_BLOCK_TOKENS, sha256) if setup.has_prefix_caching else None
        )
        super().__init__(request_id, prompt, SamplingParams(max_tokens=max_tokens), None, block_hasher=hasher)
        self.answer = continuation(prompt, max_tokens)
        self.sequence = prompt + self.answer
        self.contents = prefix_hashes(self.sequence)


@dataclass
class Step:
    """What the scheduler sends to the worker for one forward pass."""

    chunks: list[tuple[SimulatedRequest, int, int, bool]] = field(default_factory=list)
    """Request, first position, tokens, whether a token is sampled."""
    new_block_ids: dict[str, tuple[bool, tuple[list[int], ...] | None]] = field(default_factory=dict)
    """Request id -> whether the ids replace the worker's table, and the ids of each group."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """Source and destination of pages that are copied before the forward pass."""


class Worker:
    """Block tables and page contents; checks every read."""

    def __init__(self, setup: Setup, specs: list[KVCacheSpec]) -> None:
        self.setup = setup
        self.specs = specs
        self.num_reads = 0
        self.block_sizes = [spec.block_size for spec in specs]
        # Groups share pages: a page belongs to the group that wrote to it last, and its other tokens are lost.
        self.page_group = np.full(setup.num_blocks, -1)
        self.pages = np.zeros((setup.num_blocks, BLOCK_TOKENS), np.int64)
        self.tables: dict[str, list[np.ndarray]] = {}
        self.table_lengths: dict[str, list[int]] = {}

    def execute(self, step: Step) -> None:
        """One forward pass of one layer of each kind: first all copies at once, then all writes, then all reads."""
        if step.block_copies:
            sources, copies = (list(ids) for ids in zip(*step.block_copies, strict=True))
            self.page_group[copies] = self.page_group[sources]
            self.pages[copies] = self.pages[sources]
        for request_id, (is_whole, ids) in step.new_block_ids.items():
            self._update_table(request_id, is_whole, ids)
        for request, start, length, _ in step.chunks:
            for group in range(len(self.block_sizes)):
                self._write(request, group, start, start + length)
        for request, start, length, _ in step.chunks:
            self._read(request, start, start + length)

    def _update_table(self, request_id: str, is_whole: bool, ids: tuple[list[int], ...] | None) -> None:
        if is_whole:
            max_blocks = [-(-self.setup.max_model_len // size) for size in self.block_sizes]
            self.tables[request_id] = [np.zeros(number, np.int64) for number in max_blocks]
            self.table_lengths[request_id] = [0] * len(self.block_sizes)
        lengths = self.table_lengths[request_id]
        for group, group_ids in enumerate(ids or ()):
            self.tables[request_id][group][lengths[group] : lengths[group] + len(group_ids)] = group_ids
            lengths[group] += len(group_ids)

    def _slots(self, request: SimulatedRequest, group: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self.block_sizes[group]
        number = positions // size
        assert number.size == 0 or number[-1] < self.table_lengths[request.request_id][group], (
            f"request {request.request_id}, group {group}: no block for position {positions[-1]}"
        )
        return self.tables[request.request_id][group][number], positions % size

    def _write(self, request: SimulatedRequest, group: int, start: int, end: int) -> None:
        positions = POSITIONS[start:end]
        pages, offsets = self._slots(request, group, positions)
        assert isinstance(self.specs[group], NovaBandSpec) or (pages > 0).all(), f"group {group} writes to block 0"
        is_held = pages > 0
        pages, offsets = pages[is_held], offsets[is_held]
        taken_over = pages[self.page_group[pages] != group]
        self.pages[taken_over] = 0
        self.page_group[taken_over] = group
        self.pages[pages, offsets] = request.contents[start:end][is_held]

    def _read(self, request: SimulatedRequest, start: int, end: int) -> None:
        """Look up every key that the queries at positions ``start`` to ``end - 1`` attend.

        The prompt's tokens have the wide window, generated ones the short window, also when a resumed request computes
        them again. Over these queries, the exact keys outside the chunk are those of the first one: later ones have a
        later window that is no wider, and the chunk itself holds what they gain. A single token reads its own key from
        the band too. The history is complete at any time, so all keys up to the last query are looked up there.
        """
        setup = self.setup
        outside = end if end - start == 1 else start
        is_prompt = start < request.num_prompt_tokens
        window_tokens = setup.prompt_recent_tokens if is_prompt else setup.recent_tokens
        window_start = max(start - window_tokens + 1, 0)
        for group, spec in enumerate(self.specs):
            if isinstance(spec, NovaBandSpec):
                self._look_up(request, group, POSITIONS[: min(setup.sink_tokens, outside)])
                self._look_up(request, group, POSITIONS[window_start:outside])
            elif isinstance(spec, SlidingWindowSpec):
                self._look_up(request, group, POSITIONS[max(start - setup.sliding_window + 1, 0) : end])
            else:
                self._look_up(request, group, POSITIONS[:end])

    def _look_up(self, request: SimulatedRequest, group: int, positions: np.ndarray) -> None:
        pages, offsets = self._slots(request, group, positions)
        is_right = (
            (pages > 0)
            & (self.page_group[pages] == group)
            & (self.pages[pages, offsets] == request.contents[positions])
        )
        self.num_reads += positions.size
        if not is_right.all():
            wrong = positions[~is_right]
            raise AssertionError(
                f"request {request.request_id}, group {group}: positions {wrong[:4]}... ({wrong.size} of "
                f"{positions.size}) are missing or foreign, pages {pages[~is_right][:4]}"
            )


class Engine:
    """Scheduler, in the order of vLLM's: running requests first, then waiting ones, first come first served."""

    def __init__(self, setup: Setup) -> None:
        kv_cache_utils.init_none_hash(sha256)
        self.setup = setup
        kv_cache_config, vllm_config = setup.start()
        scheduler_block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(
            kv_cache_config, vllm_config
        )
        self.manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=setup.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            enable_caching=setup.has_prefix_caching,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
        )
        if setup.reuses_within_blocks:
            resume_within_blocks(self.manager)
        self.pool = self.manager.block_pool
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.history_groups = [i for i, spec in enumerate(specs) if isinstance(spec, NovaHistorySpec)]
        self.band_groups = [i for i, spec in enumerate(specs) if isinstance(spec, NovaBandSpec)]
        self.worker = Worker(setup, specs)
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.steps: deque[Step] = deque()
        self.finished: list[SimulatedRequest] = []
        self.chunk_limit = setup.max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self.hits: dict[str, int] = {}
        self.is_async = setup.max_steps_in_flight > 1
        self._ids = itertools.count()

    # What clients do.

    def add(self, prompt: list[int], max_tokens: int = 1) -> SimulatedRequest:
        request = SimulatedRequest(str(next(self._ids)), prompt, max_tokens, self.setup)
        self.waiting.append(request)
        self.counts["requests"] += 1
        return request

    def abort(self, request: SimulatedRequest) -> None:
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        self.counts["aborts"] += 1

    def reset_prefix_cache(self, with_running: bool) -> bool:
        if with_running:
            while self.running:
                self._preempt(self.running.pop(), drop_stale_output=True)
        return self.manager.reset_prefix_cache()

    def serve(self, prompt: list[int], max_tokens: int = 1) -> int:
        """Serve one request alone; returns the cached tokens that it began with."""
        request = self.add(prompt, max_tokens)
        self.run()
        return self.hits[request.request_id]

    def run(self) -> None:
        """Step until nothing is left."""
        while self.waiting or self.running or self.steps:
            self.step()

    def step(self) -> None:
        """Schedule a step; when as many are in flight as may be, or nothing is left to do, finish the oldest."""
        step = self._schedule()
        if step.chunks:
            self.steps.append(step)
        else:
            assert self.steps or not (self.waiting or self.running), "nothing can be scheduled any more"
        if self.steps and (not step.chunks or len(self.steps) == self.setup.max_steps_in_flight):
            step = self.steps.popleft()
            self.worker.execute(step)
            self._update_from_output(step)

    # What vLLM's scheduler does.

    def _schedule(self) -> Step:
        self.manager.new_step_starts()
        self.counts["steps"] += 1
        step = Step()
        budget = self.setup.max_num_batched_tokens
        num_preemptions = self.counts["preemptions"]
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new_tokens = self._num_running_tokens(request, budget)
            if num_new_tokens == 0:
                index += 1
                continue
            new_blocks = self._allocate_or_preempt(request, num_new_tokens)
            if new_blocks is None:
                break
            self._add_chunk(step, request, num_new_tokens, False, new_blocks.get_block_ids(allow_none=True))
            budget -= num_new_tokens
            index += 1
        if self.counts["preemptions"] == num_preemptions:
            self._schedule_waiting(step, budget)
        copies, retained_blocks = self.manager.take_kv_cache_block_copies()
        step.block_copies = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
        self.counts["copies"] += len(copies)
        self.pool.free_blocks(retained_blocks)
        self.manager.take_new_block_ids()
        for request, _, length, _ in step.chunks:
            request.num_computed_tokens += length
            request.num_in_flight_tokens += length
            if self.is_async and request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        return step

    def _num_running_tokens(self, request: SimulatedRequest, budget: int) -> int:
        if (
            request.num_output_placeholders > 0
            and request.num_computed_tokens + 2 - request.num_output_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0
        missing = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return min(missing, self.chunk_limit, budget, self.setup.max_model_len - request.num_computed_tokens - 1)

    def _allocate_or_preempt(self, request: SimulatedRequest, num_new_tokens: int) -> KVCacheBlocks | None:
        while True:
            new_blocks = self.manager.allocate_slots(request, num_new_tokens, num_lookahead_tokens=0)
            if new_blocks is not None:
                return new_blocks
            victim = self.running.pop()
            self.counts["self_preemptions"] += not self.running
            self._preempt(victim)
            if victim is request:
                return None

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        skipped = []
        while self.waiting and budget > 0 and len(self.running) < self.setup.max_num_seqs:
            request = self.waiting[0]
            if request.num_stale_output_tokens and not request.drop_stale_output:
                skipped.append(self.waiting.popleft())
                continue
            blocks, num_hit_tokens, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
            self._check_hit(blocks, num_hit_tokens)
            num_new_tokens = min(request.num_tokens - num_hit_tokens, self.chunk_limit, budget)
            new_blocks = self.manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=blocks,
                num_lookahead_tokens=0,
                num_external_computed_tokens=0,
                delay_cache_blocks=False,
                num_encoder_tokens=0,
                full_sequence_must_fit=self.setup.reserves_full_prompt,
                reserved_blocks=0,
                has_scheduled_reqs=bool(self.running),
            )
            if new_blocks is None:
                self.counts["refused_admissions"] += 1
                break
            self.waiting.popleft()
            self.running.append(request)
            self.hits.setdefault(request.request_id, num_hit_tokens)
            self.counts["hits"] += num_hit_tokens > 0
            self.counts["hit_tokens"] += num_hit_tokens
            self.counts["resumed"] += request.status == RequestStatus.PREEMPTED
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_hit_tokens
            whole_table = self.manager.get_blocks(request.request_id).get_block_ids()
            self._add_chunk(step, request, num_new_tokens, True, whole_table)
            budget -= num_new_tokens
        self.waiting.extendleft(reversed(skipped))

    def _add_chunk(self, step: Step, request: SimulatedRequest, length: int, is_whole: bool, ids) -> None:
        start = request.num_computed_tokens
        is_sampled = start + length >= request.num_tokens + request.num_output_placeholders
        step.chunks.append((request, start, length, is_sampled))
        step.new_block_ids[request.request_id] = (is_whole, ids)
        self.counts["chunks"] += length > 1

    def _check_hit(self, blocks: KVCacheBlocks, num_tokens: int) -> None:
        assert num_tokens % (BAND_BLOCK_TOKENS if self.setup.reuses_within_blocks else BLOCK_TOKENS) == 0
        self.counts["partial_hits"] += num_tokens % BLOCK_TOKENS > 0
        for group in self.history_groups:
            assert len(blocks.blocks[group]) == -(-num_tokens // BLOCK_TOKENS)
        geometry = self.setup.geometry
        for group in self.band_groups:
            band = blocks.blocks[group]
            assert len(band) == num_tokens // BAND_BLOCK_TOKENS
            for number, block in enumerate(band):
                start = number * BAND_BLOCK_TOKENS
                end = start + BAND_BLOCK_TOKENS
                is_read = start < geometry.sink_tokens or end > num_tokens - geometry.prompt_recent_tokens
                assert block.is_null != is_read, f"hit of {num_tokens} tokens: band block {number}"

    def _preempt(self, request: SimulatedRequest, drop_stale_output: bool = False) -> None:
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.drop_stale_output = drop_stale_output or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def _update_from_output(self, step: Step) -> None:
        for request, _, length, is_sampled in step.chunks:
            request.num_in_flight_tokens -= length
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:
                request.num_stale_output_tokens -= length
            if request.is_finished() or not is_sampled or (is_stale and request.drop_stale_output):
                continue
            request.append_output_token_ids(request.answer[request.num_output_tokens])
            if self.is_async:
                if not is_stale:
                    request.num_output_placeholders -= 1
                if request.status == RequestStatus.RUNNING:
                    self.manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            if request.num_output_tokens == request.max_tokens:
                self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _finish(self, request: SimulatedRequest, status: RequestStatus) -> None:
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        request.status = status
        self.manager.free(request)
        self.finished.append(request)

    # What the test asks.

    def check_references(self) -> None:
        """Every block is counted as often as running requests list it, and no other block is in use."""
        expected: Counter[int] = Counter()
        for request in self.running:
            for group in self.manager.get_blocks(request.request_id).blocks:
                expected.update(block.block_id for block in group if not block.is_null)
        actual = {block.block_id: block.ref_cnt for block in self.pool.blocks if block.ref_cnt and not block.is_null}
        assert actual == expected

    def check_idle(self) -> None:
        """Nothing is leaked: all blocks are free and the manager remembers no request."""
        assert not self.steps
        assert not self.running
        self.check_references()
        self.manager.new_step_starts()  # forgets what the last step named
        assert self.pool.get_num_free_blocks() == self.setup.num_blocks - 1
        for manager in self.manager.coordinator.single_type_managers:
            leftovers = {name for name, value in vars(manager).items() if isinstance(value, dict) and value}
            assert not leftovers, leftovers
