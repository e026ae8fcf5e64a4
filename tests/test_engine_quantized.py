"""The quantized cache inside a running engine: an answer depends on its prompt alone (fp32)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from codec_samples import sample_codec
from engine import (
    build_tiny_llama,
    engine,
    generate,
    margin_at_first_difference,
    num_preemptions,
    random_prompt,
    request_outputs,
)

from vllm_novakv import artifact as artifacts
from vllm_novakv.fingerprint import fingerprint_model

pytestmark = pytest.mark.e2e
NUM_REQUESTS = 200
MAX_TOKENS = 8
TIE_MARGIN = 1e-3


def save_sample_artifact(model: Path, directory: Path, num_layers: int = 3) -> Path:
    """An artifact with plausible, not fitted, tensors for a tiny model: enough where only equality is tested."""
    codecs = {
        layer: sample_codec(num_heads=2, head_size=64, num_centroids=256, seed=10 * layer)
        for layer in range(num_layers)
    }
    figures = [
        artifacts.LayerFigures(
            layer=layer,
            relative_logit_error=0.0,
            top1_agreement=1.0,
            volume_spread_bits=0.0,
            value_relative_error=0.0,
        )
        for layer in codecs
    ]
    record = artifacts.CalibrationRecord(
        source="test", num_tokens=1, seq_len=1, seed=0, vllm_version="test", created=""
    )
    built = artifacts.build(
        codecs,
        fingerprint=fingerprint_model(model),
        codebook_dtype="float8_e4m3fn",
        calibration=record,
        figures=figures,
    )
    artifacts.save(built, directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, or the one that NOVAKV_TEST_MODEL names."""
    if path := os.environ.get("NOVAKV_TEST_MODEL"):
        return Path(path)
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def novakv(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name an artifact for the model."""
    if path := os.environ.get("NOVAKV_TEST_ARTIFACT"):
        return {"artifact": path}
    return {"artifact": str(save_sample_artifact(model, tmp_path_factory.mktemp("artifact") / "tiny"))}


def test_prefix_hit_gives_the_tokens_of_a_fresh_request(model: Path, novakv: dict[str, str]) -> None:
    base = random_prompt(1500, seed=1)
    prompts = [base, base[:1000] + random_prompt(100, seed=2), base[:1000] + random_prompt(300, seed=3), base]
    with engine(model, novakv, enable_prefix_caching=False) as llm:
        fresh = [generate(llm, [prompt], 8)[0] for prompt in prompts]
    with engine(model, novakv) as llm:
        outputs = [request_outputs(llm, [prompt], 8)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 896, 896, 1408]
    assert [list(output.outputs[0].token_ids) for output in outputs] == fresh


def mixed_requests() -> list[list[int]]:
    """Prompts of 1 to 700 tokens; three of four share one of four stems for a random stretch."""
    generator = random.Random(5)
    stems = [random_prompt(700, seed=1000 + i) for i in range(4)]
    requests = []
    for i in range(NUM_REQUESTS):
        shared = generator.choice(stems)[: generator.randrange(0, 640)] if i % 4 else []
        requests.append(shared + random_prompt(generator.randrange(1, 60), seed=2000 + i))
    return requests


def test_mixed_requests_under_eviction_and_preemption_answer_as_each_alone(model: Path, novakv: dict[str, str]) -> None:
    """Float32 sums depend on the shape of a batch in their last bits, and a key that lies on the border of two cells
    may then get the other index. Such a request may differ only where its two best tokens are as good as equal."""
    requests = mixed_requests()
    # a window that most prompts exceed
    novakv = novakv | {"prompt_recent_tokens": 320}
    with engine(model, novakv, enable_prefix_caching=False) as llm:
        alone = [request_outputs(llm, [prompt], MAX_TOKENS, logprobs=2)[0] for prompt in requests]
    # Just above the smallest pool that the start-up check accepts: 8 blocks of history and 60 of band.
    options = {"max_model_len": 1024, "max_num_batched_tokens": 384, "num_gpu_blocks_override": 72}
    with engine(model, novakv, **options) as llm:
        together = request_outputs(llm, requests, MAX_TOKENS)
        assert num_preemptions(llm) > 0
        assert sum(output.num_cached_tokens for output in together) > 0
        usage = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:kv_cache_usage_perc"]
        assert usage == [0.0]
    margins = [margin_at_first_difference(a, b) for a, b in zip(alone, together, strict=True)]
    ties = [margin for margin in margins if margin is not None and margin < TIE_MARGIN]
    mismatches = [(i, margin) for i, margin in enumerate(margins) if margin is not None and margin >= TIE_MARGIN]
    print(f"{len(requests)} requests, {len(ties)} ties {ties}, mismatches {mismatches}")
    assert mismatches == []
    assert len(ties) <= 2
