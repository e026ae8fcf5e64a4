"""Runs the CUDA C++ kernels on a CPU: g++ compiles their source with an emulator of a GPU's threads."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm_novakv.ops import decode_cuda, nvrtc, store_cuda

EMULATOR = Path(__file__).with_name("cuda_emulator.h")


class EmulatedKernel:
    """Stands in for a kernel of `vllm_novakv.ops.nvrtc`."""

    def __init__(self, source, name, directory):
        parameters = re.search(rf"{name}\(([^)]*)\)", source, re.DOTALL)[1].split(",")
        types = [parameter.strip().rsplit(" ", 1)[0] for parameter in parameters]
        values = ", ".join(f"*({type_}*)p[{i}]" for i, type_ in enumerate(types))
        driver = (
            'extern "C" void run(int x, int y, int z, int threads, void** p) '
            f"{{ launch({{x, y, z}}, threads, [=] {{ {name}({values}); }}); }}"
        )
        path = directory / f"{name}-{abs(hash(source))}.cpp"
        path.write_text(f'#include "{EMULATOR}"\n{source}\n{driver}\n')
        library = path.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
        subprocess.run(["g++", *options, "-o", library, path], check=True)
        self.run = ctypes.CDLL(str(library)).run

    def __call__(self, *, grid, block, args, shared_mem):
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.run(*grid, block[0], pointers)


@pytest.fixture
def emulated_cuda(tmp_path, monkeypatch):
    """Kernels are compiled for the CPU and run where tensors are on it; skipped where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernels' source for the CPU")
    caches = (decode_cuda._compiled, store_cuda._compiled)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda source, name, *_, **__: EmulatedKernel(source, name, tmp_path))
    yield
    for cache in caches:
        cache.cache_clear()
