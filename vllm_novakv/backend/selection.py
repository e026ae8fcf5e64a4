"""Which layers NOVAKV takes; every other layer stays on the backend that vLLM would have chosen."""

from __future__ import annotations

from typing import Any

from vllm_novakv.backend.compat import AttentionType


def takes_layer(attn_selector_config: Any) -> bool:
    """Whether a layer with this selector configuration is stored by NOVAKV.

    Args:
        attn_selector_config: vLLM's ``AttentionSelectorConfig``.

    Returns:
        False for layers with a sliding window, whose cache is small already, and for cross and encoder attention.
        Layers that nothing could serve (MLA, sparse) are refused before this is asked.
    """
    config = attn_selector_config
    return not config.has_sliding_window and config.attn_type == AttentionType.DECODER
