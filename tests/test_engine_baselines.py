"""Compared methods inside a running engine (fp32): the chunking changes nothing, the method does; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import build_tiny_llama, engine, generate, random_prompt
from test_engine_quantized import save_sample_artifact
from test_startup_refusals import engine_config, refusal

from vllm_novakv.artifact import CalibrationRecord
from vllm_novakv.baselines.moments import AttentionMoments, moments_directory, save_moments
from vllm_novakv.fingerprint import fingerprint_model

MAX_TOKENS = 24
# a narrow band, so that most keys are read from the history
BAND = {"sink_tokens": 16, "recent_tokens": 16, "prompt_recent_tokens": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def artifact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_sample_artifact(tiny, tmp_path_factory.mktemp("artifact") / "tiny")
    save_sample_moments(tiny, moments_directory(directory))
    return directory


@pytest.fixture(autouse=True)
def empty_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save_sample_moments(model: Path, directory: Path, num_layers: int = 3) -> None:
    record = CalibrationRecord(source="test", num_tokens=1, seq_len=1, seed=0, vllm_version="test", created="")
    x = torch.randn(2, 99, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = {layer: AttentionMoments(x.mT @ x, x.mT @ x) for layer in range(num_layers)}
    save_moments(layers, fingerprint_model(model), record, directory)


def settings(baseline: str | None, artifact: Path, **others: Any) -> dict[str, Any]:
    method = {} if baseline is None else {"baseline": baseline, "artifact": str(artifact)}
    return {"history": "exact", **BAND, **method, **others}


@pytest.mark.e2e
@pytest.mark.parametrize("baseline", ["oscar-int2", "kivi-int2", "novakv-norm-min-max"])
def test_an_answer_does_not_depend_on_chunks_and_batches_but_on_the_method(
    tiny: Path, artifact: Path, baseline: str
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (700, 333, 150)]
    with engine(tiny, settings(baseline, artifact), enable_prefix_caching=False) as llm:
        alone = [generate(llm, [prompt], MAX_TOKENS)[0] for prompt in prompts]
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        bits = {layer.impl.bits_per_element for layer in context.values() if hasattr(layer, "impl")}
    # at head size 64: 2 + 32/64, 2 + 32/32, and (2 + 16/64 + 2 + 32/64) / 2
    assert bits == {{"oscar-int2": 2.5, "kivi-int2": 3.0, "novakv-norm-min-max": 2.375}[baseline]}
    with engine(tiny, settings(baseline, artifact), max_num_batched_tokens=256) as llm:
        assert generate(llm, prompts, MAX_TOKENS) == alone
        # prefix hits
        assert generate(llm, prompts, MAX_TOKENS) == alone
    if baseline == "oscar-int2":
        with engine(tiny, settings(None, artifact)) as llm:
            assert generate(llm, prompts, MAX_TOKENS) != alone


def test_methods_that_need_no_fit_need_no_files(tiny: Path, tmp_path: Path) -> None:
    config = engine_config(tiny, {"history": "exact", "baseline": "quarot-int2"})
    assert config.additional_config["novakv"] == {"history": "exact", "baseline": "quarot-int2"}


def test_missing_and_foreign_moments_are_refused(tiny: Path, artifact: Path, tmp_path: Path) -> None:
    assert "novakv fit --model MODEL --save-moments" in refusal(tiny, settings("oscar-int2", tmp_path / "none"))
    other = build_tiny_llama(tmp_path / "other", initializer_range=0.05)
    assert "another model" in refusal(other, settings("oscar-int2", artifact))
    config = engine_config(tiny, settings("oscar-int2", artifact))
    assert config.additional_config["novakv"]["artifact"] == str(artifact.resolve())


def test_a_method_of_ours_needs_the_artifact(tiny: Path) -> None:
    assert "no fitted artifact" in refusal(tiny, {"history": "exact", "baseline": "novakv-norm-min-max"})


def test_a_baseline_with_a_quantized_history_is_refused(tiny: Path, artifact: Path) -> None:
    assert 'add "history": "exact"' in refusal(tiny, {"baseline": "quarot-int2", "artifact": str(artifact)})
