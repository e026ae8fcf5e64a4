"""The second moments that OSCAR is fitted from, kept by `novakv fit --save-moments` beside the artifact.

A directory of manifest.json and tensors.safetensors; per quantized layer i,

    layers.i.query_moment    f64 [num_kv_heads, head_size, head_size], Σ q^T q over tokens and heads of each KV head
    layers.i.output_moment   f64, the same shape, Σ o^T o over attention outputs before the output projection

`save_moments` writes all or nothing; `load_moments` verifies what it reads.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save

from vllm_novakv.artifact import MANIFEST_NAME, TENSORS_NAME, ArtifactError, CalibrationRecord
from vllm_novakv.atomic_directory import check_writable, write_directory
from vllm_novakv.fingerprint import ModelFingerprint

FORMAT_VERSION = 1

_ADVICE = "make them again with `novakv fit --model MODEL --save-moments`"
_NAMES = ("query_moment", "output_moment")
_SYMMETRY_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class AttentionMoments:
    """Moments of one layer.

    Attributes:
        query_moment: f64 [num_kv_heads, head_size, head_size], Σ q^T q over tokens and the heads of each KV head.
        output_moment: f64, the same shape, Σ o^T o over attention outputs before the output projection.
    """

    query_moment: torch.Tensor
    output_moment: torch.Tensor

    def shard(self, first_head: int, num_heads: int) -> "AttentionMoments":
        """Those of some consecutive KV heads.

        Args:
            first_head: index of the first.
            num_heads: how many.
        """
        heads = slice(first_head, first_head + num_heads)
        return AttentionMoments(self.query_moment[heads], self.output_moment[heads])


class MomentsManifest(BaseModel):
    """Everything about saved moments but their tensors; `calibration` is that of the fit which made them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: int
    fingerprint: ModelFingerprint
    layer_indices: tuple[int, ...] = Field(min_length=1)
    tensors_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    calibration: CalibrationRecord


@dataclass(frozen=True, eq=False)
class SavedMoments:
    """Moments of a model.

    Attributes:
        manifest: the description.
        layers: by layer index.
    """

    manifest: MomentsManifest
    layers: Mapping[int, AttentionMoments]


def moments_directory(artifact: Path) -> Path:
    """Where the moments of a fit lie: beside its artifact, "-moments" behind the name.

    Args:
        artifact: directory of the artifact.
    """
    return artifact.with_name(f"{artifact.name}-moments")


def check_moments_directory(directory: Path) -> None:
    """Find out before a fit whether `save_moments` will be able to write there.

    Args:
        directory: where the moments shall go.

    Raises:
        ArtifactError: the directory cannot be written, or holds other things than moments.
    """
    try:
        check_writable(directory, frozenset({MANIFEST_NAME, TENSORS_NAME}))
    except OSError as error:
        raise ArtifactError(f"{directory}: moments cannot be written ({error}); choose another --out") from error


def save_moments(
    layers: Mapping[int, AttentionMoments],
    fingerprint: ModelFingerprint,
    calibration: CalibrationRecord,
    directory: Path,
) -> SavedMoments:
    """Write the moments of a model, all or nothing; earlier ones there are replaced in one step.

    Args:
        layers: by layer index; at least one.
        fingerprint: of the model.
        calibration: what was summed over.
        directory: where; see `moments_directory`.

    Returns:
        What was written.

    Raises:
        ArtifactError: a moment is unfit, or the directory cannot be written.
    """
    ordered = dict(sorted(layers.items()))
    tensors = {
        f"layers.{layer}.{name}": getattr(moments, name).cpu().contiguous()
        for layer, moments in ordered.items()
        for name in _NAMES
    }
    content = bytes(safetensors_save(tensors))
    manifest = MomentsManifest(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint,
        layer_indices=tuple(ordered),
        tensors_sha256=hashlib.sha256(content).hexdigest(),
        calibration=calibration,
    )
    _check_tensors(manifest, tensors)
    text = json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n"
    try:
        write_directory(directory, {MANIFEST_NAME: text.encode(), TENSORS_NAME: content})
    except OSError as error:
        raise ArtifactError(f"{directory}: moments cannot be written ({error}); choose another --out") from error
    return SavedMoments(manifest, ordered)


def load_moments(directory: Path) -> SavedMoments:
    """Read moments and verify them: version, keys, checksum, names, shapes, types, finiteness, symmetry.

    Args:
        directory: see `moments_directory`.

    Returns:
        The moments, on the CPU.

    Raises:
        ArtifactError: they are missing or fail a check; the text has the path, the reason and what to do.
    """
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory}: there are no moments to fit the method from; make them with "
            "`novakv fit --model MODEL --save-moments`"
        )
    try:
        manifest = MomentsManifest.model_validate_json((directory / MANIFEST_NAME).read_bytes())
        if manifest.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {manifest.format_version}, and this version reads {FORMAT_VERSION}")
        content = (directory / TENSORS_NAME).read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest.tensors_sha256:
            raise ValueError(f"{TENSORS_NAME} is damaged: its SHA-256 is not the manifest's")
        tensors = safetensors_load(content)
        _check_tensors(manifest, tensors)
    except ValidationError as error:
        raise ArtifactError(
            f"{directory}: {MANIFEST_NAME} is invalid ({error.errors()[0]['msg']}); {_ADVICE}"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactError(f"{directory}: {error}; {_ADVICE}") from error
    layers = {
        layer: AttentionMoments(*(tensors[f"layers.{layer}.{name}"] for name in _NAMES))
        for layer in manifest.layer_indices
    }
    return SavedMoments(manifest, layers)


def _check_tensors(manifest: MomentsManifest, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = {f"layers.{layer}.{name}" for layer in manifest.layer_indices for name in _NAMES}
    if different := sorted(expected ^ set(tensors)):
        raise ArtifactError(f"{different[0]} is missing or not of a listed layer")
    size = manifest.fingerprint.head_size
    shape = [manifest.fingerprint.num_kv_heads, size, size]
    for name in sorted(expected):
        tensor = tensors[name]
        if tensor.dtype != torch.float64 or list(tensor.shape) != shape:
            raise ArtifactError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not torch.float64 {shape}")
        largest = float(tensor.abs().max())
        if not 0 < largest < float("inf"):
            raise ArtifactError(f"{name} is zero or not finite")
        if float((tensor - tensor.mT).abs().max()) > _SYMMETRY_TOLERANCE * largest:
            raise ArtifactError(f"{name} is not symmetric, so it is no second moment")
