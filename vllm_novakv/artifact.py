"""The artifact: what a fit leaves behind and a server loads, a directory of manifest.json and tensors.safetensors.

The manifest says for which model, how and how well; the tensors are, per quantized layer i,

    layers.i.key_mean              f32 [num_kv_heads, head_size]
    layers.i.key_transform         f32 [num_kv_heads, head_size, head_size]
    layers.i.key_transform_inv_t   f32 [num_kv_heads, head_size, head_size]
    layers.i.value_transform       f32 [num_kv_heads, head_size, head_size]
    layers.i.codebook              float8, or bf16 of int8 [num_kv_heads, num_groups, num_centroids, group_size]

`save` writes all or nothing; `load` trusts nothing that it has not checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_novakv.atomic_directory import check_writable, write_directory
from vllm_novakv.codec.codebook import STORED_DTYPES, CodebookDtype, is_exact
from vllm_novakv.codec.layout import RecordLayout
from vllm_novakv.codec.quantizer import MAX_CENTROIDS, LayerCodec
from vllm_novakv.fingerprint import ModelFingerprint

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TENSORS_NAME = "tensors.safetensors"
ORTHOGONALITY_TOLERANCE = 1e-3
INVERSE_TOLERANCE = 1e-2

_ADVICE = "fit it again with `novakv fit --model MODEL`"


class ArtifactError(ValueError):
    """An artifact is missing, damaged, of another format or model, or cannot be written; the text says what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CalibrationRecord(_Strict):
    """What the artifact was fitted on: text, tokens, tokens per sequence, seed, vLLM's version, ISO 8601 date."""

    source: str
    num_tokens: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    seed: int
    vllm_version: str
    created: str


class LayerFigures(_Strict):
    """How well one layer was fitted, on held-out text; `volume_spread_bits` is `transform.volume_spread_bits`."""

    layer: int = Field(ge=0)
    relative_logit_error: float
    top1_agreement: float
    volume_spread_bits: float
    value_relative_error: float


class Manifest(_Strict):
    """Everything about an artifact but its tensors; `layer_indices` are the quantized layers, ascending."""

    format_version: int
    fingerprint: ModelFingerprint
    head_size: int
    num_layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    layer_indices: tuple[int, ...] = Field(min_length=1)
    group_size: int = Field(ge=1)
    num_centroids: int = Field(ge=1, le=MAX_CENTROIDS)
    codebook_dtype: CodebookDtype
    tensors_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    calibration: CalibrationRecord
    layers: tuple[LayerFigures, ...]

    @property
    def layout(self) -> RecordLayout:
        """The byte map of the cache that this artifact describes."""
        return RecordLayout(head_size=self.head_size, group_size=self.group_size)


@dataclass(frozen=True, eq=False)
class Artifact:
    """A verified artifact in memory.

    Args:
        manifest: the description.
        layers: the codec of every quantized layer, by layer index.

    Raises:
        ArtifactError: the two contradict each other, or a tensor is not what a fit produces.
    """

    manifest: Manifest
    layers: Mapping[int, LayerCodec]

    def __post_init__(self) -> None:
        _check_manifest(self.manifest)
        if sorted(self.layers) != list(self.manifest.layer_indices):
            raise ArtifactError(
                f"the artifact has tensors of layers {sorted(self.layers)}, but its manifest lists "
                f"{list(self.manifest.layer_indices)}; {_ADVICE}"
            )
        for layer, codec in self.layers.items():
            for name, tensor in _tensors_of(layer, codec).items():
                _check_tensor(name, tensor, _expected_shape(self.manifest, name), torch.float32)
            _check_bases(layer, codec)


def build(
    layers: Mapping[int, LayerCodec],
    *,
    fingerprint: ModelFingerprint,
    codebook_dtype: CodebookDtype,
    calibration: CalibrationRecord,
    figures: Sequence[LayerFigures],
) -> Artifact:
    """An artifact from what a fit produced; the manifest's other fields follow from the arguments.

    Args:
        layers: the codec of every quantized layer, by layer index; at least one.
        fingerprint: of the model that was calibrated.
        codebook_dtype: 8-bit type that the centroids were snapped to.
        calibration: what was fitted on.
        figures: one entry per layer of `layers`, in ascending order.

    Returns:
        The artifact, verified.

    Raises:
        ArtifactError: an argument contradicts another, a tensor is unfit, or a centroid is not a value of the type.

    Source: engineering choice.
    """
    if not layers:
        raise ArtifactError("no layer was fitted; a model needs at least one full-attention layer")
    ordered = dict(sorted(layers.items()))
    first = next(iter(ordered.values()))
    try:
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            fingerprint=fingerprint,
            head_size=first.head_size,
            num_layers=fingerprint.num_layers,
            num_kv_heads=first.num_kv_heads,
            layer_indices=tuple(ordered),
            group_size=first.group_size,
            num_centroids=first.num_centroids,
            codebook_dtype=codebook_dtype,
            tensors_sha256=hashlib.sha256(_tensor_bytes(ordered, codebook_dtype)).hexdigest(),
            calibration=calibration,
            layers=tuple(figures),
        )
    except ValidationError as error:
        raise ArtifactError(f"the fit produced an invalid manifest: {_describe(error)}; {_ADVICE}") from error
    return Artifact(manifest, ordered)


def save(artifact: Artifact, directory: Path) -> None:
    """Write an artifact, all or nothing; an earlier artifact there is replaced in one step.

    Args:
        artifact: what to write.
        directory: where; missing parents are created.

    Raises:
        ArtifactError: the directory cannot be written, or holds other things than an artifact.

    Source: engineering choice.
    """
    manifest = artifact.manifest
    tensors = _tensor_bytes(artifact.layers, manifest.codebook_dtype)
    if hashlib.sha256(tensors).hexdigest() != manifest.tensors_sha256:
        raise ArtifactError("the manifest's tensors_sha256 is not that of the tensors; make artifacts with build()")
    text = json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n"
    try:
        write_directory(directory, {MANIFEST_NAME: text.encode(), TENSORS_NAME: tensors})
    except OSError as error:
        raise _unwritable(directory, error) from error


def check_output_directory(directory: Path) -> None:
    """Find out before a fit whether `save` will be able to write there.

    Args:
        directory: where the artifact shall go.

    Raises:
        ArtifactError: the directory cannot be written, or holds other things than an artifact.

    Source: engineering choice.
    """
    try:
        check_writable(directory, frozenset({MANIFEST_NAME, TENSORS_NAME}))
    except OSError as error:
        raise _unwritable(directory, error) from error


def load(directory: Path) -> Artifact:
    """Read an artifact and verify it: version, keys, checksum, names, shapes, dtypes, finiteness, R_V^T R_V = I and
    R_K^T R_K^{-T} = I.

    Args:
        directory: the artifact.

    Returns:
        The artifact, its tensors on the CPU.

    Raises:
        ArtifactError: it is missing or fails a check; the text has the path, the reason and what to do.

    Source: engineering choice.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: there is no artifact; make one with `novakv fit --model MODEL`")
    try:
        manifest = _parse_manifest(_read(directory / MANIFEST_NAME))
        _check_manifest(manifest)
        return Artifact(manifest, _parse_tensors(manifest, _read(directory / TENSORS_NAME)))
    except ArtifactError as error:
        raise ArtifactError(f"{directory}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read ({error.strerror}); {_ADVICE}") from error


def _parse_manifest(text: bytes) -> Manifest:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{MANIFEST_NAME} is not valid JSON ({error}); {_ADVICE}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{MANIFEST_NAME} does not hold a JSON object; {_ADVICE}")
    version = content.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{MANIFEST_NAME} has format_version {version}, and this version of vllm_novakv reads {FORMAT_VERSION}; "
            f"install the version that wrote it, or {_ADVICE}"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactError(f"{MANIFEST_NAME} is invalid: {_describe(error)}; {_ADVICE}") from error


def _describe(error: ValidationError) -> str:
    words = {"extra_forbidden": "unknown key", "missing": "missing key"}
    return ", ".join(
        f"{words.get(item['type'], item['msg'])} '{'.'.join(map(str, item['loc']))}'" for item in error.errors()
    )


def _check_manifest(manifest: Manifest) -> None:
    for name in ("head_size", "num_layers", "num_kv_heads"):
        own, model = getattr(manifest, name), getattr(manifest.fingerprint, name)
        if own != model:
            raise ArtifactError(f"{name} is {own}, but {model} in the model's fingerprint; {_ADVICE}")
    try:
        RecordLayout(manifest.head_size, manifest.group_size)
    except ValueError as error:
        raise ArtifactError(str(error)) from error
    indices = manifest.layer_indices
    if list(indices) != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= manifest.num_layers:
        raise ArtifactError(
            f"layer_indices {list(indices)} are not ascending layers of a model with {manifest.num_layers}; {_ADVICE}"
        )
    listed = [figures.layer for figures in manifest.layers]
    if listed != list(indices):
        raise ArtifactError(f"layers has figures of layers {listed}, but layer_indices are {list(indices)}; {_ADVICE}")


def _tensor_name(layer: int, field: str) -> str:
    return f"layers.{layer}.{field}"


def _tensors_of(layer: int, codec: LayerCodec) -> dict[str, torch.Tensor]:
    return {_tensor_name(layer, field.name): getattr(codec, field.name) for field in fields(codec)}


def _tensor_bytes(layers: Mapping[int, LayerCodec], codebook_dtype: CodebookDtype) -> bytes:
    from safetensors.torch import save as safetensors_save

    tensors = {}
    for layer, codec in layers.items():
        tensors.update({name: tensor.cpu().contiguous() for name, tensor in _tensors_of(layer, codec).items()})
        name = _tensor_name(layer, "codebook")
        if not is_exact(tensors[name], codebook_dtype):
            raise ArtifactError(f"{name} holds values that {codebook_dtype} lacks; snap the centroids to it first")
        tensors[name] = tensors[name].to(STORED_DTYPES[codebook_dtype])
    return bytes(safetensors_save(tensors))


def _parse_tensors(manifest: Manifest, content: bytes) -> dict[int, LayerCodec]:
    from safetensors import SafetensorError
    from safetensors.torch import load as safetensors_load

    actual = hashlib.sha256(content).hexdigest()
    if actual != manifest.tensors_sha256:
        raise ArtifactError(
            f"{TENSORS_NAME} is damaged: its SHA-256 is {actual[:16]}…, but {manifest.tensors_sha256[:16]}… in the "
            f"manifest; copy the artifact again, or {_ADVICE}"
        )
    try:
        tensors = safetensors_load(content)
    except SafetensorError as error:
        raise ArtifactError(f"{TENSORS_NAME} is not a safetensors file ({error}); {_ADVICE}") from error
    names = [field.name for field in fields(LayerCodec)]
    expected = {_tensor_name(layer, name) for layer in manifest.layer_indices for name in names}
    if missing := sorted(expected - set(tensors)):
        raise ArtifactError(f"{TENSORS_NAME} lacks {missing[0]}; {_ADVICE}")
    if unknown := sorted(set(tensors) - expected):
        raise ArtifactError(f"{TENSORS_NAME} has the unknown tensor {unknown[0]}; {_ADVICE}")
    for name in sorted(expected):
        dtype = STORED_DTYPES[manifest.codebook_dtype] if name.endswith(".codebook") else torch.float32
        _check_tensor(name, tensors[name], _expected_shape(manifest, name), dtype)
        if name.endswith(".codebook") and not is_exact(tensors[name].float(), manifest.codebook_dtype):
            raise ArtifactError(f"{name} holds values that {manifest.codebook_dtype} lacks; {_ADVICE}")
    return {
        layer: LayerCodec(*(tensors[_tensor_name(layer, name)].float() for name in names))
        for layer in manifest.layer_indices
    }


def _expected_shape(manifest: Manifest, name: str) -> list[int]:
    heads, size = manifest.num_kv_heads, manifest.head_size
    field = name.rsplit(".", 1)[1]
    if field == "key_mean":
        return [heads, size]
    if field == "codebook":
        return [heads, size // manifest.group_size, manifest.num_centroids, manifest.group_size]
    return [heads, size, size]


def _check_tensor(name: str, tensor: torch.Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ArtifactError(f"{name} is {tensor.dtype}, and the format has {dtype} there; {_ADVICE}")
    if list(tensor.shape) != shape:
        raise ArtifactError(f"{name} has shape {list(tensor.shape)}, but the manifest implies {shape}; {_ADVICE}")
    if not bool(torch.isfinite(tensor.float()).all()):
        raise ArtifactError(f"{name} has non-finite values; {_ADVICE}")


def _check_bases(layer: int, codec: LayerCodec) -> None:
    identity = torch.eye(codec.head_size, dtype=torch.float64, device=codec.key_mean.device)
    rotation = codec.value_transform.double()
    pair = codec.key_transform.double().mT @ codec.key_transform_inv_t.double()
    checks: list[tuple[str, Any, float]] = [
        ("value_transform is not orthogonal", rotation.mT @ rotation, ORTHOGONALITY_TOLERANCE),
        ("key_transform_inv_t is not the inverse of key_transform", pair, INVERSE_TOLERANCE),
    ]
    for problem, product, tolerance in checks:
        error = float((product - identity).abs().max())
        if not error <= tolerance:
            raise ArtifactError(f"layers.{layer}: {problem} (off by {error:.2g}, at most {tolerance}); {_ADVICE}")


def _unwritable(directory: Path, error: OSError) -> ArtifactError:
    reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
    return ArtifactError(f"{directory}: the artifact cannot be written ({reason}); choose another --out directory")
