"""Every method of the comparison behind one interface, built from what calibration knows of a layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_novakv.baselines.interface import CacheCodec, Storage, bits_per_element
from vllm_novakv.baselines.moments import AttentionMoments
from vllm_novakv.baselines.nova import NovaKV
from vllm_novakv.baselines.scalar_methods import Fp8, Kivi, NaiveInt2, Oscar, QuaRot, TurboQuant
from vllm_novakv.codec.quantizer import LayerCodec

__all__ = [
    "BASELINES",
    "AttentionMoments",
    "Baseline",
    "CacheCodec",
    "LayerStatistics",
    "Storage",
    "bits_per_element",
]


@dataclass(frozen=True)
class LayerStatistics:
    """What the methods are fitted from, for one attention layer; a method reads what it needs.

    Attributes:
        head_size: elements of one key or value vector.
        moments: second moments of queries and attention outputs.
        codec: this package's transforms and codebooks.
    """

    head_size: int
    moments: AttentionMoments | None = None
    codec: LayerCodec | None = None


@dataclass(frozen=True)
class Baseline:
    """A compared method.

    Attributes:
        needs: what it is fitted from: "nothing", "moments" (`novakv fit --save-moments`) or "artifact" (`novakv fit`).
        build: the method for one layer, whose statistics hold what it needs.
    """

    needs: Literal["nothing", "moments", "artifact"]
    build: Callable[[LayerStatistics], CacheCodec]


def _oscar(layer: LayerStatistics) -> CacheCodec:
    assert layer.moments is not None, "whoever builds OSCAR reads `needs`"
    return Oscar(layer.moments.query_moment, layer.moments.output_moment)


def _codec(layer: LayerStatistics) -> LayerCodec:
    assert layer.codec is not None, "whoever builds our format reads `needs`"
    return layer.codec


BASELINES: Mapping[str, Baseline] = {
    "naive-int2": Baseline("nothing", lambda layer: NaiveInt2(layer.head_size)),
    "quarot-int2": Baseline("nothing", lambda layer: QuaRot(layer.head_size)),
    "oscar-int2": Baseline("moments", _oscar),
    "turboquant-3": Baseline("nothing", lambda layer: TurboQuant(layer.head_size, bits=3)),
    "turboquant-4": Baseline("nothing", lambda layer: TurboQuant(layer.head_size, bits=4)),
    "kivi-int2": Baseline("nothing", lambda layer: Kivi()),
    "fp8-e4m3": Baseline("nothing", lambda layer: Fp8()),
    "novakv-least-squares-symmetric": Baseline("artifact", lambda layer: NovaKV(_codec(layer))),
    "novakv-least-squares-min-max": Baseline("artifact", lambda layer: NovaKV(_codec(layer), value_format="min-max")),
    "novakv-norm-min-max": Baseline(
        "artifact", lambda layer: NovaKV(_codec(layer), key_scale="norm", value_format="min-max")
    ),
}
"""Methods by name."""
