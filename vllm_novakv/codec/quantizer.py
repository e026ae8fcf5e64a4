"""The format's numeric definition: which indices, codes and scales a key and a value become, and back.

Row vectors; x R acts on the right. Per token and KV head, with head size d, group size g and L = d/g groups:

    key    r = (k − k̄) R_K;  ρ = ‖r‖/√d;  index of group l = argmin ‖r_l/ρ − c‖;  ρ ← ⟨r, ĉ⟩/⟨ĉ, ĉ⟩ in bf16
           r̂ = ρ ĉ, read as q·k̂ = (q R_K^{-T})·r̂ + q·k̄
    value  w = v R_V;  s = 0.9957 · RMS(w) in bf16;  code = clamp(⌊w/s⌋ + 2, 0, 3)
           ŵ = (code − 1.5) s, read as v̂ = ŵ R_V^T

Sums run in float64, so that the bytes of a token do not depend on which tokens are encoded with it, nor on the
platform's matrix library: rounding that varies with the batch is some 1e-16 there, far below what a byte can show.
Source: arXiv:2608.04074 (sections 3, 4, algorithms 1 and 3); the symmetric value codes and the least-squares scale
are engineering choices of this format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from vllm_novakv.codec.layout import VALUE_CELLS, RecordLayout

VALUE_STEP = 0.9957
"""Step of the 4-level uniform quantizer that is optimal for a unit Gaussian."""

MAX_CENTROIDS = 256
"""An index is one byte."""

_VALUE_LEVELS = 4
_CODES_PER_BYTE = 4
_LOW_CODE_OF_EACH_BYTE = 0x0303030303030303
_WIDE_TYPES = {2: torch.float64, 4: torch.complex128}
_BF16_MAX = torch.finfo(torch.bfloat16).max
# 4 MB of float64, which stays in a processor's cache: no temporary is larger, however many tokens a call encodes.
_CHUNK_ELEMENTS = 1 << 19


@dataclass(frozen=True, eq=False)
class LayerCodec:
    """What one attention layer needs to encode and decode its cache; the leading dimension is the KV head.

    Args:
        key_mean: f32 [num_kv_heads, head_size], k̄.
        key_transform: f32 [num_kv_heads, head_size, head_size], R_K; group l owns columns l g to (l + 1) g − 1.
        key_transform_inv_t: f32 [num_kv_heads, head_size, head_size], R_K^{-T}, applied to queries.
        value_transform: f32 [num_kv_heads, head_size, head_size], R_V, orthogonal.
        codebook: f32 [num_kv_heads, num_groups, num_centroids, group_size]; entries are values of the artifact's
            8-bit float type.

    Raises:
        ValueError: a tensor has another dtype, shape or device than the others imply, or the layout is unsupported.

    Source: arXiv:2608.04074, algorithms 2 and 3.
    """

    key_mean: torch.Tensor
    key_transform: torch.Tensor
    key_transform_inv_t: torch.Tensor
    value_transform: torch.Tensor
    codebook: torch.Tensor

    def __post_init__(self) -> None:
        if self.key_mean.dim() != 2 or self.codebook.dim() != 4:
            raise ValueError(
                f"key_mean has shape {list(self.key_mean.shape)} and codebook {list(self.codebook.shape)}; "
                "the rule is [num_kv_heads, head_size] and [num_kv_heads, num_groups, num_centroids, group_size]"
            )
        heads, size = self.key_mean.shape
        expected = {
            "key_mean": [heads, size],
            "key_transform": [heads, size, size],
            "key_transform_inv_t": [heads, size, size],
            "value_transform": [heads, size, size],
            "codebook": [heads, self.layout.num_groups, self.num_centroids, self.group_size],
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, but the other tensors imply {shape}")
            if tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype}; a LayerCodec holds torch.float32")
            if tensor.device != self.key_mean.device:
                raise ValueError(f"{name} is on {tensor.device} and key_mean on {self.key_mean.device}; use .to()")
        if not 1 <= self.num_centroids <= MAX_CENTROIDS:
            raise ValueError(f"num_centroids={self.num_centroids}, but an index is one byte: 1 to {MAX_CENTROIDS}")

    @property
    def num_kv_heads(self) -> int:
        """KV heads held here (all of the layer's, or one rank's share)."""
        return self.key_mean.shape[0]

    @property
    def head_size(self) -> int:
        """Elements of one key or value vector."""
        return self.key_mean.shape[1]

    @property
    def group_size(self) -> int:
        """Key elements that share one index."""
        return self.codebook.shape[3]

    @property
    def num_groups(self) -> int:
        """Groups per key."""
        return self.codebook.shape[1]

    @property
    def num_centroids(self) -> int:
        """Centroids per group."""
        return self.codebook.shape[2]

    @cached_property
    def layout(self) -> RecordLayout:
        """The byte map of this layer's records."""
        return RecordLayout(head_size=self.head_size, group_size=self.group_size)

    @cached_property
    def score_matrix(self) -> torch.Tensor:
        """Columns (c, −‖c‖²/2), so that (x, 1) times a column is x·c − ‖c‖²/2: largest where ‖x − c‖ is smallest.

        Returns:
            f64 [num_kv_heads * num_groups, group_size + 1, num_centroids].
        """
        centroids = self.codebook.double().flatten(0, 1)
        half_norms = centroids.square().sum(dim=-1, keepdim=True) / 2
        return torch.cat([centroids, -half_norms], dim=-1).transpose(1, 2).contiguous()

    def to(self, device: torch.device | str) -> LayerCodec:
        """The same codec with its tensors on another device.

        Args:
            device: where the tensors shall live.

        Returns:
            A LayerCodec; tensors that are there already are shared, not copied.
        """
        return LayerCodec(*(getattr(self, field.name).to(device) for field in fields(self)))

    def shard(self, head_start: int, num_heads: int) -> LayerCodec:
        """The codec of KV heads head_start to head_start + num_heads − 1: one tensor-parallel rank's share.

        Args:
            head_start: first KV head.
            num_heads: KV heads to keep, at least 1.

        Returns:
            A LayerCodec of num_heads heads whose tensors are views.

        Raises:
            ValueError: the range is empty or not inside the layer.
        """
        if head_start < 0 or num_heads < 1 or head_start + num_heads > self.num_kv_heads:
            raise ValueError(
                f"KV heads {head_start} to {head_start + num_heads - 1} were asked for, but this layer has heads 0 to "
                f"{self.num_kv_heads - 1}; the tensor-parallel size must fit the artifact's KV heads"
            )
        return LayerCodec(*(getattr(self, f.name)[head_start : head_start + num_heads] for f in fields(self)))


def encode_keys(key: torch.Tensor, codec: LayerCodec) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest centroid per group of (k − k̄) R_K / ρ, and the least-squares scale ρ = ⟨r, ĉ⟩/⟨ĉ, ĉ⟩.

    1. r = (k − k̄) R_K
    2. x = r/ρ with ρ = ‖r‖/√d, or 1 for r = 0
    3. index = argmax x·c − ‖c‖²/2 per group, an exact search; the first of equals
    4. ρ is refitted to the chosen centroids and rounded to bf16 (0 where ĉ = 0)

    Args:
        key: float [num_tokens, num_kv_heads, head_size], after RoPE.
        codec: the layer's codec, on the key's device.

    Returns:
        indices: uint8 [num_tokens, num_kv_heads, num_groups].
        key_scale: bf16 [num_tokens, num_kv_heads]; finite for finite keys, may be negative.

    Raises:
        ValueError: the key's shape is not the codec's.

    Source: arXiv:2608.04074, algorithm 1 line 9 and algorithm 3; step 4 is an engineering choice.
    """
    heads, size, groups = codec.num_kv_heads, codec.head_size, codec.num_groups
    _check_vectors("key", key, heads, size)
    num_tokens = key.shape[0]
    indices = torch.empty(num_tokens, heads, groups, dtype=torch.uint8, device=key.device)
    key_scale = torch.empty(num_tokens, heads, dtype=torch.bfloat16, device=key.device)
    key_mean, key_transform = codec.key_mean.double(), codec.key_transform.double()
    step = max(1, _CHUNK_ELEMENTS // (heads * groups * codec.num_centroids))
    for start in range(0, num_tokens, step):
        chunk = slice(start, start + step)
        # [heads, tokens, head_size]
        r = torch.bmm((key[chunk].double() - key_mean).transpose(0, 1), key_transform)
        norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True) / math.sqrt(size)
        x = r / torch.where(norm == 0, 1.0, norm)
        # [heads * groups, tokens, group_size + 1]
        x = x.reshape(heads, -1, groups, codec.group_size).transpose(1, 2).flatten(0, 1)
        x = torch.nn.functional.pad(x, (0, 1), value=1.0)
        nearest = torch.bmm(x, codec.score_matrix).max(dim=-1).indices
        indices[chunk] = nearest.view(heads, groups, -1).permute(2, 0, 1)
        # [tokens, heads, head_size]
        centroids = gather_centroids(indices[chunk], codec.codebook).double()
        key_scale[chunk] = _to_scale(_least_squares_scale(r.transpose(0, 1), centroids))
    return indices, key_scale


def decode_keys(indices: torch.Tensor, key_scale: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """r̂ = ρ ĉ: the keys in the transformed basis, without the mean.

    Logits are (q R_K^{-T})·r̂ + q·k̄, so no inverse transform is ever applied to a key.

    Args:
        indices: uint8 [..., num_kv_heads, num_groups].
        key_scale: bf16 [..., num_kv_heads].
        codebook: f32 [num_kv_heads, num_groups, num_centroids, group_size].

    Returns:
        f32 [..., num_kv_heads, head_size].

    Source: arXiv:2608.04074, section 8.5.
    """
    return gather_centroids(indices, codebook) * key_scale.float().unsqueeze(-1)


def gather_centroids(indices: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """ĉ: the chosen centroids of all groups side by side.

    Args:
        indices: uint8 [..., num_kv_heads, num_groups].
        codebook: f32 [num_kv_heads, num_groups, num_centroids, group_size].

    Returns:
        f32 [..., num_kv_heads, head_size].

    Source: arXiv:2608.04074, section 8.5.
    """
    heads, groups, centroids, size = codebook.shape
    first = torch.arange(heads * groups, dtype=torch.int32, device=indices.device) * centroids
    rows = (indices.int() + first.view(heads, groups)).flatten()
    # A centroid of 2 or 4 floats moves as one wide element, several times faster than as a row.
    wide = _WIDE_TYPES.get(size)
    table = codebook.reshape(-1, size) if wide is None else codebook.reshape(-1).view(wide)
    return table.index_select(0, rows).view(torch.float32).view(*indices.shape[:-1], groups * size)


def encode_values(value: torch.Tensor, value_transform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2-bit codes clamp(⌊w/s⌋ + 2, 0, 3) of w = v R_V, with s = 0.9957 · RMS(w) rounded to bf16 first.

    Example: w/s = (−1.2, −0.3, 0.0, 7.0) gives codes (0, 1, 2, 3), read back as (−1.5, −0.5, 0.5, 1.5) s.

    Args:
        value: float [num_tokens, num_kv_heads, head_size].
        value_transform: f32 [num_kv_heads, head_size, head_size], R_V.

    Returns:
        codes: uint8 [num_tokens, num_kv_heads, head_size], 0 to 3, one code per byte.
        value_scale: bf16 [num_tokens, num_kv_heads], at least 0; finite for finite values.

    Raises:
        ValueError: the value's shape is not the transform's.

    Source: engineering choice: symmetric uniform levels with the Gaussian-optimal step, no zero point.
    """
    heads, size, _ = value_transform.shape
    _check_vectors("value", value, heads, size)
    codes = torch.empty(value.shape, dtype=torch.uint8, device=value.device)
    value_scale = torch.empty(value.shape[:2], dtype=torch.bfloat16, device=value.device)
    rotation = value_transform.double()
    step = max(1, _CHUNK_ELEMENTS // (heads * size))
    for start in range(0, value.shape[0], step):
        chunk = slice(start, start + step)
        # [tokens, heads, head_size]
        w = torch.bmm(value[chunk].double().transpose(0, 1), rotation).transpose(0, 1)
        scale = _to_scale(torch.linalg.vector_norm(w, dim=-1) * (VALUE_STEP / math.sqrt(size)))
        divisor = torch.where(scale == 0, 1.0, scale.double())
        codes[chunk] = ((w / divisor.unsqueeze(-1)).floor() + _VALUE_LEVELS // 2).clamp(0, _VALUE_LEVELS - 1)
        value_scale[chunk] = scale
    return codes, value_scale


def decode_values(codes: torch.Tensor, value_scale: torch.Tensor) -> torch.Tensor:
    """ŵ = (code − 1.5) s: the values in the rotated basis; ŵ R_V^T is the value.

    Args:
        codes: uint8 [..., num_kv_heads, head_size], 0 to 3.
        value_scale: bf16 [..., num_kv_heads].

    Returns:
        f32 [..., num_kv_heads, head_size].

    Source: engineering choice: see `encode_values`.
    """
    return (codes.float() - (_VALUE_LEVELS - 1) / 2) * value_scale.float().unsqueeze(-1)


def pack_records(
    indices: torch.Tensor,
    key_scale: torch.Tensor,
    codes: torch.Tensor,
    value_scale: torch.Tensor,
    layout: RecordLayout,
) -> torch.Tensor:
    """Records [indices | value cells | ρ | s] of codec/layout.py; scales are little-endian.

    Args:
        indices: uint8 [..., num_groups].
        key_scale: bf16 [...].
        codes: uint8 [..., head_size], 0 to 3.
        value_scale: bf16 [...].
        layout: the record layout.

    Returns:
        uint8 [..., record_bytes].

    Source: engineering choice: see codec/layout.py.
    """
    # dim = c + 8 (4 byte + place), so the codes are [byte, place, cell]: a 64-bit word holds one code of all 8 cells
    words = codes.contiguous().view(torch.int64).view(*codes.shape[:-1], layout.value_cell_bytes, _CODES_PER_BYTE)
    packed = (words << _code_shifts(codes.device)).sum(dim=-1)
    # [..., cell, byte]
    cells = packed.view(torch.uint8).view(*packed.shape, VALUE_CELLS).transpose(-1, -2)
    return torch.cat([indices, cells.flatten(-2), _scale_to_bytes(key_scale), _scale_to_bytes(value_scale)], dim=-1)


def unpack_records(
    records: torch.Tensor, layout: RecordLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of records: the inverse of `pack_records`.

    Args:
        records: uint8 [..., record_bytes].
        layout: the record layout.

    Returns:
        indices: uint8 [..., num_groups].
        key_scale: bf16 [...].
        codes: uint8 [..., head_size], 0 to 3.
        value_scale: bf16 [...].

    Raises:
        ValueError: the last dimension is not record_bytes.

    Source: engineering choice: see codec/layout.py.
    """
    if records.shape[-1] != layout.record_bytes:
        raise ValueError(
            f"records have {records.shape[-1]} bytes, but head_size={layout.head_size} with "
            f"group_size={layout.group_size} has {layout.record_bytes}; gather whole records"
        )
    sizes = [layout.index_bytes, layout.value_bytes, 2, 2]
    indices, values, key_scale, value_scale = torch.split(records, sizes, dim=-1)
    # [..., byte, cell], where the 8 cells are one 64-bit word
    cells = values.reshape(*values.shape[:-1], VALUE_CELLS, layout.value_cell_bytes).transpose(-1, -2)
    words = cells.flatten(-2).view(torch.int64).unsqueeze(-1)
    # [..., byte, place, cell]
    codes = ((words >> _code_shifts(records.device)) & _LOW_CODE_OF_EACH_BYTE).view(torch.uint8).flatten(-2)
    return indices, _bytes_to_scale(key_scale), codes, _bytes_to_scale(value_scale)


def _check_vectors(name: str, vectors: torch.Tensor, heads: int, size: int) -> None:
    if vectors.dim() != 3 or tuple(vectors.shape[1:]) != (heads, size):
        raise ValueError(
            f"{name} has shape {list(vectors.shape)}; the codec takes [num_tokens, {heads}, {size}]: "
            "check num_kv_heads and head_size, or shard the codec"
        )


def _least_squares_scale(r: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    energy = centroids.square().sum(dim=-1)
    return (r * centroids).sum(dim=-1) / torch.where(energy == 0, 1.0, energy)


def _to_scale(scale: torch.Tensor) -> torch.Tensor:
    # Clamped, so that a finite vector never leaves an infinity in the cache.
    return scale.float().clamp(-_BF16_MAX, _BF16_MAX).to(torch.bfloat16)


def _code_shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, 2, dtype=torch.int64, device=device)


def _scale_to_bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.unsqueeze(-1).view(torch.uint8)


def _bytes_to_scale(scale_bytes: torch.Tensor) -> torch.Tensor:
    return scale_bytes.contiguous().view(torch.bfloat16).squeeze(-1)
