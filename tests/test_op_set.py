"""Which operations a layer gets, and when its decode may be captured in CUDA graphs."""

from types import SimpleNamespace

import pytest
import torch
from codec_samples import sample_codec

pytest.importorskip("vllm", reason="the backend needs vLLM")

from vllm_novakv.backend.compat import AttentionCGSupport
from vllm_novakv.backend.metadata import NovaKVMetadataBuilder
from vllm_novakv.backend.op_set import AttentionOptions, ReferenceOps, select_ops

OPTIONS = AttentionOptions(
    scale=0.125, sink_tokens=64, recent_tokens=256, prompt_recent_tokens=1024, logits_soft_cap=0.0, sinks=None
)


@pytest.mark.parametrize(
    ("codec", "device"),
    [(sample_codec(1, 64), "cpu"), (None, "cpu"), (None, "cuda")],
    ids=["quantized-cpu", "exact-cpu", "exact-cuda"],
)
def test_cpu_and_exact_mode_get_the_reference(codec, device):
    ops = select_ops(codec, torch.float32, torch.device(device), torch.bfloat16, 4, 8, 512, OPTIONS)
    assert ops == ReferenceOps(codec, torch.float32)


@pytest.mark.parametrize(
    ("device_type", "history", "expected"),
    [
        ("cuda", "quantized", AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("cuda", "exact", AttentionCGSupport.NEVER),
        ("cpu", "quantized", AttentionCGSupport.NEVER),
    ],
)
def test_decode_is_captured_only_where_kernels_run(device_type, history, expected):
    config = SimpleNamespace(
        additional_config={"novakv": {"history": history}}, device_config=SimpleNamespace(device_type=device_type)
    )
    assert NovaKVMetadataBuilder.get_cudagraph_support(config, None) is expected
