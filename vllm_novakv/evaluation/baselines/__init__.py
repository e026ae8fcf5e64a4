"""Every method of the comparison behind one interface, built from what calibration knows of a layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.evaluation.baselines.interface import CacheCodec, Storage, bits_per_element
from vllm_novakv.evaluation.baselines.nova import NovaKV
from vllm_novakv.evaluation.baselines.scalar_methods import Fp8, Kivi, NaiveInt2, Oscar, QuaRot, TurboQuant

__all__ = ["BASELINES", "CacheCodec", "LayerStatistics", "Storage", "bits_per_element"]


@dataclass(frozen=True)
class LayerStatistics:
    """What the methods are fitted from, for one attention layer.

    Attributes:
        query_moment: f64 [num_kv_heads, head_size, head_size], Σ q^T q over tokens and the heads of each KV head.
        output_moment: f64, the same shape, Σ o^T o over attention outputs before the output projection.
        codec: this package's transforms and codebooks.
    """

    query_moment: torch.Tensor
    output_moment: torch.Tensor
    codec: LayerCodec

    @property
    def head_size(self) -> int:
        """Elements of one key or value vector."""
        return self.codec.head_size


BASELINES: Mapping[str, Callable[[LayerStatistics], CacheCodec]] = {
    "naive-int2": lambda layer: NaiveInt2(layer.head_size),
    "quarot-int2": lambda layer: QuaRot(layer.head_size),
    "oscar-int2": lambda layer: Oscar(layer.query_moment, layer.output_moment),
    "turboquant-3": lambda layer: TurboQuant(layer.head_size, bits=3),
    "turboquant-4": lambda layer: TurboQuant(layer.head_size, bits=4),
    "kivi-int2": lambda layer: Kivi(),
    "fp8-e4m3": lambda layer: Fp8(),
    "novakv-least-squares-symmetric": lambda layer: NovaKV(layer.codec),
    "novakv-least-squares-min-max": lambda layer: NovaKV(layer.codec, value_format="min-max"),
    "novakv-norm-min-max": lambda layer: NovaKV(layer.codec, key_scale="norm", value_format="min-max"),
}
"""Methods by name."""
