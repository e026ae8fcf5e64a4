"""Bad input is refused while vLLM builds its configuration, before any weight is loaded, with what to do instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine import build_tiny_llama
from test_engine_quantized import save_sample_artifact

EXACT = {"history": "exact"}


def engine_config(model: Path, novakv: dict[str, Any] | None = None, **options: Any) -> Any:
    """vLLM's configuration for a server on NOVAKV: what runs first in every start."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {
        "model": str(model),
        "attention_backend": "NOVAKV",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "additional_config": {"novakv": novakv or {}},
    }
    return EngineArgs(**(defaults | options)).create_engine_config()


def refusal(model: Path, novakv: dict[str, Any] | None = None, **options: Any) -> str:
    """The text with which a configuration is refused."""
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        engine_config(model, novakv, **options)
    return str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def artifact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sample_artifact(tiny, tmp_path_factory.mktemp("artifact") / "tiny")


@pytest.fixture(autouse=True)
def empty_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def changed_model(tiny: Path, directory: Path, **config: Any) -> Path:
    """A copy of the tiny model with other values in its config.json."""
    shutil.copytree(tiny, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def test_a_fitting_artifact_is_accepted_and_its_folder_is_noted(tiny: Path, artifact: Path) -> None:
    config = engine_config(tiny, {"artifact": str(artifact), "recent_tokens": 128})
    assert config.additional_config["novakv"]["artifact"] == str(artifact.resolve())
    assert config.additional_config["novakv"]["recent_tokens"] == 128


def test_the_artifact_is_found_in_the_users_cache(tiny: Path) -> None:
    from vllm_novakv.fingerprint import default_artifact_dir, fingerprint_model

    directory = default_artifact_dir(fingerprint_model(tiny))
    directory.parent.mkdir(parents=True)
    save_sample_artifact(tiny, directory)
    assert engine_config(tiny).additional_config["novakv"]["artifact"] == str(directory.resolve())


def test_no_artifact(tiny: Path, tmp_path: Path) -> None:
    assert f"novakv fit --model {tiny}" in refusal(tiny)
    assert "does not exist" in refusal(tiny, {"artifact": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 4),
        ("num_hidden_layers", 2),
        ("head_dim", 128),
        ("rope_parameters", {"rope_theta": 5000.0, "rope_type": "default"}),
    ],
)
def test_artifact_of_another_model(tiny: Path, artifact: Path, tmp_path: Path, field: str, value: object) -> None:
    other = changed_model(tiny, tmp_path / "other", **{field: value})
    assert "fit" in (text := refusal(other, {"artifact": str(artifact)}))
    assert "another model" in text or "differ" in text


def test_artifact_of_other_weights(tiny: Path, artifact: Path, tmp_path: Path) -> None:
    other = build_tiny_llama(tmp_path / "other", initializer_range=0.05)
    assert "weights" in refusal(other, {"artifact": str(artifact)})


def test_artifact_of_the_model_without_its_overrides(tiny: Path, artifact: Path) -> None:
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    assert "rope" in refusal(tiny, {"artifact": str(artifact)}, hf_overrides={"rope_parameters": rope})
    same = {"rope_theta": 10000.0, "rope_type": "default"}
    engine_config(tiny, {"artifact": str(artifact)}, hf_overrides={"rope_parameters": same})


@pytest.mark.parametrize("damage", ["truncated", "flipped", "manifest"])
def test_damaged_artifact(tiny: Path, artifact: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(artifact, copy)
    path = copy / ("manifest.json" if damage == "manifest" else "tensors.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    else:
        del content[-20:]
    path.write_bytes(content)
    assert "novakv fit" in refusal(tiny, {"artifact": str(copy)})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recent": 256}, "Known settings: artifact"),
        ({"recent_tokens": 100}, "multiple of 16"),
        ({"skip_layers": [9]}, "skip_layers=[9]"),
        ({"skip_layers": [0, 1, 2]}, "no layer is left to quantize"),
        ({"history": "lossy"}, "history"),
    ],
    ids=["unknown-key", "odd-band", "no-such-layer", "nothing-left", "unknown-history"],
)
def test_wrong_settings(tiny: Path, settings: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tiny, EXACT | settings)


def test_settings_that_are_no_object(tiny: Path) -> None:
    assert "must be an object" in refusal(tiny, additional_config={"novakv": "quantized"})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative decoding",
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"block_size": 64}, "--block-size 64"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
    ],
    ids=["connector", "speculative", "kv-dtype", "block-size", "no-hybrid-manager"],
)
def test_unsupported_engine_features(tiny: Path, options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tiny, EXACT, **options)


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism(tiny: Path, field: str) -> None:
    """vLLM's CPU platform cannot be configured for it, so the check itself is called on a changed configuration."""
    from vllm_novakv.backend.validation import validate_and_resolve

    config = engine_config(tiny, EXACT)
    object.__setattr__(config.parallel_config, field, 2)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        validate_and_resolve(config)


def test_unsupported_head_size(tiny: Path, tmp_path: Path) -> None:
    assert "head_size=96" in refusal(changed_model(tiny, tmp_path / "hs96", head_dim=96), EXACT)


def test_mla_model(tiny: Path, tmp_path: Path) -> None:
    model = changed_model(
        tiny,
        tmp_path / "mla",
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        first_k_dense_replace=3,
    )
    assert "MLA" in refusal(model, EXACT)


def test_encoder_model(tiny: Path, tmp_path: Path) -> None:
    model = changed_model(
        tiny, tmp_path / "bert", architectures=["BertModel"], model_type="bert", max_position_embeddings=512
    )
    text = refusal(model, EXACT, max_model_len=512)
    assert "encoder" in text


def test_old_vllm(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    assert "0.31.2 is too old" in refusal(tiny, EXACT)


def test_a_server_that_does_not_ask_for_it_is_not_touched(tiny: Path) -> None:
    config = engine_config(tiny, {"recent": "nonsense"}, attention_backend=None)
    assert config.additional_config == {"novakv": {"recent": "nonsense"}}
