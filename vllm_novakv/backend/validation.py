"""Start-up checks: what NOVAKV cannot serve is refused before the model is loaded, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_novakv.artifact import ArtifactError
from vllm_novakv.backend.compat import VllmConfig, init_logger, vllm_version
from vllm_novakv.backend.layer_state import load_artifact, load_artifact_moments
from vllm_novakv.backend.prefix_settings import resolve_prefix_index
from vllm_novakv.baselines import BASELINES
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.config import ADDITIONAL_CONFIG_KEY, HistoryFormat, NovaKVConfig
from vllm_novakv.fingerprint import (
    ModelFingerprint,
    check_artifact_matches,
    check_layers,
    check_same_model,
    default_artifact_dir,
    fingerprint_model,
    resolve_model_dir,
)
from vllm_novakv.plugin import BACKEND_NAME
from vllm_novakv.support import assess_model, vllm_version_problem

logger = init_logger(__name__)


def validate_and_resolve(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served and note the artifact's folder in the configuration, for all processes to use.

    Args:
        vllm_config: the complete configuration; its ``additional_config`` is replaced.

    Raises:
        NotImplementedError: a model or an engine feature that is not supported.
        ValueError: a wrong setting, or an artifact that is missing, broken or of another model.
    """
    if vllm_config.model_config is None:
        return
    if problem := vllm_version_problem(vllm_version()):
        raise NotImplementedError(f"{BACKEND_NAME}: {problem}")
    config = NovaKVConfig.from_additional_config(vllm_config.additional_config)
    _refuse_unsupported_model(vllm_config, config)
    _refuse_unsupported_features(vllm_config)
    resolved: dict[str, Any] = {}
    if config.prefix_index is not None:
        resolved["prefix_index"] = resolve_prefix_index(vllm_config, config.prefix_index)
    needs = "artifact"
    if config.history is HistoryFormat.EXACT:
        logger.warning(
            '%s: "history": "exact" stores keys and values in the model\'s type, in more memory than a stock server '
            "uses; it is meant for tests and for measuring other methods",
            BACKEND_NAME,
        )
        needs = "nothing" if config.baseline is None else BASELINES[config.baseline].needs
    if needs != "nothing":
        resolve = _resolve_artifact if needs == "artifact" else _resolve_moments
        resolved["artifact"] = resolve(vllm_config, config)
    if not resolved:
        return
    settings = config.model_copy(update=resolved).model_dump(mode="json")
    vllm_config.additional_config = {**_as_dict(vllm_config.additional_config), ADDITIONAL_CONFIG_KEY: settings}


def _as_dict(additional_config: Any) -> dict[str, Any]:
    return dict(additional_config) if isinstance(additional_config, dict) else {}


def _refuse_unsupported_model(vllm_config: VllmConfig, config: NovaKVConfig) -> None:
    model = vllm_config.model_config
    support = assess_model(model.hf_config.to_dict(), config.skip_layers)
    problems = list(support.problems)
    if model.use_mla:
        problems.append("the model uses multi-head latent attention (MLA), whose cache is compressed already")
    if model.is_encoder_decoder:
        problems.append("the model is an encoder-decoder")
    if model.runner_type != "generate":
        problems.append(f"--runner {model.runner_type} keeps no cache of a conversation")
    if model.is_hybrid or model.is_attention_free:
        problems.append("the model has layers that are not attention (a state-space or linear-attention model)")
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        problems.append("the model has chunked-attention layers, which are not tested with this backend")
    if getattr(model.hf_config, "rswa_window", None):
        problems.append("the model uses reference sliding-window attention, whose mask this backend does not have")
    if problems:
        raise NotImplementedError(
            f"{BACKEND_NAME} cannot serve {model.model}: {'; '.join(problems)}. Serve it without "
            f"--attention-backend {BACKEND_NAME}; `novakv doctor` tells which models are supported"
        )


def _refuse_unsupported_features(vllm_config: VllmConfig) -> None:
    problems = [text for is_used, text in _unsupported_features(vllm_config) if is_used]
    if problems:
        raise NotImplementedError(f"{BACKEND_NAME} does not support {'; nor '.join(problems)}")


def _unsupported_features(vllm_config: VllmConfig) -> Iterator[tuple[bool, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    yield (
        vllm_config.kv_transfer_config is not None,
        "KV connectors (--kv-transfer-config): quantized pages and the band are not transferred; drop the option",
    )
    yield (
        vllm_config.speculative_config is not None,
        "speculative decoding (--speculative-config): not tested yet; drop the option",
    )
    yield (
        parallel.decode_context_parallel_size > 1,
        f"decode context parallelism (--decode-context-parallel-size {parallel.decode_context_parallel_size}): use 1",
    )
    yield (
        parallel.prefill_context_parallel_size > 1,
        "prefill context parallelism (--prefill-context-parallel-size): use 1",
    )
    yield parallel.enable_dbo, "dual-batch overlap (--enable-dbo): drop the option"
    yield (
        cache.cache_dtype != "auto",
        f"--kv-cache-dtype {cache.cache_dtype}: the cache has its own format; drop the option or use auto",
    )
    yield (
        bool(cache.kv_cache_dtype_skip_layers),
        "--kv-cache-dtype-skip-layers: name layers to keep in the model's type with "
        '--additional-config \'{"novakv": {"skip_layers": [0]}}\'',
    )
    yield (
        cache.user_specified_block_size and cache.block_size != BLOCK_TOKENS,
        f"--block-size {cache.block_size}: history blocks hold {BLOCK_TOKENS} tokens; drop the option",
    )
    yield (
        bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
        "--disable-hybrid-kv-cache-manager: history and band are two cache groups; drop the option",
    )


def _artifact_directory(vllm_config: VllmConfig, config: NovaKVConfig) -> tuple[Path, ModelFingerprint]:
    """Where the artifact should be, and for which model."""
    model = vllm_config.model_config
    # Overrides can change what the artifact was fitted for (the position encoding); config.json does not show them.
    overridden = model.hf_config.to_dict() if model.hf_overrides else None
    fingerprint = fingerprint_model(resolve_model_dir(model.model), overridden)
    return config.artifact or default_artifact_dir(fingerprint), fingerprint


def _resolve_moments(vllm_config: VllmConfig, config: NovaKVConfig) -> Path:
    """Load and verify the moments beside the artifact, which itself is not needed; foreign ones are refused."""
    directory, fingerprint = _artifact_directory(vllm_config, config)
    saved = load_artifact_moments(directory.resolve())
    check_same_model(saved.manifest.fingerprint, fingerprint)
    return directory.resolve()


def _resolve_artifact(vllm_config: VllmConfig, config: NovaKVConfig) -> Path:
    """Find, load and verify the artifact; a foreign one is refused."""
    model = vllm_config.model_config
    directory, fingerprint = _artifact_directory(vllm_config, config)
    fit = f"run `novakv fit --model {model.model}`"
    if not directory.is_dir():
        where = "the folder that the setting `artifact` names" if config.artifact else "the user's cache"
        raise ArtifactError(f"no fitted artifact for {model.model}: {directory} ({where}) does not exist; {fit}")
    artifact = load_artifact(directory.resolve())
    check_artifact_matches(artifact, fingerprint)
    quantized = assess_model(model.hf_config.to_dict(), config.skip_layers).quantized_layers
    check_layers(artifact, directory, quantized)
    if (fitted_len := artifact.manifest.calibration.seq_len) < model.max_model_len:
        logger.warning(
            "%s: the artifact was fitted on sequences of %d tokens, and --max-model-len is %d: answers from longer "
            "contexts may be wrong. Fit it on longer ones (`novakv fit --model %s --seq-len %d`) or serve shorter ones",
            BACKEND_NAME,
            fitted_len,
            model.max_model_len,
            model.model,
            model.max_model_len,
        )
    return directory.resolve()
