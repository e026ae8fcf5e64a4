"""What one quantized layer owns: its codec, and the pseudo-layer through which vLLM manages its band."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_novakv import artifact as artifacts
from vllm_novakv.backend.compat import (
    AttentionBackend,
    AttentionLayerBase,
    VllmConfig,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    publish_prompt_lengths,
)
from vllm_novakv.backend.specs import CacheShape, NovaBandSpec
from vllm_novakv.baselines import BASELINES, CacheCodec, LayerStatistics
from vllm_novakv.baselines.moments import load_moments, moments_directory
from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.config import BAND_BLOCK_TOKENS, HistoryFormat, NovaKVConfig

if TYPE_CHECKING:
    from vllm_novakv.artifact import Artifact
    from vllm_novakv.baselines.moments import SavedMoments

BAND_SUFFIX = ".novakv_band"


@lru_cache(maxsize=1)
def load_artifact(directory: Path) -> Artifact:
    """Load and verify the artifact once per process: every layer asks for it."""
    return artifacts.load(directory)


def local_codec(directory: Path, layer_index: int, num_kv_heads: int, device: torch.device) -> LayerCodec:
    """The codec of this tensor-parallel rank's KV heads.

    Args:
        directory: the artifact's folder.
        layer_index: index of the attention layer in the model.
        num_kv_heads: KV heads on this rank.
        device: where the tensors go.

    Raises:
        ValueError: the artifact has no such layer.
    """
    artifact = load_artifact(directory)
    if layer_index not in artifact.layers:
        raise ValueError(
            f"the artifact in {directory} has no attention layer {layer_index} (it has "
            f"{sorted(artifact.layers)}); fit it again with `novakv fit`, or list the layer in skip_layers"
        )
    codec = artifact.layers[layer_index]
    return codec.shard(_first_head(codec.num_kv_heads), num_kv_heads).to(device)


def _first_head(num_kv_heads: int) -> int:
    """First of this tensor-parallel rank's KV heads, of all that the model has."""
    # Heads are dealt in order; with more ranks than KV heads, vLLM gives consecutive ranks the same head.
    return get_tensor_model_parallel_rank() * num_kv_heads // get_tensor_model_parallel_world_size()


@lru_cache(maxsize=1)
def load_artifact_moments(artifact: Path) -> SavedMoments:
    """Load and verify the moments beside an artifact once per process: every layer asks for them."""
    return load_moments(moments_directory(artifact))


def local_baseline(
    config: NovaKVConfig, layer_index: int, num_kv_heads: int, head_size: int, device: torch.device
) -> CacheCodec | None:
    """The compared method of this tensor-parallel rank's KV heads, fitted to the layer.

    Args:
        config: the plugin's settings.
        layer_index: index of the attention layer in the model.
        num_kv_heads: KV heads on this rank.
        head_size: of the layer.
        device: where the tensors go.

    Returns:
        The method; None if the settings name none.

    Raises:
        ValueError: artifact or moments have no such layer.
    """
    if config.baseline is None:
        return None
    baseline = BASELINES[config.baseline]
    codec = moments = None
    if baseline.needs == "artifact":
        assert config.artifact is not None, "validation resolves the artifact"
        codec = local_codec(config.artifact, layer_index, num_kv_heads, device)
    elif baseline.needs == "moments":
        assert config.artifact is not None, "validation resolves the artifact"
        saved = load_artifact_moments(config.artifact)
        if layer_index not in saved.layers:
            raise ValueError(
                f"{moments_directory(config.artifact)} has no attention layer {layer_index} (it has "
                f"{sorted(saved.layers)}); fit again with `novakv fit --save-moments`, or list the layer in skip_layers"
            )
        first_head = _first_head(saved.manifest.fingerprint.num_kv_heads)
        moments = saved.layers[layer_index].shard(first_head, num_kv_heads)
    return baseline.build(LayerStatistics(head_size, moments, codec)).to(device)


class BandLayer(AttentionLayerBase):
    """Pseudo-layer that owns a layer's band: vLLM gives it blocks, a block table and a slot mapping like any layer.

    Not an ``nn.Module``, so that it is in no state dict. Its ``kv_cache`` has blocks in the first dimension.

    Args:
        backend: the band's attention backend class, which builds its metadata.
        vllm_config: of the engine.
        config: the plugin's settings.
        shape: sizes of the layer's caches.
        num_kv_heads, head_size: of the layer.
        dtype: type of a band element.
        num_layers: quantized layers, for the start-up log.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        vllm_config: VllmConfig,
        config: NovaKVConfig,
        shape: CacheShape,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        num_layers: int,
    ) -> None:
        self.backend = backend
        self.vllm_config = vllm_config
        self.config = config
        self.shape = shape
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.num_layers = num_layers
        self.kv_cache = torch.tensor([])

    @property
    def kv_cache(self) -> torch.Tensor:
        """The band's blocks; empty before vLLM has made them and after it has dropped those of a profiling run."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache
        # vLLM makes all metadata builders before it makes the caches
        publish_prompt_lengths(self.vllm_config, is_wanted=kv_cache.numel() > 0)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """View the bytes ``[B, H, 16, content]`` as elements ``[B, H, 16, 2 * head_size]``."""
        self.kv_cache = kv_cache.view(self.dtype)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The band's backend class."""
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> NovaBandSpec:
        """The band's cache spec."""
        return NovaBandSpec(
            block_size=BAND_BLOCK_TOKENS,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            state_content_bytes=self.shape.band_content_bytes(self.head_size),
            page_size_padded=self.shape.page_bytes(self.num_kv_heads, self.head_size),
            dcp_sharded=False,
            sink_tokens=self.config.sink_tokens,
            recent_tokens=self.config.recent_tokens,
            prompt_recent_tokens=self.config.prompt_recent_tokens,
            max_steps_in_flight=vllm_config.max_concurrent_batches,
            max_model_len=vllm_config.model_config.max_model_len,
            max_chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            history_record_bytes=self.shape.record_bytes,
            num_layers=self.num_layers,
        )


def cache_shape(config: NovaKVConfig, codec: LayerCodec | None, head_size: int, dtype: torch.dtype) -> CacheShape:
    """Sizes of a layer's caches: the artifact's records and a BF16 band, or in exact mode the model's type for both."""
    if config.history is HistoryFormat.EXACT:
        return CacheShape(record_bytes=2 * head_size * dtype.itemsize, band_element_bytes=dtype.itemsize)
    assert codec is not None
    return CacheShape(record_bytes=codec.layout.record_bytes)


def fit_sha256(config: NovaKVConfig) -> str | None:
    """Checksum of the fitted tensors that the caches of these settings use; None where they use none."""
    needs = "artifact" if config.history is HistoryFormat.QUANTIZED else "nothing"
    if config.baseline is not None:
        needs = BASELINES[config.baseline].needs
    if needs == "nothing" or config.artifact is None:
        return None
    if needs == "moments":
        return load_artifact_moments(config.artifact).manifest.tensors_sha256
    return load_artifact(config.artifact).manifest.tensors_sha256
