"""Layers that are not quantized stay on vLLM's own backend, beside quantized ones (exact mode, fp32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import build_tiny_llama, engine, generate, random_prompt

pytestmark = pytest.mark.e2e
EXACT = {"history": "exact"}


PROMPTS = [random_prompt(length, seed=length) for length in (30, 700, 129)] + [
    random_prompt(700, seed=700)[:600] + random_prompt(9, 1)
]


def backends_by_layer(llm: Any) -> dict[str, str]:
    """Layer name → name of its attention backend, the band's pseudo-layers included."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}


def answers(model: Path, novakv: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, str]]:
    with engine(model, novakv, max_num_batched_tokens=256) as llm:
        tokens = [generate(llm, [prompt], 6)[0] for prompt in PROMPTS]
        assert generate(llm, PROMPTS, 6) == tokens
        return tokens, backends_by_layer(llm)


def test_skipped_layers_stay_on_the_stock_backend(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    expected, stock = answers(model, None)
    tokens, backends = answers(model, EXACT | {"skip_layers": [1]})
    assert tokens == expected
    name = "model.layers.{}.self_attn.attn"
    assert set(stock.values()) == {"CPU_ATTN"}
    assert backends[name.format(1)] == "CPU_ATTN"
    assert name.format(1) + ".novakv_band" not in backends
    for layer in (0, 2):
        assert backends[name.format(layer)] == "NOVAKV"
        assert backends[name.format(layer) + ".novakv_band"] == "NOVAKV_BAND"


def test_sliding_window_layers_stay_on_the_stock_backend(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=4096,
        initializer_range=0.12,
        eos_token_id=None,
    )
    Gemma3ForCausalLM(config).float().save_pretrained(tmp_path)
    expected, _ = answers(tmp_path, None)
    tokens, backends = answers(tmp_path, EXACT)
    assert tokens == expected
    assert [backends[f"model.layers.{layer}.self_attn.attn"] for layer in range(4)] == [
        "CPU_ATTN",
        "NOVAKV",
        "CPU_ATTN",
        "NOVAKV",
    ]
