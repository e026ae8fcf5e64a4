#!/usr/bin/env python3
"""Decode step and prefill throughput inside vLLM on a GPU: NOVAKV beside BF16 and FP8, dummy weights of Qwen3-8B.

    python benchmarks/engine_gpu.py --shapes 16x30000 64x8192 1x32768 --out benchmarks/records

Speed depends on shapes, not on what the weights say, so the weights are random and the artifact is made of random
transforms; accuracy is measured elsewhere. Each cache runs in a process of its own. The engine is stepped by
hand: prefill is the time until every request has its first token, a decode step the median of the steps after that in
which all requests decode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
CACHES: dict[str, dict[str, Any]] = {
    "bf16": {"attention_backend": "FLASH_ATTN"},
    "fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
    "novakv": {"attention_backend": "NOVAKV"},
}


def main() -> None:
    """Run the caches one after the other and write one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--shapes", nargs="+", default=["16x30000"], help="requests x prompt tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to time")
    parser.add_argument("--layers", type=int, default=36, help="layers of the model, fewer for a quick look")
    parser.add_argument("--chunk", type=int, default=16384, help="max_num_batched_tokens")
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print("RESULT " + json.dumps(measure(arguments)), flush=True)
        return
    results = {}
    for cache in arguments.caches:
        command = [sys.executable, __file__, *sys.argv[1:], "--run", cache]
        results[cache] = run_process(command)
        print(cache, results[cache], flush=True)
    if arguments.out:
        write_record(arguments, results)


def run_process(command: list[str]) -> dict[str, Any]:
    """What a process measured, as far as it came; its log goes to standard error."""
    result: dict[str, Any] = {}
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kind, _, text = line.partition(" ")
            if kind in ("PART", "RESULT"):
                result = json.loads(text)
                print(text, end="", flush=True)
            last = line.strip() or last
    return result if process.returncode == 0 else result | {"error": last}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start one engine, fill the batch, time decode steps."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": arguments.layers}))
        options: dict[str, Any] = dict(CACHES[arguments.run])
        if arguments.run == "novakv":
            from vllm_novakv.plugin import register

            register()
            artifact = Path(name) / "artifact"
            write_random_artifact(model, artifact, arguments.layers)
            options["additional_config"] = {"novakv": {"artifact": str(artifact)}}
        shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
        started = time.perf_counter()
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max(length for _, length in shapes) + 1024,
            max_num_batched_tokens=arguments.chunk,
            max_num_seqs=max(count for count, _ in shapes),
            gpu_memory_utilization=arguments.memory,
            enable_prefix_caching=False,
            disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": sorted({count for count, _ in shapes})},
            **options,
        )
        start_up = time.perf_counter() - started
        run_batch(llm, 2, 600, 4, arguments.chunk)
        results: dict[str, Any] = {"start_up_s": round(start_up, 1)}
        for count, length in shapes:
            results[f"{count}x{length}"] = run_batch(llm, count, length, arguments.steps, arguments.chunk)
            print("PART " + json.dumps(results), flush=True)
        config = llm.llm_engine.vllm_config.cache_config
        return results | {"num_gpu_blocks": config.num_gpu_blocks, "block_size": config.block_size}


def run_batch(llm: Any, count: int, length: int, num_steps: int, chunk: int) -> dict[str, float]:
    """Step the engine through the prompts of a batch, then through decode steps of all its requests."""
    import torch
    from vllm import SamplingParams

    engine, generator = llm.llm_engine, torch.Generator().manual_seed(0)
    # the first request decodes while the others' prompts are computed, and no request may end before the last step
    new_tokens = 2 * -(-count * length // chunk) + num_steps + 8
    parameters = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for i in range(count):
        prompt = torch.randint(1000, 100000, (length,), generator=generator).tolist()
        engine.add_request(f"{count}x{length}-{new_tokens}-{i}", {"prompt_token_ids": prompt}, parameters)
    begin = time.perf_counter()
    first_tokens, steps, started = 0.0, [], set()
    while len(steps) < num_steps:
        step = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if any(output.finished for output in outputs):
            raise RuntimeError("a request ended before all decode steps were timed")
        started |= {output.request_id for output in outputs}
        if first_tokens:
            steps.append(now - step)
        elif len(started) == count:
            first_tokens = now - begin
    engine.abort_request(list(started))
    while engine.has_unfinished_requests():
        engine.step()
    quartiles = statistics.quantiles(steps, n=4)
    return {
        "decode_step_ms": round(statistics.median(steps) * 1e3, 3),
        "decode_step_q1_ms": round(quartiles[0] * 1e3, 3),
        "decode_step_q3_ms": round(quartiles[2] * 1e3, 3),
        "prefill_tokens_per_s": round(count * length / first_tokens, 1),
    }


def write_random_artifact(model: Path, directory: Path, num_layers: int) -> None:
    """An artifact of the model's shape: orthogonal transforms, Gaussian centroids."""
    import torch

    from vllm_novakv import artifact
    from vllm_novakv.codec.quantizer import LayerCodec
    from vllm_novakv.fingerprint import fingerprint_model

    heads, size = QWEN3_8B["num_key_value_heads"], QWEN3_8B["head_dim"]
    source = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(heads, size, size, generator=source, dtype=torch.float64)).Q.float()
    centroids = torch.randn(heads, size // 4, 256, 4, generator=source).to(torch.float8_e4m3fn).float()
    record = artifact.CalibrationRecord(
        source="none: random", num_tokens=1, seq_len=1, seed=0, vllm_version="0", created="1970-01-01T00:00:00+00:00"
    )
    figures = [
        artifact.LayerFigures(
            layer=i, relative_logit_error=0.0, top1_agreement=0.0, volume_spread_bits=0.0, value_relative_error=0.0
        )
        for i in range(num_layers)
    ]
    fitted = artifact.build(
        {
            layer: LayerCodec(torch.zeros(heads, size), basis.clone(), basis.clone(), basis.clone(), centroids.clone())
            for layer in range(num_layers)
        },
        fingerprint=fingerprint_model(model),
        codebook_dtype="float8_e4m3fn",
        calibration=record,
        figures=figures,
    )
    artifact.save(fitted, directory)


def write_record(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """One JSON file per run; earlier ones stay."""
    import torch
    import triton

    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "benchmark": "engine_gpu",
        "time": stamp,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "commit": arguments.commit or head,
        "command": " ".join(["python", *sys.argv]),
        "shape": {k: QWEN3_8B[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        | {"layers": arguments.layers, "shapes": arguments.shapes, "chunk": arguments.chunk},
        "results": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"engine_gpu-{stamp}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
