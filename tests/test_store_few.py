"""The one-launch store's CUDA source on a CPU, compiled by the C++ compiler with an emulator of a GPU's threads."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from codec_samples import sample_codec, sample_keys, sample_values
from ops_scenario import BAND_BLOCK, interpreted_without_gpu, poisoned_pages

from vllm_novakv.codec.layout import BLOCK_TOKENS, record_byte_offsets
from vllm_novakv.codec.quantizer import unpack_records
from vllm_novakv.ops import reference, store_few

with interpreted_without_gpu():
    from vllm_novakv.ops.tables import KernelTables

EMULATOR = Path(__file__).with_name("cuda_emulator.h")
DRIVER = """
extern "C" void run(int tiles, int heads, int threads, void** p, const int* n) {
  launch({tiles, heads, 2}, threads, [=] {
    store_few((const Input*)p[0], (const Input*)p[1], (u8*)p[2], (u16*)p[3], (const long long*)p[4],
              (const long long*)p[5], (const float*)p[6], (const float*)p[7], (const float*)p[8], (const float*)p[9],
              (const float*)p[10], n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]);
  });
}
"""


@pytest.fixture
def compiled(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, which compiles the kernel's source for the CPU")

    def compile_for(size, dtype):
        source = tmp_path / "store_few.cpp"
        source.write_text(f'#include "{EMULATOR}"\n{store_few.source(size, dtype, BAND_BLOCK)}{DRIVER}')
        library = tmp_path / "store_few.so"
        command = [
            compiler,
            "-std=c++17",
            "-O1",
            "-w",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            "-o",
            library,
            source,
        ]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library)).run

    return compile_for


@pytest.mark.parametrize(
    ("num_tokens", "heads", "size", "dtype", "fp8"),
    [
        pytest.param(19, 2, 128, torch.bfloat16, "float8_e4m3fn", id="tok19-kv2-hs128"),
        pytest.param(5, 1, 64, torch.float16, "float8_e5m2", id="tok5-kv1-hs64-fp16"),
        pytest.param(3, 1, 256, torch.float32, "float8_e4m3fn", id="tok3-kv1-hs256-fp32"),
    ],
)
def test_source_writes_the_reference_s_records(compiled, num_tokens, heads, size, dtype, fp8):
    run = compiled(size, dtype)
    codec = sample_codec(heads, size, fp8=fp8, num_centroids=200)
    key = sample_keys(codec, num_tokens).to(dtype)
    value = sample_values(codec, num_tokens).to(dtype)
    key, value = torch.cat([key, value], 1).split(heads, dim=1)
    slots = torch.randperm(2 * BLOCK_TOKENS, generator=torch.Generator().manual_seed(0))[:num_tokens] + BLOCK_TOKENS
    band_slots = torch.arange(num_tokens) + BAND_BLOCK
    slots[1], band_slots[1], band_slots[2] = -1, -1, 3
    slots[num_tokens - 1] = 7
    caches = [
        (
            poisoned_pages(3, heads, BLOCK_TOKENS, codec.layout.record_bytes, "BLHNC", 256, torch.uint8, "cpu"),
            poisoned_pages(num_tokens // 16 + 3, heads, 16, 2 * size, "BLHNC", 256, torch.bfloat16, "cpu"),
        )
        for _ in range(2)
    ]
    reference.store(key, value, *caches[0], slots, band_slots, codec)
    tables = KernelTables.build(codec)
    history, band = caches[1]
    tensors = [
        key, value, history, band, slots, band_slots, codec.key_mean, codec.key_transform, tables.search_centroids,
        tables.search_half_norms, codec.value_transform,
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    integers = store_few.integers(key, value, history, band, num_tokens)
    run(-(-num_tokens // 16), heads, 32 * store_few.num_warps(size), pointers, (ctypes.c_int * 10)(*integers))

    assert torch.equal(caches[0][1].view(torch.int16), band.view(torch.int16))
    is_stored = slots >= BLOCK_TOKENS
    expected, actual = (records(cache, slots[is_stored], codec.layout) for cache, _ in caches)
    for a, e in zip(actual, expected, strict=True):
        # f32 sums in another order: a value on a code's border, or a scale between two bf16 numbers
        assert (a != e).double().mean() < 2e-3
    # nothing else was written
    offsets = record_byte_offsets(codec.layout)
    for cache, _ in caches:
        for slot in slots[is_stored].tolist():
            cache.flatten(2)[slot // BLOCK_TOKENS, :, offsets[slot % BLOCK_TOKENS]] = 0
    assert torch.equal(caches[0][0], history)


def records(cache, slots, layout):
    blocks = cache.flatten(2)[slots // BLOCK_TOKENS]
    index = record_byte_offsets(layout)[slots % BLOCK_TOKENS][:, None, :].expand(-1, cache.shape[1], -1)
    return [field.contiguous() for field in unpack_records(blocks.gather(2, index), layout)]
