"""vLLM in a process of its own, one for each compared cache, as the callables that the evaluation takes.

The process starts with the first question, so a finished run that is only read back starts none. What the engine says
of itself (`facts`) belongs to the run: it shows that the cache asked for is the one that answered.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from vllm_novakv.evaluation.items import Item
from vllm_novakv.plugin import BACKEND_NAME

STOCK_CACHES: Mapping[str, dict[str, Any]] = {
    "stock": {},
    "bf16": {},
    "fp8": {"kv_cache_dtype": "fp8"},
}
"""vLLM's own caches by name, with their engine arguments: in the model's type, the same if it is BF16, and FP8."""

_CPU_CACHE_BYTES = 2 << 30
_STOP_SECONDS = 60


def cache_names() -> list[str]:
    """Every cache that can be compared: vLLM's own, ours, ours without loss, and the compared methods."""
    from vllm_novakv.baselines import BASELINES

    return [*STOCK_CACHES, "novakv", "exact", *BASELINES]


def engine_arguments(cache: str, novakv: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a cache.

    Example: "quarot-int2" gives attention_backend NOVAKV with {"history": "exact", "baseline": "quarot-int2"}.

    Args:
        cache: one of `cache_names`.
        novakv: settings of the plugin, such as the band's size; caches of vLLM's own have no use for them.
        engine: further arguments, the same for every cache.

    Returns:
        The arguments.

    Raises:
        ValueError: the cache is unknown.
    """
    if cache not in cache_names():
        raise ValueError(f"cache {cache!r} is unknown; choose from {', '.join(cache_names())}")
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "seed": 0, **engine}
    if cache in STOCK_CACHES:
        return arguments | STOCK_CACHES[cache]
    settings = dict(novakv)
    if cache != "novakv":
        settings["history"] = "exact"
    if cache not in ("novakv", "exact"):
        settings["baseline"] = cache
    return arguments | {"attention_backend": BACKEND_NAME, "additional_config": {"novakv": settings}}


class OfflineEngine:
    """One engine in a process of its own; use it as a context manager.

    Args:
        model: directory, or a hub name that is already downloaded.
        cache: one of `cache_names`.
        novakv: settings of the plugin.
        engine: further arguments of `vllm.LLM`.
        max_tokens: answer limit in tokens.
        temperature: 0 for greedy answers.

    Raises:
        ValueError: the cache is unknown.
    """

    def __init__(
        self,
        model: str,
        cache: str,
        novakv: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        max_tokens: int = 128,
        temperature: float = 0.0,
    ) -> None:
        self.cache = cache
        self._arguments = {"model": model} | engine_arguments(cache, novakv or {}, engine or {})
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self._process: Any = None
        self._connection: Connection | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def facts(self) -> dict[str, Any]:
        """What the engine says of itself, JSON values; starts it.

        "backends": layers per attention backend; "bits_per_element": mean over layers with full attention;
        "cache_dtypes": types of vLLM's own caches, without our backend's; "dtype": the model's type; "fit_sha256": of
        the tensors that the cache was fitted with, None if there are none.

        Raises:
            ValueError: the engine refuses its arguments, or runs another cache than was asked for.
        """
        if self._connection is None:
            self._start()
        return self._facts

    def answer(self, items: Sequence[Item], sample: int) -> list[str]:
        """Answers to the items' prompts, or to their messages where they have no token ids: a `runner.Answer`.

        Args:
            items: what to ask.
            sample: seed of answers that are drawn.

        Returns:
            One text per item.
        """
        prompts = [item.message if item.prompt_token_ids is None else list(item.prompt_token_ids) for item in items]
        answers: list[str] = self._ask("answer", prompts, {**self._sampling, "seed": sample})
        return answers

    def prompt_logprobs(self, windows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the windows' tokens after their first: a `perplexity.PromptLogprobs`."""
        logprobs: list[list[float]] = self._ask("logprobs", [list(window) for window in windows], {})
        return logprobs

    def close(self) -> None:
        """End the process; a later question would start another."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.join(_STOP_SECONDS)
            if self._process.is_alive():
                self._process.terminate()
            self._process = None

    def _start(self) -> None:
        # a forked process would inherit threads and, on a GPU, a CUDA context that it cannot use
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._arguments), name=f"novakv-eval-{self.cache}")
        self._process.start()
        theirs.close()
        try:
            self._facts = self._receive()
            self._check_cache()
        except BaseException:
            self.close()
            raise

    def _check_cache(self) -> None:
        is_ours = BACKEND_NAME in self._facts["backends"]
        if is_ours == (self.cache in STOCK_CACHES):
            raise ValueError(
                f"--cache {self.cache} ran on {self._facts['backends']}; the comparison would mean nothing"
            )
        if self.cache == "bf16" and self._facts["cache_dtypes"] != ["bfloat16"]:
            raise ValueError(
                f"--cache bf16 is vLLM's own cache of a BF16 model, and this one holds {self._facts['cache_dtypes']}; "
                "use --cache stock, or --dtype bfloat16"
            )

    def _ask(self, kind: str, inputs: list[Any], sampling: dict[str, Any]) -> Any:
        assert self.facts, "starting the engine fills them"
        assert self._connection is not None
        self._connection.send((kind, inputs, sampling))
        return self._receive()

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            is_answer, value = self._connection.recv()
        except EOFError as error:
            self._process.join(_STOP_SECONDS)
            raise ValueError(
                f"the engine of --cache {self.cache} ended without an answer (exit code {self._process.exitcode}); "
                "its own messages stand above; -9 means that the machine ran out of memory"
            ) from error
        if not is_answer:
            raise ValueError(f"the engine of --cache {self.cache} failed: {value}")
        return value


def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    """Runs in the engine's process: start it, say what it is, answer until told to stop."""
    # one process: the engine's layers can then be asked what they are
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    llm = None
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # without a size vLLM takes nearly all of the memory, and compiling takes minutes
            arguments = {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enforce_eager": True, **arguments}
        llm = LLM(**arguments)
        connection.send((True, llm.collective_rpc(_describe)[0]))
        while (request := connection.recv()) is not None:
            kind, inputs, sampling = request
            reply = _answers(llm, inputs, sampling) if kind == "answer" else prompt_logprobs(llm, inputs)
            connection.send((True, reply))
    except (EOFError, KeyboardInterrupt):
        pass  # the asking process is gone
    except Exception as error:
        if not isinstance(error, ValueError | NotImplementedError):
            traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"))
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _answers(llm: Any, prompts: list[Any], sampling: dict[str, Any]) -> list[str]:
    from vllm import SamplingParams

    params = SamplingParams(**sampling)
    if isinstance(prompts[0], str):
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=False)
    else:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def prompt_logprobs(llm: Any, windows: list[list[int]]) -> list[list[float]]:
    """Log-probability of every token of each window after its first, ``[num_windows][window_tokens - 1]``.

    Args:
        llm: a ``vllm.LLM`` of this process.
        windows: token ids.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    # one window at a time: the logits of several would not fit next to each other in a small machine's memory
    outputs = [llm.generate({"prompt_token_ids": window}, params, use_tqdm=False)[0] for window in windows]
    return [
        [entry[token].logprob for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True)]
        for window, output in zip(windows, outputs, strict=True)
    ]


def _describe(worker: Any) -> dict[str, Any]:
    """Runs in every worker: see `OfflineEngine.facts`."""
    from vllm_novakv.backend.layer_state import fit_sha256
    from vllm_novakv.config import NovaKVConfig

    config = worker.model_runner.vllm_config
    layers = [
        layer
        for layer in config.compilation_config.static_forward_context.values()
        if hasattr(layer, "impl") and hasattr(layer, "get_attn_backend")
    ]
    full = [layer for layer in layers if getattr(layer, "sliding_window", None) is None]
    ours = [layer for layer in layers if layer.get_attn_backend().get_name() == BACKEND_NAME]
    stock = [layer for layer in layers if layer not in ours]
    bits = [
        layer.impl.bits_per_element if layer in ours else 8.0 * layer.kv_cache_torch_dtype.itemsize for layer in full
    ]
    settings = NovaKVConfig.from_additional_config(config.additional_config) if ours else None
    return {
        "backends": dict(Counter(layer.get_attn_backend().get_name() for layer in layers)),
        "bits_per_element": sum(bits) / len(bits) if bits else None,
        "cache_dtypes": sorted({str(layer.kv_cache_torch_dtype).removeprefix("torch.") for layer in stock}),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "fit_sha256": fit_sha256(settings) if settings is not None else None,
    }
