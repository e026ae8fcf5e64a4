"""The calibration run: the model prefills the text inside vLLM while observers sit on its attention layers.

vLLM serves the model, so what is observed is what the server will see: post-RoPE tensors, quantized weights, tensor
parallelism. Each worker observes its own heads. One request runs at a time, in chunks, with vLLM's stock attention
backend (on a CPU its generic kernel is replaced by an equal, faster one).

    inspect_model, load_tokenizer    what is needed before the weights are loaded
    capture                          run the sequences, return moments, sampled keys and the held-out tensors
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import vllm
from torch import Tensor
from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import CpuArchEnum, current_platform
from vllm.tokenizers import get_tokenizer
from vllm.v1.attention.backend import AttentionType

from vllm_novakv.calibration.cpu_attention import CausalMask, OneRequestAttention, is_replaceable
from vllm_novakv.calibration.moments import LayerMoments, chunk_moments, empty_moments

_CHUNK_TOKENS_CPU = 1024
_CHUNK_TOKENS_GPU = 8192

_GPU_SHARE = 0.1

# Pages are whole blocks and hybrid models pad them: room beyond the bytes of the tokens themselves.
_CACHE_SLACK_RATIO = 1.25
_CACHE_SLACK_BYTES = 64 << 20


class Tokenizer(Protocol):
    """The two things that calibration asks of a tokenizer."""

    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""


@dataclass(frozen=True)
class ModelFacts:
    """What the configuration says about a model, before its weights are loaded.

    Attributes:
        hf_config: the Hugging Face configuration as a dictionary.
        max_model_len: longest sequence in tokens.
        num_kv_heads: KV heads per layer, over all ranks.
        model_dtype: type of the activations when the model is served.
        run_dtype: type of the activations in the calibration run, see `inspect_model`.
        cache_bytes_per_token: bytes of one token in vLLM's own KV cache during the run, all layers, over all ranks.
        is_cpu: whether vLLM runs on a CPU.
        vllm_version: version of the running vLLM.
    """

    hf_config: dict[str, Any]
    max_model_len: int
    num_kv_heads: int
    model_dtype: torch.dtype
    run_dtype: torch.dtype
    cache_bytes_per_token: int
    is_cpu: bool
    vllm_version: str


@dataclass(frozen=True)
class CapturePlan:
    """The text of a run and which of its keys are kept.

    Attributes:
        sequences: token ids of the sequences that the fit uses.
        heldout: token ids of one sequence that only measures the fit.
        sample_positions: sorted positions, counted through all sequences, whose keys are kept, `[num_samples] i64`.
        skip_layers: indices of layers that are not observed.
    """

    sequences: tuple[tuple[int, ...], ...]
    heldout: tuple[int, ...]
    sample_positions: Tensor
    skip_layers: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the fit uses."""
        return sum(len(sequence) for sequence in self.sequences)


@dataclass(frozen=True)
class LayerCapture:
    """What was observed at one layer.

    Attributes:
        moments: over the tokens of the plan's sequences.
        keys: post-RoPE keys at the plan's sample positions, `[num_samples, num_kv_heads, head_size]`, model's type.
        heldout_query: `[num_heldout_tokens, num_heads, head_size]`, model's type.
        heldout_key: `[num_heldout_tokens, num_kv_heads, head_size]`, model's type.
        heldout_value: the same shape.
    """

    moments: LayerMoments
    keys: Tensor
    heldout_query: Tensor
    heldout_key: Tensor
    heldout_value: Tensor


def inspect_model(model: str, dtype: str = "auto") -> ModelFacts:
    """Read a model's configuration the way vLLM does, without loading weights.

    Args:
        model: directory, or a hub name that is already downloaded.
        dtype: vLLM's `--dtype`. "auto" is the model's own, except on a CPU without 16-bit arithmetic: there the run
            uses float32, which is exact and several times faster than emulated bfloat16.

    Returns:
        The facts.

    Raises:
        ValueError: vLLM cannot read or does not know the model.

    Source: engineering choice: what can be refused before minutes of work should be.
    """
    config = ModelConfig(model=model, dtype=dtype, skip_tokenizer_init=True)
    num_layers = config.get_total_num_hidden_layers()
    num_kv_heads = config.get_total_num_kv_heads()
    run_dtype = config.dtype
    if dtype == "auto" and current_platform.is_cpu() and not _has_16_bit_arithmetic():
        run_dtype = torch.float32
    return ModelFacts(
        hf_config=config.hf_config.to_dict(),
        max_model_len=config.max_model_len,
        num_kv_heads=num_kv_heads,
        model_dtype=config.dtype,
        run_dtype=run_dtype,
        cache_bytes_per_token=num_layers * 2 * num_kv_heads * config.get_head_size() * run_dtype.itemsize,
        is_cpu=current_platform.is_cpu(),
        vllm_version=vllm.__version__,
    )


def _has_16_bit_arithmetic() -> bool:
    """Whether this CPU multiplies 16-bit floats natively; without it, PyTorch emulates them."""
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer that the server will use for a model.

    Args:
        model: directory, or a hub name that is already downloaded.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the model has no tokenizer that vLLM can load.
    """
    try:
        tokenizer: Tokenizer = get_tokenizer(model)
    except OSError as error:
        raise ValueError(
            f"no tokenizer found for {model} ({error}); calibration turns text into tokens: "
            "put the tokenizer's files beside the weights"
        ) from error
    return tokenizer


def capture(model: str, plan: CapturePlan, facts: ModelFacts, tensor_parallel_size: int = 1) -> dict[int, LayerCapture]:
    """Prefill every sequence of the plan and return what each full-attention layer saw.

    1. Start vLLM in this process: eager, no prefix cache, one request at a time, a KV cache of one sequence.
    2. Attach an observer to every full-attention decoder layer.
    3. Prefill the sequences (moments and sampled keys), then the held-out one (queries, keys, values).
    4. Collect, detach, and shut vLLM down so that the fit has the memory.

    Args:
        model: directory, or a hub name that is already downloaded.
        plan: the text.
        facts: from `inspect_model`.
        tensor_parallel_size: number of ranks that share the heads.

    Returns:
        Layer index to capture, in layer order. Layers with a window, and skipped ones, are absent.

    Raises:
        NotImplementedError: attention that the 2-bit cache cannot serve (MLA, shared KV, values of another size).
        ValueError: no layer is left to observe, or vLLM refuses the model.
        RuntimeError: the layers did not see every token exactly once.

    Source: arXiv 2608.04074, section 8.3: statistics in prefill only.
    """
    longest = max(len(sequence) for sequence in (*plan.sequences, plan.heldout))
    chunk_tokens = _CHUNK_TOKENS_CPU if facts.is_cpu else _CHUNK_TOKENS_GPU
    with _running(model, longest, chunk_tokens, facts, tensor_parallel_size) as llm:
        attached = llm.collective_rpc(_attach, args=(plan, facts.model_dtype))[0]
        total = plan.num_tokens + len(plan.heldout)
        with tqdm(total=total, desc="running the model", unit="tok") as bar:
            for sequence in plan.sequences:
                _prefill(llm, sequence, chunk_tokens, bar)
            llm.collective_rpc(_begin_heldout)
            _prefill(llm, plan.heldout, chunk_tokens, bar)
        llm.collective_rpc(_finish)
        return {layer: _gather(llm.collective_rpc(_collect, args=(layer,))) for layer in attached}


@contextlib.contextmanager
def _running(
    model: str, longest: int, chunk_tokens: int, facts: ModelFacts, tensor_parallel_size: int
) -> Iterator[LLM]:
    """vLLM in this process; on exit its memory is free and this process is as it was before."""
    # One output token is the least that vLLM generates, hence a model length of one more than the longest sequence.
    # It never enters the model, so one position beyond the model's limit is harmless.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if longest + 1 > facts.max_model_len:
        environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    cache_bytes = facts.cache_bytes_per_token * (longest + chunk_tokens) // tensor_parallel_size
    # vLLM's CPU worker replaces torch.set_num_threads by a function that refuses.
    set_num_threads = torch.set_num_threads
    saved = {name: os.environ.get(name) for name in environment}
    llm: LLM | None = None
    try:
        os.environ.update(environment)
        try:
            llm = LLM(
                model=model,
                dtype=str(facts.run_dtype).removeprefix("torch."),
                tensor_parallel_size=tensor_parallel_size,
                max_model_len=longest + 1,
                max_num_seqs=1,
                max_num_batched_tokens=chunk_tokens,
                enable_chunked_prefill=True,
                enable_prefix_caching=False,
                enforce_eager=True,
                async_scheduling=False,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                generation_config="vllm",
                kv_cache_memory_bytes=int(cache_bytes * _CACHE_SLACK_RATIO) + _CACHE_SLACK_BYTES,
                # vLLM refuses to start where less than this share of a GPU is free, also if it will not take as much
                **({} if facts.is_cpu else {"gpu_memory_utilization": _GPU_SHARE}),
            )
        finally:
            _restore_environment(saved)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.set_num_threads = set_num_threads


def _restore_environment(saved: dict[str, str | None]) -> None:
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _prefill(llm: LLM, sequence: Sequence[int], chunk_tokens: int, bar: tqdm[Any]) -> None:
    """Run one prompt to its end, one engine step per chunk."""
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    engine.add_request(f"sequence-at-{bar.n}", TokensPrompt(prompt_token_ids=list(sequence)), params)
    remaining = len(sequence)
    while engine.has_unfinished_requests():
        engine.step()
        step_tokens = min(remaining, chunk_tokens)
        remaining -= step_tokens
        bar.update(step_tokens)


def _gather(parts: list[LayerCapture]) -> LayerCapture:
    """Join the heads of all ranks; heads are dimension 0 of moments and dimension 1 of tensors over tokens."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=1)

    def joined_moment(name: str) -> Tensor:
        return torch.cat([getattr(part.moments, name) for part in parts], dim=0)

    return LayerCapture(
        moments=LayerMoments(
            parts[0].moments.num_tokens,
            joined_moment("query_moment"),
            joined_moment("key_mean"),
            joined_moment("key_scatter"),
            joined_moment("output_moment"),
        ),
        keys=joined("keys"),
        heldout_query=joined("heldout_query"),
        heldout_key=joined("heldout_key"),
        heldout_value=joined("heldout_value"),
    )


class _LayerObserver:
    """Forward hook of one attention layer: sums moments and keeps keys, then keeps the held-out tensors."""

    def __init__(
        self, layer: Any, plan: CapturePlan, device: torch.device, storage: torch.device, keep_dtype: torch.dtype
    ) -> None:
        self.layer = layer
        self.plan = plan
        self.is_heldout = False
        self.num_seen = 0
        self.moments = empty_moments(layer.num_kv_heads, layer.head_size, device)
        self.keys: Tensor | None = None
        self.num_kept = 0
        self.storage = storage
        self.keep_dtype = keep_dtype
        self.heldout: list[tuple[Tensor, Tensor, Tensor]] = []
        self.handle = layer.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """See `_attach`: the signature is that of a torch forward hook."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return  # a profiling or warm-up run
        metadata = metadata[self.layer.layer_name] if isinstance(metadata, dict) else metadata
        tensors = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        layer = self.layer
        num_tokens = getattr(metadata, "num_actual_tokens", tensors["query"].shape[0])
        query = tensors["query"].view(-1, layer.num_heads, layer.head_size)[:num_tokens]
        key = tensors["key"].view(-1, layer.num_kv_heads, layer.head_size)[:num_tokens]
        value = tensors["value"].view(-1, layer.num_kv_heads, layer.head_size)[:num_tokens]
        if self.is_heldout:
            self.heldout.append((self._copy(query), self._copy(key), self._copy(value)))
            return
        attended = output.view(-1, layer.num_heads, layer.head_size)[:num_tokens]
        self.moments = self.moments.merge(chunk_moments(query, key, attended))
        self._keep(key)
        self.num_seen += num_tokens

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.storage, dtype=self.keep_dtype, copy=True)

    def _keep(self, key: Tensor) -> None:
        positions = self.plan.sample_positions
        if self.keys is None:
            self.keys = torch.empty(
                (positions.numel(), key.shape[1], key.shape[2]), dtype=self.keep_dtype, device=self.storage
            )
        bounds = torch.tensor([self.num_seen, self.num_seen + key.shape[0]])
        start, stop = torch.searchsorted(positions, bounds).tolist()
        index = (positions[start:stop] - self.num_seen).to(key.device)
        # copies across devices and types
        self.keys[start:stop] = key.index_select(0, index)
        self.num_kept += stop - start

    def result(self, device: torch.device | None) -> LayerCapture:
        """The capture, moved to `device` if one is given; the observer is spent afterwards.

        Raises:
            RuntimeError: the layer did not see every token exactly once.
        """
        self.handle.remove()
        queries, keys, values = zip(*self.heldout, strict=True) if self.heldout else ((), (), ())
        num_heldout = sum(part.shape[0] for part in queries)
        expected = (self.plan.num_tokens, self.plan.sample_positions.numel(), len(self.plan.heldout))
        if (self.num_seen, self.num_kept, num_heldout) != expected or self.keys is None:
            raise RuntimeError(
                f"{self.layer.layer_name} saw {self.num_seen} tokens, kept {self.num_kept} keys and {num_heldout} "
                f"held-out tokens; the run sent {expected}: report this with the versions of vllm and vllm-novakv"
            )

        def moved(tensor: Tensor) -> Tensor:
            return tensor if device is None else tensor.to(device)

        moments = self.moments
        capture = LayerCapture(
            moments=LayerMoments(
                moments.num_tokens,
                moved(moments.query_moment),
                moved(moments.key_mean),
                moved(moments.key_scatter),
                moved(moments.output_moment),
            ),
            keys=moved(self.keys),
            heldout_query=moved(torch.cat(queries)),
            heldout_key=moved(torch.cat(keys)),
            heldout_value=moved(torch.cat(values)),
        )
        self.keys, self.heldout = None, []
        return capture


def _attach(worker: Any, plan: CapturePlan, keep_dtype: torch.dtype) -> list[int]:
    """Runs in every worker: observe its full-attention decoder layers; returns their indices in order."""
    layers: dict[int, Any] = {}
    config = worker.model_runner.vllm_config
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, MLAAttention):
            raise NotImplementedError(
                f"{name} uses multi-head latent attention; the 2-bit cache serves standard and grouped-query "
                "attention: serve this model with another backend"
            )
        if not _is_full_attention(layer):
            continue
        index = extract_layer_index(name)
        if index in plan.skip_layers:
            continue
        _check_layer(name, layer)
        if index in layers:
            raise NotImplementedError(
                f"layer {index} has more than one attention ({layers[index].layer_name} and {name}); "
                "the 2-bit cache serves decoders with one attention per layer: serve this model with another backend"
            )
        layers[index] = layer
    if not layers:
        raise ValueError(
            "no full-attention layer is left to calibrate; layers with a window and skipped layers keep their own "
            "cache: check --skip-layers, or serve this model with another backend"
        )
    device = worker.model_runner.device
    storage = _storage_device(device, layers, plan)
    worker.novakv_observers = {
        index: _LayerObserver(layers[index], plan, device, storage, keep_dtype) for index in sorted(layers)
    }
    mask = CausalMask()
    worker.novakv_attentions = [
        OneRequestAttention(layer.impl, config.model_config.max_model_len, mask)
        for layer in layers.values()
        if is_replaceable(layer.impl)
    ]
    return sorted(layers)


def _is_full_attention(layer: Any) -> bool:
    return (
        isinstance(layer, Attention)
        and not isinstance(layer, ChunkedLocalAttention)
        and layer.attn_type == AttentionType.DECODER
        and layer.sliding_window is None
    )


def _check_layer(name: str, layer: Any) -> None:
    if layer.kv_sharing_target_layer_name is not None:
        raise NotImplementedError(
            f"{name} reads the cache of {layer.kv_sharing_target_layer_name}; layers that share a KV cache are not "
            "supported: serve this model with another backend"
        )
    if layer.head_size != layer.head_size_v:
        raise NotImplementedError(
            f"{name} has keys of size {layer.head_size} and values of size {layer.head_size_v}; the 2-bit cache needs "
            "equal sizes: serve this model with another backend"
        )


def _storage_device(device: torch.device, layers: dict[int, Any], plan: CapturePlan) -> torch.device:
    """Keep keys beside the model when half of the free memory holds them, else in host memory."""
    if device.type == "cpu":
        return device
    num_rows = plan.sample_positions.numel() + 3 * len(plan.heldout)
    # Queries of the held-out tokens are the widest rows; counting all rows so wide errs on the safe side.
    num_bytes = sum(
        plan.sample_positions.numel() * layer.num_kv_heads * layer.head_size * layer.dtype.itemsize
        + (num_rows - plan.sample_positions.numel()) * layer.num_heads * layer.head_size * layer.dtype.itemsize
        for layer in layers.values()
    )
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if 2 * num_bytes <= free_bytes else torch.device("cpu")


def _begin_heldout(worker: Any) -> None:
    """Runs in every worker: from now on keep tensors instead of summing them."""
    for observer in worker.novakv_observers.values():
        observer.is_heldout = True


def _finish(worker: Any) -> None:
    """Runs in every worker: free the attention's keys and values before the captures are collected."""
    for attention in worker.novakv_attentions:
        attention.restore()


def _collect(worker: Any, layer: int) -> LayerCapture:
    """Runs in every worker: take one layer's capture out; with several ranks it travels through host memory."""
    is_alone = worker.model_runner.vllm_config.parallel_config.world_size == 1
    observer = worker.novakv_observers.pop(layer)
    capture: LayerCapture = observer.result(None if is_alone else torch.device("cpu"))
    return capture
