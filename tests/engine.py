"""Runs offline vLLM engines in the test process and builds the tiny models that they load."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def build_tiny_llama(directory: Path, **overrides: Any) -> Path:
    """Save a small random Llama whose attention is far from uniform, so that a wrong cache changes its tokens.

    Args:
        directory: where to save.
        overrides: fields of ``LlamaConfig``.

    Returns:
        ``directory``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).float()
    model.save_pretrained(directory)
    return directory


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids below 500, which every model of the tests has."""
    generator = random.Random(seed)
    return [generator.randrange(3, 500) for _ in range(length)]


@contextmanager
def engine(model: Path, novakv: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """An in-process ``vllm.LLM``; with ``novakv`` settings on the NOVAKV backend, otherwise on vLLM's own.

    Args:
        model: folder of the model.
        novakv: settings below ``additional_config["novakv"]``, or ``None`` for the stock backend.
        options: further arguments of ``vllm.LLM``.
    """
    environment = dict(os.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "disable_log_stats": False,
        "seed": 0,
    }
    if novakv is not None:
        defaults |= {"attention_backend": "NOVAKV", "additional_config": {"novakv": novakv}}
    try:
        llm = LLM(str(model), **(defaults | options))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
    finally:
        # vLLM writes to the environment too; a server that a later test starts must not inherit any of it.
        os.environ.clear()
        os.environ.update(environment)


def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy token ids of all prompts, submitted together."""
    return [list(output.outputs[0].token_ids) for output in request_outputs(llm, prompts, max_tokens)]


def request_outputs(
    llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, logprobs: int | None = None
) -> list[Any]:
    """vLLM's outputs of all prompts, greedy, submitted together."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def margin_at_first_difference(expected: Any, actual: Any) -> float | None:
    """Log-probability by which ``expected`` preferred its token where ``actual`` first differs; None if it never does.

    Args:
        expected: a vLLM output with at least two log-probabilities per token.
        actual: the output to compare.
    """
    tokens, others = expected.outputs[0].token_ids, actual.outputs[0].token_ids
    for step, (token, other) in enumerate(zip(tokens, others, strict=True)):
        if token != other:
            best, second = sorted(entry.logprob for entry in expected.outputs[0].logprobs[step].values())[:-3:-1]
            return float(best - second)
    return None


def num_preemptions(llm: Any) -> int:
    """Requests that the engine preempted so far."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
