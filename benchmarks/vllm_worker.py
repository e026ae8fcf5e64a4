"""Run one job on one offline vLLM engine: `python vllm_worker.py JOB.json ANSWER.json`.

A job is one engine's settings with what to ask it; a fresh process per engine keeps the compared caches apart.

Job:    {"engine": {LLM arguments}, "windows": [[token ids]], "prompts": [[token ids]], "max_answer_tokens": int}
Answer: {"window_logprobs": [[float]], "answers": [str], "backends": {name: layers}, "num_cache_blocks": int,
         "perplexity_seconds": float, "generate_seconds": float}
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_novakv.offline import prompt_logprobs

# one process: the engine's layers can then be asked which backend they run
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def backends_in_use(llm: Any) -> dict[str, int]:
    """Attention backends of an engine's layers, with the number of layers on each."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return dict(Counter(layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "impl")))


def greedy_answers(llm: Any, prompts: list[list[int]], max_answer_tokens: int) -> list[str]:
    """Greedy continuation of each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_answer_tokens, temperature=0.0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].text for output in outputs]


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of a job and ask everything; see the module docstring."""
    from vllm import LLM

    llm = LLM(**job["engine"])
    start = time.perf_counter()
    logprobs = prompt_logprobs(llm, job["windows"])
    middle = time.perf_counter()
    answers = greedy_answers(llm, job["prompts"], job["max_answer_tokens"]) if job["prompts"] else []
    end = time.perf_counter()
    cache_config = llm.llm_engine.vllm_config.cache_config
    blocks = cache_config.num_gpu_blocks
    return {
        "window_logprobs": logprobs,
        "answers": answers,
        "backends": backends_in_use(llm),
        "num_cache_blocks": blocks,
        "perplexity_seconds": middle - start,
        "generate_seconds": end - middle,
    }


if __name__ == "__main__":
    job_path, answer_path = map(Path, sys.argv[1:])
    answer_path.write_text(json.dumps(run_job(json.loads(job_path.read_text()))))
