"""Two ranks, each with its share of the heads and of the artifact, answer as one (fp32)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine import build_tiny_llama, engine, margin_at_first_difference, random_prompt, request_outputs
from test_engine_quantized import TIE_MARGIN, save_sample_artifact

IS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(IS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not IS_GPU and len(os.sched_getaffinity(0)) < 2, reason="needs two processor cores"),
]
PROMPT_LENGTHS = (3, 129, 600, 1100)
MAX_TOKENS = 16


def test_two_ranks_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over heads is split in two, so the last bits of a logit differ: two tokens as good as equal may swap."""
    if path := os.environ.get("NOVAKV_TEST_TP_MODEL"):
        model, artifact = Path(path), Path(os.environ["NOVAKV_TEST_TP_ARTIFACT"])
    else:
        model = build_tiny_llama(tmp_path / "model")
        artifact = save_sample_artifact(model, tmp_path / "artifact")
    if not IS_GPU:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
    prompts = [random_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    outputs = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 512}
        with engine(model, {"artifact": str(artifact)}, **options) as llm:
            outputs.append(request_outputs(llm, prompts, MAX_TOKENS, logprobs=2))
    margins = [margin_at_first_difference(one, two) for one, two in zip(*outputs, strict=True)]
    assert [margin for margin in margins if margin is not None and margin >= TIE_MARGIN] == []
    assert sum(margin is None for margin in margins) >= len(margins) // 2
