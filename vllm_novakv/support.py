"""Which models the 2-bit cache can serve: rules over the Hugging Face config dictionary, without importing vLLM.

The same functions answer `novakv doctor` before a server starts and the backend while it starts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUPPORTED_HEAD_SIZES = (64, 128, 256)
OLDEST_VLLM = (0, 32)
FIRST_UNSUPPORTED_VLLM = (0, 34)

# config.json names these model types without any field that says "bidirectional"
ENCODER_MODEL_TYPES = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "clip",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "esm",
        "gte",
        "modernbert",
        "mpnet",
        "new",
        "nomic_bert",
        "roberta",
        "siglip",
        "vit",
        "xlm-roberta",
    }
)
ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})
# one full-attention layer closes each period of this many layers, unless the config says otherwise
SLIDING_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}


@dataclass(frozen=True)
class ModelSupport:
    """What the 2-bit cache makes of a model.

    Attributes:
        head_size: elements of one key of the quantized layers; None if the model has no attention of that kind.
        num_kv_heads: KV heads per layer; None likewise.
        num_layers: decoder layers.
        quantized_layers: layer indices whose cache is quantized.
        bfloat16_layers: layer indices that keep vLLM's own cache (sliding windows, skipped layers).
        problems: why the model cannot be served, one sentence each; empty means supported.
        notes: what a user should know about a supported model.
    """

    head_size: int | None
    num_kv_heads: int | None
    num_layers: int
    quantized_layers: tuple[int, ...]
    bfloat16_layers: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_supported(self) -> bool:
        return not self.problems


def decoder_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language decoder.

    Args:
        hf_config: parsed config.json; multimodal models nest the decoder under `text_config` or `llm_config`.

    Returns:
        The nested mapping if there is one that names attention heads, else `hf_config` itself.
    """
    for key in ("text_config", "llm_config", "language_config"):
        nested = hf_config.get(key)
        if isinstance(nested, Mapping) and ("num_attention_heads" in nested or "hidden_size" in nested):
            return nested
    return hf_config


def _first_int(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def num_decoder_layers(config: Mapping[str, Any]) -> int:
    """Number of decoder layers of a decoder config; 0 if it does not say."""
    return _first_int(config, ("num_hidden_layers", "n_layer", "num_layers", "n_layers")) or 0


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Attention kind of every decoder layer, in Hugging Face's words.

    Example: a Gemma 3 config of 7 layers without `layer_types` gives five times `sliding_attention`,
    `full_attention` for layer 5 and `sliding_attention` for layer 6.

    Args:
        config: decoder config (see `decoder_config`).

    Returns:
        One of `full_attention`, `sliding_attention`, `chunked_attention` or another name found in `layer_types`
        (e.g. `linear_attention`) per layer.
    """
    num_layers = num_decoder_layers(config)
    listed = config.get("layer_types")
    if isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) == num_layers:
        return tuple(str(kind) for kind in listed)

    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        if config.get("attention_chunk_size") is not None:  # Llama 4: every fourth layer attends to everything
            return tuple("full_attention" if (i + 1) % 4 == 0 else "chunked_attention" for i in range(num_layers))
        return ("full_attention",) * num_layers

    model_type = str(config.get("model_type", ""))
    period = _first_int(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    period = period or SLIDING_WINDOW_PERIODS.get(model_type)
    if period:
        return tuple("full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers))
    if model_type.startswith("qwen"):  # the first max_window_layers layers attend to everything
        first_sliding = _first_int(config, ("max_window_layers",)) or 0
        return tuple("full_attention" if i < first_sliding else "sliding_attention" for i in range(num_layers))
    return ("sliding_attention",) * num_layers


def head_size_of(config: Mapping[str, Any]) -> int | None:
    """Elements of one attention head: `head_dim`, else hidden_size / num_attention_heads.

    Args:
        config: decoder config. `global_head_dim`, where a model has one, is the size of its full-attention layers.

    Returns:
        The head size; None if the config names no attention heads.
    """
    explicit = _first_int(config, ("global_head_dim", "head_dim", "attention_head_dim"))
    if explicit is not None:
        return explicit
    hidden_size = _first_int(config, ("hidden_size", "n_embd", "d_model"))
    num_heads = _first_int(config, ("num_attention_heads", "n_head", "n_heads"))
    if not hidden_size or not num_heads:
        return None
    return hidden_size // num_heads


def num_kv_heads_of(config: Mapping[str, Any]) -> int | None:
    """KV heads of one layer: `num_key_value_heads`, else 1 for multi-query models, else the number of query heads."""
    explicit = _first_int(config, ("num_global_key_value_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv"))
    if explicit is not None:
        return explicit
    if config.get("multi_query") is True:
        return 1
    return _first_int(config, ("num_attention_heads", "n_head", "n_heads"))


def _has_alibi(config: Mapping[str, Any]) -> bool:
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and "alibi" in nested:
        return bool(nested["alibi"])
    return config.get("alibi") is True or config.get("model_type") in ALIBI_MODEL_TYPES


def _architecture_problems(hf_config: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    architectures = [str(name) for name in hf_config.get("architectures") or ()]
    model_type = str(hf_config.get("model_type", "unknown"))
    problems = []
    if hf_config.get("is_encoder_decoder") is True:
        problems.append(
            f"model_type={model_type} is an encoder-decoder model; the 2-bit cache serves decoder-only models, "
            "so serve this one without --attention-backend NOVAKV"
        )
    elif (
        model_type in ENCODER_MODEL_TYPES
        or config.get("is_causal") is False
        or config.get("use_bidirectional_attention") is True
        or any(name.endswith("ForMaskedLM") for name in architectures)
    ):
        problems.append(
            f"model_type={model_type} attends in both directions (an encoder) and keeps no KV cache; "
            "serve it without --attention-backend NOVAKV"
        )
    if config.get("kv_lora_rank") is not None:
        problems.append(
            f"kv_lora_rank={config['kv_lora_rank']} means multi-head latent attention (MLA), whose cache is already "
            "compressed into one latent vector; serve it without --attention-backend NOVAKV"
        )
    if config.get("num_kv_shared_layers"):
        problems.append(
            f"num_kv_shared_layers={config['num_kv_shared_layers']}: layers that read another layer's cache are not "
            "supported yet; serve the model without --attention-backend NOVAKV"
        )
    if _has_alibi(config):
        problems.append(
            "the model uses ALiBi position biases, which the 2-bit attention does not apply; "
            "serve it without --attention-backend NOVAKV"
        )
    return problems


def _shape_problems(head_size: int | None, num_heads: int | None, num_kv_heads: int | None) -> list[str]:
    if head_size is None or num_heads is None or num_kv_heads is None:
        return ["the config names no attention heads, so there is no KV cache to quantize"]
    problems = []
    if head_size not in SUPPORTED_HEAD_SIZES:
        sizes = ", ".join(str(size) for size in SUPPORTED_HEAD_SIZES)
        problems.append(f"head_size={head_size} is not supported; the 2-bit cache has formats for {sizes}")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        problems.append(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    return problems


def assess_model(hf_config: Mapping[str, Any], skip_layers: Sequence[int] = ()) -> ModelSupport:
    """Decide whether the 2-bit cache can serve a model, and which of its layers are quantized.

    Args:
        hf_config: parsed config.json of the model.
        skip_layers: layer indices that the user wants to leave on vLLM's own cache.

    Returns:
        The verdict with its reasons; it never raises for an unsupported model.
    """
    config = decoder_config(hf_config)
    kinds = layer_kinds(config)
    head_size, num_kv_heads = head_size_of(config), num_kv_heads_of(config)
    num_heads = _first_int(config, ("num_attention_heads", "n_head", "n_heads"))

    problems = _architecture_problems(hf_config, config) + _shape_problems(head_size, num_heads, num_kv_heads)
    unknown_skips = sorted(index for index in skip_layers if not 0 <= index < len(kinds))
    if unknown_skips:
        problems.append(f"skip_layers={unknown_skips} are not layers of this model, which has 0..{len(kinds) - 1}")
    other_kinds = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other_kinds:
        problems.append(
            f"layers of kind {', '.join(other_kinds)} are not supported yet; "
            "serve the model without --attention-backend NOVAKV"
        )
    quantized = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention" and i not in set(skip_layers))
    kept = tuple(i for i in range(len(kinds)) if i not in set(quantized))
    if kinds and not quantized and not other_kinds:
        problems.append(
            "no layer is left to quantize (sliding-window layers and skip_layers stay as they are); "
            "serve the model without --attention-backend NOVAKV"
        )

    windowed = kinds.count("sliding_attention")
    notes = []
    if windowed:
        notes.append(f"{windowed} of {len(kinds)} layers attend to a sliding window and stay on vLLM's own cache")
    if config is not hf_config:
        notes.append("multimodal model: only the language decoder's cache is quantized")
    return ModelSupport(
        head_size=head_size,
        num_kv_heads=num_kv_heads,
        num_layers=len(kinds),
        quantized_layers=quantized,
        bfloat16_layers=kept,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def vllm_version_problem(version: str) -> str | None:
    """Why a vLLM version cannot be used, or None if it can.

    Example: `vllm_version_problem("0.31.2")` says that 0.31.2 is too old; "0.32.0+cpu" gives None.

    Args:
        version: version string, with or without local parts.
    """
    supported = ", ".join(f"0.{minor}" for minor in range(OLDEST_VLLM[1], FIRST_UNSUPPORTED_VLLM[1]))
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"vLLM version {version!r} cannot be read; supported are {supported}"
    release = (int(match[1]), int(match[2]))
    if release < OLDEST_VLLM:
        return f"vLLM {version} is too old; supported are {supported}: install vllm-novakv[cpu] or vllm-novakv[gpu]"
    if release >= FIRST_UNSUPPORTED_VLLM:
        return f"vLLM {version} is newer than the supported {supported}: install vllm-novakv[cpu] or vllm-novakv[gpu]"
    return None
