"""This package's own format in the comparison, with the paper's choices for scale and values beside the default."""

import math
from typing import ClassVar, Literal

import torch

from vllm_novakv.baselines.interface import CacheCodec, Storage
from vllm_novakv.baselines.rotations import rotate
from vllm_novakv.baselines.scalar import SCALE_BITS, quantize_min_max
from vllm_novakv.codec.quantizer import LayerCodec, decode_keys, decode_values, encode_keys, encode_values

KeyScale = Literal["least-squares", "norm"]
ValueFormat = Literal["symmetric", "min-max"]


class NovaKV(CacheCodec):
    """Vector-quantized keys, k̂ = ρ ĉ R_K^{-1} + k̄, and two-bit values, v̂ = ŵ R_V^T.

    The default is the format that is served; key_scale "norm" with value_format "min-max" is the paper's.

    Args:
        codec: transforms and codebooks of the layer.
        key_scale: ρ refitted to the chosen centroids, or ‖r‖/√d.
        value_format: four symmetric levels with one scale, or min-max codes with scale and zero point.
    """

    paper: ClassVar[str] = "arXiv 2608.04074"

    def __init__(
        self, codec: LayerCodec, key_scale: KeyScale = "least-squares", value_format: ValueFormat = "symmetric"
    ) -> None:
        self.name = f"novakv-{key_scale}-{value_format}"
        self._codec = codec
        self._key_scale = key_scale
        self._value_format = value_format

    @property
    def key_storage(self) -> Storage:
        return Storage(math.ceil(math.log2(self._codec.num_centroids)) / self._codec.group_size, SCALE_BITS, self._size)

    @property
    def value_storage(self) -> Storage:
        return Storage(2, SCALE_BITS if self._value_format == "symmetric" else 2 * SCALE_BITS, self._size)

    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        codec = self._codec.to(key.device)
        indices, scale = encode_keys(key, codec)
        if self._key_scale == "norm":
            r = rotate(key.float() - codec.key_mean, codec.key_transform)
            scale = (torch.linalg.vector_norm(r, dim=-1) / math.sqrt(self._size)).to(torch.bfloat16)
        decoded = decode_keys(indices, scale, codec.codebook)
        return (rotate(decoded, codec.key_transform_inv_t.mT) + codec.key_mean).to(key.dtype)

    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        rotation = self._codec.value_transform.to(value.device)
        if self._value_format == "symmetric":
            decoded = decode_values(*encode_values(value, rotation))
        else:
            decoded = quantize_min_max(rotate(value.float(), rotation))
        return rotate(decoded, rotation.mT).to(value.dtype)

    @property
    def _size(self) -> int:
        return self._codec.head_size
