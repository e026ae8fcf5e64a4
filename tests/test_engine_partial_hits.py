"""Prefix hits inside a history block in a running engine: the same answers, more hit tokens, no block lost (fp32)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine import (
    build_tiny_llama,
    engine,
    margin_at_first_difference,
    num_preemptions,
    random_prompt,
    request_outputs,
)
from test_engine_quantized import TIE_MARGIN, save_sample_artifact

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A quantized history with a band that most prompts exceed, and the index."""
    artifact = save_sample_artifact(model, tmp_path_factory.mktemp("artifact") / "tiny")
    band = {"sink_tokens": 16, "recent_tokens": 64, "prompt_recent_tokens": 128}
    return {"artifact": str(artifact), **band, "prefix_index": {"policy": "lru"}}


def with_reuse(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"prefix_index": settings["prefix_index"] | {"reuse_within_blocks": True}}


def usage(llm: Any) -> list[float]:
    return [metric.value for metric in llm.get_metrics() if metric.name == "vllm:kv_cache_usage_perc"]


def assert_same_answers(expected: list[Any], actual: list[Any], max_ties: int = 0) -> None:
    """Sums in float32 depend on the shape of a batch in their last bits, so equally good tokens may change places."""
    margins = [margin_at_first_difference(a, b) for a, b in zip(expected, actual, strict=True)]
    ties = [margin for margin in margins if margin is not None]
    assert all(margin < TIE_MARGIN for margin in ties), margins
    assert len(ties) <= max_ties


def test_forks_inside_blocks_answer_as_without_reuse(model: Path, settings: dict[str, Any]) -> None:
    base = random_prompt(700, seed=1)
    cuts = [700, 20, 100, 130, 333, 511, 513, 690]
    prompts = [base, *(base[:cut] + random_prompt(90, seed=cut) for cut in cuts), base]
    # the last fork's own continuation, parted once more
    prompts.append(prompts[-2][:750] + random_prompt(40, seed=2))
    answers, hits = {}, {}
    for name, novakv in (("off", settings), ("on", with_reuse(settings))):
        with engine(model, novakv) as llm:
            outputs = [request_outputs(llm, [prompt], 8, logprobs=2)[0] for prompt in prompts]
            assert usage(llm) == [0.0]
        answers[name], hits[name] = outputs, [output.num_cached_tokens for output in outputs]
    print(hits)
    assert hits["off"] == [0, 640, 0, 0, 128, 256, 384, 512, 640, 640, 640]
    assert hits["on"] == [0, 700 // 16 * 16, *(cut // 16 * 16 for cut in cuts[1:]), 688, 736]
    assert_same_answers(answers["off"], answers["on"])


def test_crowds_in_a_small_pool_answer_as_without_reuse(model: Path, settings: dict[str, Any]) -> None:
    generator = random.Random(5)
    stems = [random_prompt(300, seed=1000 + i) for i in range(2)]
    prompts = [
        (generator.choice(stems)[: generator.randrange(20, 300)] if i % 4 else [])
        + random_prompt(generator.randrange(1, 80), seed=2000 + i)
        for i in range(24)
    ]
    # lossless: a sum's last bits would give a key on the border of two cells the other index
    exact = {key: value for key, value in settings.items() if key != "artifact"} | {"history": "exact"}
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512, "max_num_batched_tokens": 256}
    answers, hits = {}, {}
    for name, novakv in (("off", exact), ("on", with_reuse(exact))):
        with engine(model, novakv, **small) as llm:
            answers[name] = request_outputs(llm, prompts, 16, logprobs=2)
            preempted = num_preemptions(llm)
            assert usage(llm) == [0.0]
            assert llm.reset_prefix_cache()
        hits[name] = sum(output.num_cached_tokens for output in answers[name])
        assert preempted > 0
    print(f"hit tokens {hits}")
    assert_same_answers(answers["off"], answers["on"], max_ties=2)
    assert hits["on"] > hits["off"]


def test_aborted_request_leaves_no_block(model: Path, settings: dict[str, Any]) -> None:
    from vllm import SamplingParams

    base = random_prompt(300, seed=1)
    fork = base[:200] + random_prompt(200, seed=2)
    with engine(model, with_reuse(settings), max_num_batched_tokens=128) as llm:
        expected = request_outputs(llm, [fork], 8)[0].outputs[0].token_ids
        assert llm.reset_prefix_cache()
        request_outputs(llm, [base], 1)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("aborted", {"prompt_token_ids": fork}, params)
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["aborted"])
        output = request_outputs(llm, [fork], 8)[0]
        assert output.num_cached_tokens >= 192
        assert output.outputs[0].token_ids == expected
        assert usage(llm) == [0.0]
        assert llm.reset_prefix_cache()
