"""The scalar methods of the comparison: naive INT2, QuaRot, OSCAR, TurboQuant, KIVI and FP8."""

import math
from typing import ClassVar

import torch

from vllm_novakv.baselines.interface import CacheCodec, Storage
from vllm_novakv.baselines.rotations import hadamard_rotation, oscar_rotation, random_rotation, rotate
from vllm_novakv.baselines.scalar import (
    SCALE_BITS,
    clip_percentile,
    quantize_gaussian,
    quantize_min_max,
)

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class _OneStorage(CacheCodec):
    """A method that stores keys and values alike; `_storage` says how."""

    _storage: Storage

    @property
    def key_storage(self) -> Storage:
        return self._storage

    @property
    def value_storage(self) -> Storage:
        return self._storage


class RotatedInt2(_OneStorage):
    """Two-bit codes with scale and zero point per token and head, in an orthogonal basis: x̂ = Q(x R) R^T.

    Args:
        key_rotation: f32 [num_kv_heads or 1, head_size, head_size], orthogonal.
        value_rotation: the same for values.
        percentile: share of a rotated vector's elements that is not clipped; None clips nothing.
    """

    def __init__(
        self, key_rotation: torch.Tensor, value_rotation: torch.Tensor, percentile: float | None = None
    ) -> None:
        self._key_rotation = key_rotation
        self._value_rotation = value_rotation
        self._percentile = percentile
        self._storage = Storage(2, 2 * SCALE_BITS, key_rotation.shape[-1])

    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        return self._quantize(key, self._key_rotation)

    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        return self._quantize(value, self._value_rotation)

    def _quantize(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        rotation = rotation.to(x.device)
        rotated = rotate(x.float(), rotation)
        if self._percentile is not None:
            rotated = clip_percentile(rotated, self._percentile)
        return rotate(quantize_min_max(rotated), rotation.mT).to(x.dtype)


class NaiveInt2(RotatedInt2):
    """Two-bit codes per token as they are.

    Args:
        head_size: elements of a vector.
    """

    name = "naive-int2"
    paper: ClassVar[str] = "arXiv 2608.04074, section 8.4"

    def __init__(self, head_size: int) -> None:
        identity = torch.eye(head_size).unsqueeze(0)
        super().__init__(identity, identity)


class QuaRot(RotatedInt2):
    """Two-bit codes per token after a Hadamard rotation, without a clip.

    Args:
        head_size: elements of a vector, a power of two.
    """

    name = "quarot-int2"
    paper: ClassVar[str] = "arXiv 2404.00456"

    def __init__(self, head_size: int) -> None:
        rotation = hadamard_rotation(head_size)
        super().__init__(rotation, rotation)


class Oscar(RotatedInt2):
    """Two-bit codes per token in the eigenbasis of queries or outputs, mixed by Hadamard, with a percentile clip.

    Args:
        query_moment: f64 [num_kv_heads, head_size, head_size], Σ q^T q.
        output_moment: f64, the same shape, Σ o^T o over attention outputs.
        percentile: share of the elements that is not clipped.
    """

    name = "oscar-int2"
    paper: ClassVar[str] = "arXiv 2605.17757"

    def __init__(self, query_moment: torch.Tensor, output_moment: torch.Tensor, percentile: float = 0.96) -> None:
        super().__init__(oscar_rotation(query_moment), oscar_rotation(output_moment), percentile)


class TurboQuant(_OneStorage):
    """Per-token norm and Lloyd-Max codes of a randomly rotated vector: x̂ = (‖x‖/√d) Q(√d x R/‖x‖) R^T.

    This is the variant for squared error; the one-bit residual that makes products unbiased is left out, and levels
    are those of a Gaussian, which a coordinate of a random direction approaches with d.

    Args:
        head_size: elements d of a vector.
        bits: of a code.
        seed: of the rotation.
    """

    paper: ClassVar[str] = "arXiv 2504.19874"

    def __init__(self, head_size: int, bits: int, seed: int = 0) -> None:
        self.name = f"turboquant-{bits}"
        self._rotation = random_rotation(head_size, seed)
        self._num_levels = 2**bits
        self._storage = Storage(bits, SCALE_BITS, head_size)

    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        return self._quantize(key)

    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        return self._quantize(value)

    def _quantize(self, x: torch.Tensor) -> torch.Tensor:
        rotation = self._rotation.to(x.device)
        norm = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).to(torch.bfloat16).float()
        scale = norm / math.sqrt(x.shape[-1])
        rotated = rotate(x.float() / torch.where(scale > 0, scale, 1.0), rotation)
        return rotate(quantize_gaussian(rotated, self._num_levels) * scale, rotation.mT).to(x.dtype)


class Kivi(_OneStorage):
    """Two-bit keys per channel over groups of tokens, two-bit values per token over groups of channels.

    Tokens are grouped in the order given, from the first; a last group that is not full has a scale of its own, so
    that a token encoded alone is exact. Call it with whole groups.

    Args:
        group_size: tokens of a key group and channels of a value group; values whose head_size it does not divide
            raise ValueError.
    """

    name = "kivi-int2"
    paper: ClassVar[str] = "arXiv 2402.02750"

    def __init__(self, group_size: int = 32) -> None:
        self.key_group_tokens = self._group_size = group_size
        self._storage = Storage(2, 2 * SCALE_BITS, group_size)

    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        groups = key.float().split(self._group_size) if key.shape[0] else (key.float(),)
        return torch.cat([quantize_min_max(group, dim=0) if group.shape[0] else group for group in groups]).to(
            key.dtype
        )

    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[-1] % self._group_size:
            raise ValueError(f"head_size={value.shape[-1]} is not divisible by group_size={self._group_size}")
        grouped = value.float().unflatten(-1, (-1, self._group_size))
        return quantize_min_max(grouped).flatten(-2).to(value.dtype)


class Fp8(_OneStorage):
    """Eight-bit floats (e4m3) with scale 1; larger magnitudes saturate at 448."""

    name = "fp8-e4m3"
    paper: ClassVar[str] = "arXiv 2209.05433"

    _storage = Storage(8)

    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        return _through_fp8(key)

    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        return _through_fp8(value)


def _through_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)
