"""Which model an artifact belongs to: shapes, position encoding and a sample of the weights, without loading them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from pydantic import BaseModel, ConfigDict

from vllm_novakv.support import decoder_config, head_size_of, num_decoder_layers, num_kv_heads_of

if TYPE_CHECKING:
    from vllm_novakv.artifact import Artifact

SAMPLED_TENSORS = 16
SAMPLED_TENSOR_BYTES = 4096
SAMPLED_FILE_BYTES = 65536
NO_WEIGHTS = "none"
"""`weights_sha256` of a model directory without weight files."""

_OTHER_WEIGHT_SUFFIXES = (".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth")
_MAX_HEADER_BYTES = 100_000_000


class ModelFingerprint(BaseModel):
    """What must be equal for an artifact to fit a model.

    `rope` is canonical JSON of the position encoding of the full-attention layers; `weights_sha256` covers a sample
    of the weights (see `sample_weights`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    rope: str
    weights_sha256: str

    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the fields: the artifact's folder name."""
        canonical = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def fingerprint_model(model_dir: Path, hf_config: Mapping[str, Any] | None = None) -> ModelFingerprint:
    """Fingerprint of a model directory; reads headers and samples only, well under a second for any size.

    Args:
        model_dir: directory with config.json and the weights.
        hf_config: the config to use in place of config.json, such as one with overrides; multimodal configs nest the
            decoder's.

    Returns:
        The fingerprint.

    Raises:
        ValueError: config.json is missing, unreadable or lacks a field, or a weight file is damaged.

    Source: engineering choice.
    """
    whole = _read_config(model_dir) if hf_config is None else hf_config
    config = decoder_config(whole)
    architectures = whole.get("architectures") or config.get("architectures") or [config.get("model_type")]
    fields = {
        "num_layers": num_decoder_layers(config) or None,
        "num_heads": _first(config, "num_attention_heads", "n_head", "n_heads"),
        "num_kv_heads": num_kv_heads_of(config),
        "head_size": head_size_of(config),
        "hidden_size": _first(config, "hidden_size", "n_embd", "d_model"),
        "vocab_size": _first(config, "vocab_size"),
    }
    missing = [name for name, value in fields.items() if not isinstance(value, int)]
    if missing:
        raise ValueError(
            f"{model_dir / 'config.json'} does not give {', '.join(missing)}; "
            "is it the directory of a decoder-only language model?"
        )
    return ModelFingerprint.model_validate(
        {
            "architecture": str(architectures[0]),
            "rope": canonical_rope(config),
            "weights_sha256": sample_weights(model_dir),
            **fields,
        }
    )


def canonical_rope(config: Mapping[str, Any]) -> str:
    """The position encoding of the full-attention layers as JSON that does not depend on how a config spells it.

    Example: {"rope_theta": 10000} and {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} both give
    '{"rope_theta":10000.0,"rope_type":"default"}'.

    Args:
        config: decoder config, with `rope_theta` and `rope_scaling` or with `rope_parameters`, which may be nested by
            layer type.

    Returns:
        Canonical JSON: sorted keys, every number a float, neutral fields left out, absent ones with their defaults.

    Source: engineering choice: keys are cached after RoPE, so another RoPE needs another artifact.
    """
    fields: dict[str, Any] = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        nested = config.get(key)
        if isinstance(nested, Mapping):
            per_layer_type = nested.get("full_attention")
            fields.update(per_layer_type if isinstance(per_layer_type, Mapping) else nested)
    old_name = fields.pop("type", None)
    fields["rope_type"] = fields.get("rope_type") or old_name or "default"
    # What Transformers fills in when it reads the same config.json.
    fields["rope_theta"] = fields.get("rope_theta") or 10000.0
    if fields["rope_type"] != "default" and fields.get("original_max_position_embeddings") is None:
        fields["original_max_position_embeddings"] = _first(
            config, "original_max_position_embeddings", "max_position_embeddings"
        )
    if fields.get("partial_rotary_factor") == 1.0:
        del fields["partial_rotary_factor"]
    stated = {key: _floats(value) for key, value in fields.items() if value is not None}
    return json.dumps(stated, sort_keys=True, separators=(",", ":"))


def sample_weights(model_dir: Path) -> str:
    """SHA-256 over a sample of the weights.

    With safetensors files: the number of tensors, and of up to 16 evenly spaced ones (sorted by name over all files,
    so that sharding does not matter) name, dtype, shape and first 4,096 bytes. Otherwise, of every other weight file:
    size and first and last 64 KiB.

    Args:
        model_dir: directory with the weights.

    Returns:
        64 hexadecimal digits, or "none" if there are no weight files.

    Raises:
        ValueError: a safetensors file has no valid header or ends too early.

    Source: engineering choice.
    """
    sha256 = hashlib.sha256()
    tensors = sorted(entry for path in model_dir.glob("*.safetensors") for entry in _safetensors_entries(path))
    if tensors:
        sha256.update(f"{len(tensors)}\n".encode())
        last = len(tensors) - 1
        for index in sorted({step * last // (SAMPLED_TENSORS - 1) for step in range(SAMPLED_TENSORS)}):
            entry = tensors[index]
            sha256.update(f"{entry.name} {entry.dtype} {entry.shape}\n".encode())
            sha256.update(_read_range(entry.path, entry.start, min(entry.num_bytes, SAMPLED_TENSOR_BYTES)))
        return sha256.hexdigest()
    others = sorted(path for path in model_dir.glob("*") if path.suffix in _OTHER_WEIGHT_SUFFIXES and path.is_file())
    for path in others:
        size = path.stat().st_size
        tail = max(size - SAMPLED_FILE_BYTES, 0)
        sha256.update(f"{path.name} {size}\n".encode())
        sha256.update(_read_range(path, 0, min(size, SAMPLED_FILE_BYTES)))
        sha256.update(_read_range(path, tail, size - tail))
    return sha256.hexdigest() if others else NO_WEIGHTS


def default_artifact_dir(fingerprint: ModelFingerprint) -> Path:
    """Where `novakv fit` writes and the server looks: $XDG_CACHE_HOME or ~/.cache, vllm_novakv, digest.

    Args:
        fingerprint: the model's.

    Returns:
        A path that need not exist.

    Source: engineering choice: the XDG base directory convention.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache_home) if cache_home else Path.home() / ".cache"
    return base / "vllm_novakv" / fingerprint.digest()


def resolve_model_dir(model: str, revision: str | None = None) -> Path:
    """Directory of a model that is on this machine already; nothing is downloaded.

    Args:
        model: a directory, or a Hugging Face id in the local cache.
        revision: branch, tag or commit of the id; None is the default branch.

    Returns:
        A directory with config.json.

    Raises:
        ValueError: there is no such directory or cached model, or it has no config.json.

    Source: engineering choice.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or model.startswith("."):
            raise ValueError(f"{directory} is not a directory; give a model directory or a Hugging Face id")
        directory = _cached_snapshot(model, revision)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; give a model directory in Hugging Face's format")
    return directory


def check_artifact_matches(artifact: Artifact, fingerprint: ModelFingerprint) -> None:
    """Refuse an artifact that was fitted for another model; see `check_same_model`.

    Args:
        artifact: the loaded artifact.
        fingerprint: of the model to be served.

    Raises:
        ArtifactError: a field differs.

    Source: engineering choice.
    """
    check_same_model(artifact.manifest.fingerprint, fingerprint)


def check_same_model(fitted: ModelFingerprint, served: ModelFingerprint) -> None:
    """Refuse what was fitted for another model.

    Args:
        fitted: of the model that was calibrated.
        served: of the model to be served.

    Raises:
        ArtifactError: a field differs; the text names every such field with both values.

    Source: engineering choice.
    """
    from vllm_novakv.artifact import ArtifactError

    own, other = fitted.model_dump(), served.model_dump()
    differences = [
        f"{name} is {own[name]} in the artifact and {other[name]} in the model"
        for name in own
        if own[name] != other[name]
    ]
    if differences:
        raise ArtifactError(
            f"the artifact was fitted for another model: {'; '.join(differences)}. "
            "Fit one for this model with `novakv fit --model MODEL`"
        )


def check_layers(artifact: Artifact, directory: Path, quantized: Iterable[int]) -> None:
    """Refuse an artifact without some of the layers that are to be quantized.

    Args:
        artifact: the loaded artifact.
        directory: where it is.
        quantized: indices of these layers.

    Raises:
        ArtifactError: a layer is missing; the text names all that are.

    Source: engineering choice.
    """
    from vllm_novakv.artifact import ArtifactError

    if missing := sorted(set(quantized) - set(artifact.layers)):
        raise ArtifactError(
            f"the artifact in {directory} lacks attention layers {missing}; fit it again with "
            "`novakv fit --model MODEL`, or list them in the setting `skip_layers`"
        )


class _TensorEntry(NamedTuple):
    name: str
    path: Path
    dtype: str
    shape: str
    start: int
    num_bytes: int


def _safetensors_entries(path: Path) -> Iterator[_TensorEntry]:
    with path.open("rb") as file:
        header, data_start = _safetensors_header(path, file)
    for name, description in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = (int(offset) for offset in description["data_offsets"])
            yield _TensorEntry(
                name, path, str(description["dtype"]), str(description["shape"]), data_start + start, end - start
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: tensor {name} has no valid description; download the model again") from error


def _safetensors_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    try:
        if not 0 < length < _MAX_HEADER_BYTES:
            raise ValueError(f"header length {length}")
        text = file.read(length)
        if len(text) != length:
            raise ValueError(f"header of {len(text)} bytes instead of {length}")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); download the model again") from error
    return header, 8 + length


def _read_range(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise ValueError(f"{path} is truncated: byte {start + num_bytes} is missing; download the model again")
    return data


def _read_config(model_dir: Path) -> Mapping[str, Any]:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a model directory") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object; download the model again")
    return config


def _cached_snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{model} is neither a directory nor a model in the local Hugging Face cache; "
            f"download it first (`hf download {model}`) or give its directory"
        ) from error


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _floats(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_floats(item) for item in value]
    return value
