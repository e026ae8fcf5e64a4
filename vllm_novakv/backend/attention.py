"""The NOVAKV attention backend: writes every token to history and band, and attends over both."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from vllm_novakv.backend.compat import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MultipleOf,
    extract_layer_index,
    get_current_vllm_config,
    init_logger,
    layer_metadata,
    stock_backend_like,
)
from vllm_novakv.backend.layer_state import (
    BAND_SUFFIX,
    BandLayer,
    cache_shape,
    load_artifact,
    local_baseline,
    local_codec,
)
from vllm_novakv.backend.metadata import NovaKVMetadata, NovaKVMetadataBuilder, max_requests
from vllm_novakv.backend.op_set import AttentionOptions, OpSet, select_ops
from vllm_novakv.backend.specs import CacheShape, NovaHistorySpec
from vllm_novakv.baselines import CacheCodec, bits_per_element
from vllm_novakv.codec.layout import BLOCK_TOKENS, SUPPORTED_HEAD_SIZES
from vllm_novakv.config import BAND_BLOCK_TOKENS, HistoryFormat, NovaKVConfig
from vllm_novakv.plugin import BACKEND_NAME

logger = init_logger(__name__)


class NovaKVBackend(AttentionBackend):
    """Backend class that vLLM selects for ``--attention-backend NOVAKV``.

    The record size follows from the fitted artifact, so each layer gets a subclass bound to its `CacheShape` once its
    weights, and with them the artifact, are loaded.
    """

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    shape: ClassVar[CacheShape | None] = None

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[NovaKVImpl]:
        return NovaKVImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return NovaKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        # Blocks are never split into kernel blocks: padded pages cannot be. Without a spec, vLLM asks for the block
        # size of the whole model, which the history does not use.
        if isinstance(kv_cache_spec, NovaHistorySpec):
            return [MultipleOf(BLOCK_TOKENS)]
        return [MultipleOf(BAND_BLOCK_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(SUPPORTED_HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Head-major blocks; block and head strides are arguments of the operations.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Replace the dense spec by the packed history's."""
        if isinstance(spec, NovaHistorySpec) or not isinstance(spec, FullAttentionSpec):
            return spec
        if cls.shape is None:
            raise RuntimeError("NOVAKV: the cache was laid out before the model's weights were loaded")
        return cls.shape.history_spec(spec)


class NovaKVBandBackend(AttentionBackend):
    """Backend class of the band's pseudo-layer: only its metadata builder and layouts are used."""

    @staticmethod
    def get_name() -> str:
        return f"{BACKEND_NAME}_BAND"

    @staticmethod
    def get_impl_cls() -> type[NovaKVImpl]:
        raise NotImplementedError("the band is read and written by the layer that owns it")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return NovaKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(BAND_BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return NovaKVBackend.supported_kv_cache_layouts()


@cache
def bound_backend(shape: CacheShape) -> type[NovaKVBackend]:
    """`NovaKVBackend` for layers whose caches have this shape."""
    return type("NovaKVBackend", (NovaKVBackend,), {"shape": shape, "__module__": __name__})


class NovaKVImpl(AttentionImpl[NovaKVMetadata]):
    """Attention of one layer.

    Raises:
        NotImplementedError: at start-up, for a layer feature that the operations do not have.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> None:
        wrong = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"the attention type {attn_type!r}": attn_type != AttentionType.DECODER,
            "a cache shared with another layer": kv_sharing_target_layer_name is not None,
            f"the options {sorted(unsupported)}": any(value is not None for value in unsupported.values()),
        }
        if features := [name for name, is_used in wrong.items() if is_used]:
            raise NotImplementedError(
                f"{BACKEND_NAME} does not support an attention layer with {' and '.join(features)}; serve this model "
                f"without --attention-backend {BACKEND_NAME}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        # The parameter itself: its values arrive when the weights are loaded.
        self.sinks = sinks
        self.vllm_config = get_current_vllm_config()
        self.config = NovaKVConfig.from_additional_config(self.vllm_config.additional_config)
        self.band_name: str | None = None
        self.bits_per_element: float | None = None
        self.codec: Any = None
        self.ops: OpSet | None = None
        self.options = AttentionOptions(
            self.scale,
            self.config.sink_tokens,
            self.config.recent_tokens,
            self.config.prompt_recent_tokens,
            self.logits_soft_cap,
            self.sinks,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Load the layer's codec and register its band; a skipped layer is handed to vLLM's own backend instead.

        vLLM calls this after loading and before it asks for cache specs; it calls it again when weights are reloaded.
        """
        if self.band_name is not None:
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        layer = layers[name]
        index = extract_layer_index(name)
        if index in self.config.skip_layers:
            self._hand_over(name, layer)
            return
        is_exact = self.config.history is HistoryFormat.EXACT
        device = torch.device(self.vllm_config.device_config.device)
        num_layers = sum(isinstance(getattr(other, "impl", None), NovaKVImpl) for other in layers.values())
        if not is_exact:
            assert self.config.artifact is not None, "validation resolves the artifact"
            self.codec = local_codec(self.config.artifact, index, self.num_kv_heads, device)
            num_layers = len(set(load_artifact(self.config.artifact).layers) - set(self.config.skip_layers))
        baseline = local_baseline(self.config, index, self.num_kv_heads, self.head_size, device)
        self.bits_per_element = self._bits_per_element(baseline, act_dtype)
        shape = cache_shape(self.config, self.codec, self.head_size, act_dtype)
        band_dtype = act_dtype if is_exact else torch.bfloat16
        self.ops = select_ops(
            self.codec,
            band_dtype,
            device,
            act_dtype,
            self.num_heads,
            max_requests(self.vllm_config),
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.options,
            baseline,
        )
        self.band_name = name + BAND_SUFFIX
        layers[self.band_name] = BandLayer(
            NovaKVBandBackend,
            self.vllm_config,
            self.config,
            shape,
            self.num_kv_heads,
            self.head_size,
            band_dtype,
            num_layers,
        )
        layer.attn_backend = bound_backend(shape)

    def _bits_per_element(self, baseline: CacheCodec | None, dtype: torch.dtype) -> float:
        """Stored bits per element of the history; those of a compared method are what its own cache would take."""
        if self.codec is not None:
            return float(self.codec.layout.bits_per_element)
        exact_bits = 8.0 * dtype.itemsize
        if baseline is None:
            return exact_bits
        context_tokens = self.vllm_config.model_config.max_model_len
        band_tokens = self.config.sink_tokens + self.config.recent_tokens
        logger.info_once(
            "%s: the history passes through %s (%s): %.4g bits per element, %.4g with the exact band in %d tokens",
            BACKEND_NAME,
            baseline.name,
            baseline.paper,
            bits_per_element(baseline),
            bits_per_element(baseline, context_tokens, band_tokens, exact_bits),
            context_tokens,
        )
        return bits_per_element(baseline)

    def _hand_over(self, name: str, layer: Any) -> None:
        backend = stock_backend_like(self.vllm_config, layer)
        logger.info("%s: layer %s stays on %s, in the model's type", BACKEND_NAME, name, backend.get_name())
        layer.attn_backend = backend
        layer.impl = backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            self.scale,
            self.num_kv_heads,
            None,
            None,
            self.kv_cache_dtype,
            self.logits_soft_cap or None,
            AttentionType.DECODER,
            None,
            **({} if self.sinks is None else {"sinks": self.sinks}),
        )
        layer.impl.process_weights_after_loading(layer.dtype)

    def _band(self) -> BandLayer:
        band = self.vllm_config.compilation_config.static_forward_context.get(self.band_name)
        if band is None:
            raise RuntimeError(f"{BACKEND_NAME}: the layer has no band; were the weights loaded?")
        return band

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's tokens to history and band.

        Args:
            key, value: ``[num_tokens, num_kv_heads, head_size]``.
            kv_cache: the history, ``[num_blocks, num_kv_heads, 128, record_bytes]`` uint8.
            slot_mapping: ``[num_tokens]`` int64, the history's slots.
        """
        band = self._band()
        assert self.band_name is not None
        band_slots = layer_metadata(self.band_name)[1]
        assert self.ops is not None
        self.ops.store(key, value, kv_cache, band.kv_cache, slot_mapping, band_slots)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: NovaKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; ``query`` and ``output`` are ``[num_tokens, num_heads, head_size]``, others as in the update."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{BACKEND_NAME} does not quantize its output")
        if attn_metadata is None:  # profiling
            return output.zero_()
        meta = attn_metadata
        assert self.band_name is not None
        band_meta: NovaKVMetadata = layer_metadata(self.band_name)[0]
        band, ops = self._band(), self.ops
        assert ops is not None
        assert meta.prompt_lens is not None
        decodes, total = meta.num_decodes, meta.num_actual_tokens
        num_reqs = decodes + meta.num_prefills
        if decodes:
            ops.decode(
                output[:decodes],
                query[:decodes],
                kv_cache,
                band.kv_cache,
                meta.block_table[:decodes],
                band_meta.block_table[:decodes],
                meta.seq_lens[:decodes],
                meta.prompt_lens[:decodes],
                self.options,
            )
        if meta.num_prefills:
            ops.prefill(
                output[decodes:total],
                query[decodes:total],
                key[decodes:total],
                value[decodes:total],
                kv_cache,
                band.kv_cache,
                meta.block_table[decodes:num_reqs],
                band_meta.block_table[decodes:num_reqs],
                meta.query_start_loc[decodes : num_reqs + 1] - decodes,
                meta.seq_lens[decodes:num_reqs],
                meta.prompt_lens[decodes:num_reqs],
                meta.prefill_plan,
                self.options,
            )
        return output
