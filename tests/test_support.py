"""Rules that decide whether a model can be served, on config dictionaries like those that models ship."""

import pytest

from vllm_novakv.support import assess_model, head_size_of, layer_kinds, num_kv_heads_of, vllm_version_problem

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}


def llama(**changes):
    return {**LLAMA, **changes}


def test_plain_decoder_is_supported_and_all_layers_are_quantized():
    support = assess_model(LLAMA)
    assert support.is_supported
    assert (support.head_size, support.num_kv_heads, support.num_layers) == (64, 3, 30)
    assert support.quantized_layers == tuple(range(30))
    assert support.bfloat16_layers == ()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_supported_head_sizes(head_size):
    assert assess_model(llama(head_dim=head_size)).is_supported


@pytest.mark.parametrize("head_size", [32, 80, 96, 192, 512])
def test_other_head_sizes_are_refused_with_the_supported_ones(head_size):
    (problem,) = assess_model(llama(head_dim=head_size)).problems
    assert f"head_size={head_size}" in problem
    assert "64, 128, 256" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"kv_lora_rank": 512}, "multi-head latent attention", id="mla"),
        pytest.param({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder", id="encoder-decoder"),
        pytest.param({"model_type": "bert", "architectures": ["BertModel"]}, "both directions", id="bert"),
        pytest.param({"is_causal": False}, "both directions", id="not-causal"),
        pytest.param({"use_bidirectional_attention": True}, "both directions", id="bidirectional-gemma"),
        pytest.param({"architectures": ["FooForMaskedLM"]}, "both directions", id="masked-lm"),
        pytest.param({"num_kv_shared_layers": 10}, "another layer's cache", id="kv-sharing"),
        pytest.param({"alibi": True}, "ALiBi", id="alibi"),
        pytest.param({"attn_config": {"alibi": True}}, "ALiBi", id="alibi-nested"),
        pytest.param({"num_key_value_heads": 4}, "num_kv_heads=4", id="uneven-gqa"),
        pytest.param({"layer_types": ["linear_attention", "full_attention"] * 15}, "linear_attention", id="hybrid"),
        pytest.param({"attention_chunk_size": 8192}, "chunked_attention", id="chunked"),
        pytest.param({"sliding_window": 4096}, "no layer is left", id="all-sliding"),
    ],
)
def test_unsupported_models_are_refused_with_a_reason(changes, words):
    problems = assess_model(llama(**changes)).problems
    assert any(words in problem for problem in problems), problems


def test_model_without_attention_is_refused():
    config = {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 64}
    assert any("no attention heads" in problem for problem in assess_model(config).problems)


def test_listed_sliding_layers_stay_exact():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    support = assess_model(llama(layer_types=kinds * 5, sliding_window=512))
    assert support.is_supported
    assert support.quantized_layers == (5, 11, 17, 23, 29)
    assert len(support.bfloat16_layers) == 25
    assert any("25 of 30 layers" in note for note in support.notes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, "ffff", id="no-window"),
        pytest.param({"sliding_window": 8, "use_sliding_window": False}, "ffff", id="window-switched-off"),
        pytest.param({"sliding_window": 8, "sliding_window_pattern": 2}, "sfsf", id="period"),
        pytest.param({"sliding_window": 8, "model_type": "gemma2"}, "sfsf", id="gemma2"),
        pytest.param({"sliding_window": 8, "model_type": "gemma3_text"}, "ssss", id="gemma3-short"),
        pytest.param(
            {"sliding_window": 8, "use_sliding_window": True, "model_type": "qwen2", "max_window_layers": 3},
            "fffs",
            id="qwen2",
        ),
        pytest.param({"attention_chunk_size": 8192}, "cccf", id="llama4"),
    ],
)
def test_layer_kinds_without_a_list(config, expected):
    kinds = layer_kinds({"num_hidden_layers": 4, **config})
    assert "".join(kind[0] for kind in kinds) == expected


def test_skipped_layers_stay_exact_and_unknown_ones_are_refused():
    assert assess_model(LLAMA, skip_layers=(0, 29)).quantized_layers == tuple(range(1, 29))
    assert any("skip_layers=[30]" in problem for problem in assess_model(LLAMA, skip_layers=(30,)).problems)


def test_multimodal_config_is_read_from_its_decoder():
    support = assess_model(
        {"architectures": ["XForConditionalGeneration"], "model_type": "x", "text_config": llama(head_dim=128)}
    )
    assert support.is_supported
    assert support.head_size == 128
    assert any("multimodal" in note for note in support.notes)


def test_bidirectional_text_decoder_inside_a_multimodal_model_is_refused():
    config = {"model_type": "x", "text_config": llama(use_bidirectional_attention=True)}
    assert not assess_model(config).is_supported


def test_shapes_fall_back_to_older_names():
    assert head_size_of({"n_embd": 768, "n_head": 12}) == 64
    assert num_kv_heads_of({"n_head": 12}) == 12
    assert num_kv_heads_of({"num_attention_heads": 71, "multi_query": True}) == 1
    assert head_size_of({"head_dim": None, "hidden_size": 1024, "num_attention_heads": 8}) == 128


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_vllm_versions(version):
    assert vllm_version_problem(version) is None


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.31.9", "too old"), ("0.9.2", "too old"), ("0.34.0", "newer"), ("1.0.0", "newer"), ("dev", "cannot be read")],
)
def test_other_vllm_versions_are_refused(version, words):
    assert words in (vllm_version_problem(version) or "")
