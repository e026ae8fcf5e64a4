"""Attention metadata from vLLM's: what the operations read of a batch, padded or not."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_novakv.backend.metadata import NovaKVMetadataBuilder
from vllm_novakv.backend.specs import CacheShape

VLLM_CONFIG = SimpleNamespace(
    additional_config={},
    compilation_config=SimpleNamespace(max_cudagraph_capture_size=8),
    model_config=SimpleNamespace(dtype=torch.bfloat16),
    scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
)


def builder_of(spec) -> NovaKVMetadataBuilder:
    return NovaKVMetadataBuilder(spec, ["layer"], VLLM_CONFIG, torch.device("cpu"))


def history_builder() -> NovaKVMetadataBuilder:
    dense = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return builder_of(CacheShape(record_bytes=36).history_spec(dense))


def batch(query_lens: list[int], seq_lens: list[int], prompt_lens: list[int] | None) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(seq_lens), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        rswa_prefix_lens=None if prompt_lens is None else torch.tensor(prompt_lens, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("prompt_lens", "expected"),
    [
        pytest.param([70, 40, 9, 9], [70, 40, 9, 9], id="all-rows"),
        pytest.param([70, 40], [70, 40, 0, 0], id="padded-rows-have-no-entry"),
        pytest.param([70, 40, 9, 9, 5, 5], [70, 40, 9, 9], id="more-rows-than-requests"),
        pytest.param(None, [0, 0, 0, 0], id="warm-up"),
    ],
)
def test_prompt_lengths_of_a_padded_batch(prompt_lens, expected):
    builder = history_builder()
    # what an earlier step left
    builder.build(0, batch([1] * 4, [90] * 4, [80] * 4))
    metadata = builder.build(0, batch([1] * 4, [71, 41, 0, 0], prompt_lens))
    assert metadata.prompt_lens.tolist() == expected
    assert metadata.prompt_lens.dtype == torch.int32


def test_prompt_lengths_stay_in_one_buffer():
    builder = history_builder()
    first = builder.build(0, batch([1, 1], [9, 9], [5, 5])).prompt_lens
    second = builder.build(0, batch([1] * 8, [9] * 8, [5] * 8)).prompt_lens
    assert first.data_ptr() == second.data_ptr()


def test_decodes_come_first():
    metadata = history_builder().build(0, batch([1, 1, 30], [50, 60, 30], [40, 60, 30]))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)


def test_the_band_has_no_prompt_lengths():
    dense = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert builder_of(dense).build(0, batch([1], [9], [5])).prompt_lens is None
