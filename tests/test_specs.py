"""The cache specs that vLLM receives, and the enum member that its processes exchange."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from vllm_novakv.codec.layout import BLOCK_TOKENS, RecordLayout


def dense_spec(block_size=128, num_kv_heads=3, head_size=64):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=torch.bfloat16
    )


@pytest.mark.parametrize(("head_size", "record_bytes"), [(64, 36), (128, 68), (256, 132)])
def test_a_history_block_holds_exactly_its_records(head_size: int, record_bytes: int) -> None:
    from vllm_novakv.backend.specs import CacheShape

    assert RecordLayout(head_size).record_bytes == record_bytes
    spec = CacheShape(record_bytes).history_spec(dense_spec(head_size=head_size))
    assert spec.block_size == BLOCK_TOKENS
    assert spec.page_size_bytes == 3 * BLOCK_TOKENS * record_bytes
    # SmolLM2-135M: 30 layers of 3 KV heads of 64 dims
    if head_size == 64:
        assert 30 * spec.page_size_bytes // spec.block_size == 30 * 3 * 36


def test_both_pages_have_one_size_and_a_probe_is_not_padded() -> None:
    from vllm_novakv.backend.specs import CacheShape

    shape = CacheShape(record_bytes=36)
    assert shape.page_bytes(3, 64) == max(3 * 128 * 36, 3 * 16 * 256)
    probe = shape.history_spec(dense_spec(block_size=1))
    assert (probe.block_size, probe.page_size_bytes) == (1, 3 * 36)
    assert CacheShape(36, has_equal_pages=False).history_spec(dense_spec()).page_size_padded is None


def test_specs_of_one_group_merge_and_foreign_ones_do_not() -> None:
    from vllm_novakv.backend.band_geometry import BandGeometry
    from vllm_novakv.backend.specs import CacheShape, NovaBandSpec

    spec = CacheShape(36).history_spec(dense_spec())
    assert type(spec).merge([spec, spec]) == spec
    settings = dict.fromkeys(("max_steps_in_flight", "num_layers"), 1) | {
        "block_size": 16,
        "num_kv_heads": 3,
        "head_size": 64,
        "dtype": torch.uint8,
        "sink_tokens": 64,
        "recent_tokens": 256,
        "prompt_recent_tokens": 1024,
        "max_model_len": 4096,
        "max_chunk_tokens": 2048,
        "history_record_bytes": 36,
    }
    band = NovaBandSpec(**settings)
    assert NovaBandSpec.merge([band, band]) == band
    assert band.geometry == BandGeometry(sink_tokens=64, recent_tokens=256, prompt_recent_tokens=1024)
    for name in ("recent_tokens", "prompt_recent_tokens"):
        with pytest.raises(ValueError, match="differ"):
            NovaBandSpec.merge([band, NovaBandSpec(**settings | {name: 128})])


def test_the_enum_member_unpickles_in_a_process_that_has_not_loaded_its_plugins() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_novakv.plugin import register

    register()
    register()
    content = pickle.dumps(AttentionBackendEnum["NOVAKV"])
    code = f"import pickle; print(pickle.loads({content!r}).get_path())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "vllm_novakv.backend.attention.NovaKVBackend"
