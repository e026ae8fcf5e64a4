"""Settings of the plugin: what is read, and what is refused with which words."""

import pytest

from vllm_novakv.config import NovaKVConfig


def test_defaults_where_none_are_given():
    config = NovaKVConfig.from_additional_config({"another_plugin": {"sink_tokens": 5}})
    assert config == NovaKVConfig.from_additional_config(None) == NovaKVConfig()
    assert (config.sink_tokens, config.recent_tokens, config.prompt_recent_tokens) == (64, 256, 1024)


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        pytest.param({"nova_kv": {"sink_tokens": 32}}, '"nova_kv" has no effect there', id="misspelt"),
        pytest.param({"NOVAKV": {}}, '"NOVAKV" has no effect there', id="upper-case"),
        pytest.param({"sink_tokens": 32}, '{"novakv": {"sink_tokens": ...}}', id="not-nested"),
        pytest.param({"novakv": {"sink": 32}}, "Known settings: artifact, sink_tokens", id="unknown"),
        pytest.param({"novakv": {"sink_tokens": 20}}, "must be a multiple of 16", id="no-whole-blocks"),
        pytest.param({"novakv": {"sink_tokens": False}}, "sink_tokens: Input should be a valid integer", id="bool"),
        pytest.param({"novakv": {"recent_tokens": "512"}}, "recent_tokens: Input should be a valid", id="text"),
        pytest.param({"novakv": {"recent_tokens": -16}}, "greater than or equal to 16", id="negative"),
        pytest.param({"novakv": {"skip_layers": [True]}}, "valid integer", id="bool-layer"),
        pytest.param({"novakv": {"skip_layers": [-1]}}, "layer indices start at 0", id="negative-layer"),
        pytest.param(
            {"novakv": {"recent_tokens": 2048}}, "prompt_recent_tokens=1024 is less than recent_tokens=2048", id="order"
        ),
        pytest.param({"novakv": "quantized"}, "must be an object", id="no-object"),
        pytest.param(
            {"novakv": {"baseline": "quarot-int2"}},
            'add "history": "exact" or drop the baseline',
            id="quantized-baseline",
        ),
        pytest.param(
            {"novakv": {"history": "exact", "baseline": "oscar"}}, "got 'oscar'; choose from naive-int2", id="baseline"
        ),
    ],
)
def test_wrong_settings_are_refused(additional_config, message):
    with pytest.raises(ValueError, match="--additional-config") as error:
        NovaKVConfig.from_additional_config(additional_config)
    assert message in str(error.value)
