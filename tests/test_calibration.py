"""The fit: its parts on synthetic tensors, its refusals, and end to end on a tiny model inside vLLM."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import random_text, save_tiny_llama
from torch import Tensor

from vllm_novakv.artifact import MANIFEST_NAME, TENSORS_NAME, load
from vllm_novakv.baselines.moments import load_moments
from vllm_novakv.calibration import pipeline
from vllm_novakv.calibration.command import main
from vllm_novakv.calibration.moments import LayerMoments, chunk_moments
from vllm_novakv.calibration.pipeline import (
    FitSettings,
    fit,
    fit_layer,
    key_figures,
    normalised_samples,
    sample_positions,
    value_error,
)
from vllm_novakv.codec import quantizer, transform
from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.fingerprint import check_artifact_matches, check_same_model, fingerprint_model

HEAD_SIZE = 64
SMALL = {"num_centroids": 16, "num_tokens": 512, "seq_len": 200}


# parts


def synthetic_capture(num_tokens: int, num_heads: int, num_kv_heads: int, seed: int = 0) -> Any:
    """What an observer returns, for keys and queries with a few strong directions and a mean."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.logspace(0, -2, HEAD_SIZE)
    basis = torch.linalg.qr(torch.randn(HEAD_SIZE, HEAD_SIZE, generator=generator)).Q

    def rows(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_SIZE, generator=generator) * strength @ basis

    query, key, output = rows(num_tokens, num_heads), rows(num_tokens, num_kv_heads) + 1.5, rows(num_tokens, num_heads)
    return SimpleNamespace(
        moments=chunk_moments(query, key, output),
        keys=key.bfloat16(),
        heldout_query=rows(96, num_heads),
        heldout_key=rows(96, num_kv_heads) + 1.5,
        heldout_value=rows(96, num_kv_heads),
    )


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, pipeline.LayerFit]:
    capture = synthetic_capture(2048, 6, 2)
    return capture, fit_layer(3, capture, FitSettings(model="m", num_centroids=64))


def test_fit_layer_whitens_queries_and_reconstructs_held_out_keys(fitted: tuple[Any, pipeline.LayerFit]) -> None:
    capture, layer = fitted
    codec = layer.codec
    assert codec.codebook.shape == (2, 16, 64, 4)
    # transformed queries have unit variance in every direction
    moment = codec.key_transform_inv_t.double().mT @ capture.moments.query_moment @ codec.key_transform_inv_t.double()
    identity = torch.eye(HEAD_SIZE, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(moment / (2048 * 3), identity, rtol=1e-3, atol=1e-3)
    assert layer.figures.layer == 3
    assert 0 < layer.figures.relative_logit_error < 0.2
    assert 0.5 < layer.figures.top1_agreement <= 1
    assert 0.2 < layer.figures.value_relative_error < 0.45
    assert layer.figures.volume_spread_bits < layer.random_spread_bits < layer.sorted_spread_bits
    assert 0 < layer.key_distortion < 0.3


def test_fit_layer_gives_the_same_bytes_for_a_seed(fitted: tuple[Any, pipeline.LayerFit]) -> None:
    capture, first = fitted
    second = fit_layer(3, capture, FitSettings(model="m", num_centroids=64))
    for name in ("key_mean", "key_transform", "key_transform_inv_t", "value_transform", "codebook"):
        assert torch.equal(getattr(first.codec, name), getattr(second.codec, name))
    assert first.figures == second.figures
    other = fit_layer(3, capture, FitSettings(model="m", num_centroids=64, seed=1))
    assert not torch.equal(first.codec.codebook, other.codec.codebook)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fit_layer_leaves_only_values_of_the_codebook_type(dtype: Any) -> None:
    layer = fit_layer(0, synthetic_capture(256, 2, 1), FitSettings(model="m", num_centroids=16, codebook_dtype=dtype))
    assert torch.equal(layer.codec.codebook, layer.codec.codebook.to(getattr(torch, dtype)).float())


def test_key_figures_equal_a_loop_over_pairs(fitted: tuple[Any, pipeline.LayerFit]) -> None:
    capture, layer = fitted
    codec: LayerCodec = layer.codec
    query, key = capture.heldout_query[:20], capture.heldout_key[:20]
    indices, scale = quantizer.encode_keys(key, codec)
    decoded = quantizer.decode_keys(indices, scale, codec.codebook).double()
    error = energy = 0.0
    agreeing = []
    for head in range(6):
        kv_head = head // 3
        # the reconstructed key itself, through the inverse of R_K
        inverse = torch.linalg.inv(codec.key_transform[kv_head].double())
        restored_keys = decoded[:, kv_head] @ inverse + codec.key_mean[kv_head].double()
        for position in range(20):
            row = query[position, head].double()
            exact = key[: position + 1, kv_head].double() @ row
            restored = restored_keys[: position + 1] @ row
            error += float((exact - restored).square().sum())
            energy += float(exact.square().sum())
            agreeing.append(int(exact.argmax()) == int(restored.argmax()))
    measured_error, agreement = key_figures(codec, query, key)
    assert measured_error == pytest.approx(math.sqrt(error / energy), rel=1e-3)
    assert agreement == pytest.approx(sum(agreeing) / len(agreeing), abs=1.5 / len(agreeing))


def test_value_error_equals_the_error_of_restored_values(fitted: tuple[Any, pipeline.LayerFit]) -> None:
    capture, layer = fitted
    value = capture.heldout_value
    codes, scale = quantizer.encode_values(value, layer.codec.value_transform)
    rotated = quantizer.decode_values(codes, scale)
    restored = torch.einsum("thi,hji->thj", rotated, layer.codec.value_transform)
    expected = float((value - restored).norm() / value.norm())
    assert value_error(layer.codec, value) == pytest.approx(expected, rel=1e-4)


def test_normalised_samples_have_norm_sqrt_d_and_whole_groups() -> None:
    keys = torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(0))
    keys[4] = 0.5
    mean = torch.full((2, 8), 0.5, dtype=torch.float64)
    transform = torch.eye(8, dtype=torch.float64).flip(1).expand(2, -1, -1) * 3
    samples = normalised_samples(keys, mean, transform, 4)
    assert samples.shape == (4, 10, 4)
    # [kv head, token, coordinate]
    whole = samples.view(2, 2, 10, 4).transpose(1, 2).reshape(2, 10, 8)
    rotated = (keys.transpose(0, 1) - 0.5).flip(2) * 3
    norms = rotated.norm(dim=2, keepdim=True)
    expected = torch.where(norms == 0, rotated, rotated / norms * math.sqrt(8))
    torch.testing.assert_close(whole, expected)


def test_sample_positions_are_sorted_distinct_and_follow_the_seed() -> None:
    assert sample_positions(10, 10, seed=0).tolist() == list(range(10))
    drawn = sample_positions(1000, 50, seed=3)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert len(drawn) == 50
    assert torch.equal(drawn, sample_positions(1000, 50, seed=3))
    assert not torch.equal(drawn, sample_positions(1000, 50, seed=4))


# refusals that need no model run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(random_text(5000), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "missing.txt"], "prompt file missing.txt does not exist"),
        (["--num-tokens", "4095"], "--num-tokens 4095 is too small for 256 centroids"),
        (["--max-samples", "100"], "--max-samples 100 is too small for 256 centroids"),
        (["--num-tokens", "-3"], "--num-tokens: Input should be greater than or equal to 1"),
        (["--seq-len", "0"], "--seq-len: Input should be greater than or equal to 2"),
        (["--prompt-columns", "question"], "--prompt-columns does not apply"),
        (["--model", "/no/such/model"], "is not a directory"),
    ],
    ids=["prompts", "tokens", "samples", "negative", "seq-len", "columns", "model"],
)
def test_main_refuses_before_running_the_model(
    arguments: list[str],
    message: str,
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", str(tiny_llama), "--prompts", str(prompts), "--out", str(tmp_path / "out"), *arguments]
    assert main(given, prog="fit") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_refuses_an_output_directory_that_cannot_be_made(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a file where a parent directory should be: refused for every user, root included
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "out"
    assert main(["--model", str(tiny_llama), "--prompts", str(prompts), "--out", str(out)], prog="fit") == 1
    assert str(out) in capsys.readouterr().err


def test_main_refuses_to_replace_a_directory_of_other_things(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    given = ["--model", str(tiny_llama), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert main(given, prog="fit") == 1
    assert "thesis.txt" in capsys.readouterr().err or (tmp_path / "out" / "thesis.txt").exists()


def test_help_explains_prompt_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"], prog="fit")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "Incorrect Answer 1 to 3" in text
    assert "question, prompt or text" in text


# end to end


def hugging_face_moments(model_dir: Path, sequences: list[list[int]]) -> list[LayerMoments]:
    """Moments of every layer of a Llama, from transformers' own modules."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).model
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    result: list[LayerMoments | None] = [None] * config.num_hidden_layers
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
            cos, sin = model.rotary_emb(hidden[0], torch.arange(len(sequence)).unsqueeze(0))
            for index, layer in enumerate(model.layers):
                normed = layer.input_layernorm(hidden[index])
                attention = layer.self_attn
                query = attention.q_proj(normed).view(1, -1, heads, HEAD_SIZE).transpose(1, 2)
                key = attention.k_proj(normed).view(1, -1, kv_heads, HEAD_SIZE).transpose(1, 2)
                value = attention.v_proj(normed).view(1, -1, kv_heads, HEAD_SIZE).transpose(1, 2)
                query, key = apply_rotary_pos_emb(query, key, cos, sin)
                output = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
                chunk = chunk_moments(query[0].transpose(0, 1), key[0].transpose(0, 1), output[0].transpose(0, 1))
                before = result[index]
                result[index] = chunk if before is None else before.merge(chunk)
    return [moments for moments in result if moments is not None]


@pytest.mark.e2e
@pytest.mark.parametrize("is_stock", [False, True], ids=["one-request-attention", "stock-attention"])
def test_capture_observes_what_transformers_computes(
    is_stock: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm_novakv.calibration import capture as capturing

    if is_stock:
        monkeypatch.setattr(capturing, "is_replaceable", lambda impl: False)
    # three chunks in the longest sequence, the last one partial
    monkeypatch.setattr(capturing, "_CHUNK_TOKENS_CPU", 64)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (150, 1, 64)]
    heldout = torch.randint(3, 300, (70,), generator=generator).tolist()
    positions = torch.tensor([0, 63, 64, 149, 150, 151, 214])
    plan = capturing.CapturePlan(tuple(map(tuple, sequences)), tuple(heldout), positions)
    threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    captures = capturing.capture(str(tiny_llama), plan, capturing.inspect_model(str(tiny_llama)))
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == threads

    expected = hugging_face_moments(tiny_llama, sequences)
    assert list(captures) == [0, 1]
    for layer, moments in enumerate(expected):
        found = captures[layer].moments
        assert found.num_tokens == 215
        for name in ("query_moment", "key_mean", "key_scatter", "output_moment"):
            torch.testing.assert_close(getattr(found, name), getattr(moments, name), rtol=1e-3, atol=2e-3)
        assert captures[layer].keys.shape == (7, 2, HEAD_SIZE)
        assert captures[layer].heldout_query.shape == (70, 4, HEAD_SIZE)
        assert captures[layer].heldout_value.shape == (70, 2, HEAD_SIZE)
    # kept keys are those of the asked positions, rounded to the type in which the model is served
    for row, sequence in ((0, sequences[0][:1]), (4, sequences[1])):
        first_key = hugging_face_moments(tiny_llama, [sequence])[0].key_mean
        torch.testing.assert_close(captures[0].keys[row].double(), first_key, rtol=2**-8, atol=1e-3)


@pytest.mark.e2e
def test_fit_writes_an_artifact_of_the_model_with_the_same_bytes_for_a_seed(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    settings = FitSettings(model=str(tiny_llama), prompts=prompts, out=tmp_path / "a", save_moments=True, **SMALL)
    result = fit(settings)
    artifact = load(tmp_path / "a")
    check_artifact_matches(artifact, fingerprint_model(tiny_llama))
    assert artifact.manifest.layer_indices == (0, 1)
    assert artifact.manifest.calibration.num_tokens == 512
    assert artifact.manifest.calibration.seq_len == 200
    assert [figures.layer for figures in artifact.manifest.layers] == [0, 1]
    assert all(0 < figures.relative_logit_error < 1 for figures in artifact.manifest.layers)
    assert not result.is_default_directory

    saved = load_moments(tmp_path / "a-moments")
    check_same_model(saved.manifest.fingerprint, fingerprint_model(tiny_llama))
    assert saved.manifest.calibration == artifact.manifest.calibration
    # the rotation of values follows from the same moments
    expected = transform.value_transform(saved.layers[1].output_moment).float()
    torch.testing.assert_close(expected.abs(), artifact.layers[1].value_transform.abs(), atol=1e-3, rtol=0)

    fit(settings.model_copy(update={"out": tmp_path / "b", "save_moments": False}))
    assert not (tmp_path / "b-moments").exists()
    for name in (MANIFEST_NAME, TENSORS_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.e2e
def test_main_fits_into_the_default_directory_and_says_how_to_serve(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ["--model", str(tiny_llama), "--prompts", str(prompts), "--seq-len", "256", "--skip-layers", "1"]
    assert main([*given, "--num-tokens", "4096"], prog="fit") == 0
    text = capsys.readouterr().out
    assert "bits per element: 2.25" in text
    assert "layers left on vLLM's own cache: 1" in text
    serve = f"novakv serve {tiny_llama} --additional-config '{json.dumps({'novakv': {'skip_layers': [1]}})}'"
    assert serve in text
    (directory,) = (tmp_path / "vllm_novakv").iterdir()
    assert load(directory).manifest.layer_indices == (0,)


@pytest.mark.e2e
def test_main_interrupted_writes_nothing_and_keeps_an_earlier_artifact(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")

    def interrupt(*_args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "fit_layer", interrupt)
    out = tmp_path / "out"
    given = ["--model", str(tiny_llama), "--prompts", str(prompts), "--num-tokens", "4096", "--out", str(out)]
    assert main(given, prog="fit") == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "513"], "--seq-len 513 is longer than the model's limit of 512 tokens"),
        (["--num-tokens", "100000"], "--num-tokens 100000 needs 100000 and 512 more"),
        (["--skip-layers", "0,7"], "skip_layers=[7] are not layers of this model"),
        (["--skip-layers", "0,1"], "no layer is left to quantize"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size=3 does not divide the model's 2 KV heads"),
    ],
    ids=["seq-len", "short", "unknown-layer", "no-layer", "ranks"],
)
def test_main_refuses_what_only_the_model_tells(
    arguments: list[str],
    message: str,
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    given = ["--model", str(tiny_llama), "--prompts", str(prompts), "--out", str(tmp_path / "out"), *arguments]
    assert main(given, prog="fit") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
