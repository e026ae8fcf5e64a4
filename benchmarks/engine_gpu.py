#!/usr/bin/env python3
"""Decode step, prefill throughput and pool inside vLLM on a GPU: NOVAKV beside BF16 and FP8, Qwen3-8B's shape.

    python benchmarks/engine_gpu.py --shapes 16x30000 64x8192 1x32768 --fill 30000 --profile 128x8192

Speed depends on shapes, not on what the weights say, so the weights are random and the artifact is made of random
transforms; accuracy is measured elsewhere. Each cache runs in a process of its own. The engine is stepped by hand:
prefill is the time until every request has its first token, a decode step the median of the steps after that in which
all requests decode. A shape that a cache's pool cannot hold is skipped, and the record says so.

--fill admits as many requests of a length as vLLM's reported pool holds, counts preemptions, and times the decode
steps of that batch. --profile adds the GPU time of a decode step by kind of kernel. vLLM's JIT monitor watches from the
end of start-up on, the first request included; what it reports is in the record.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.record import write_record

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
    "novakv": {"attention_backend": "NOVAKV"},
    "bf16": {"attention_backend": "FLASH_ATTN"},
    "fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
}
MAX_REQUESTS = 256
PROFILED_STEPS = 8
KERNEL_KINDS = {
    "store": ("_store_kernel", "store_cuda", "reshape_and_cache"),
    "attention": ("_fold_band", "decode_", "_history_kernel", "_merge_kernel", "flash"),
    "gemm": ("gemm", "nvjet", "cutlass", "gemv", "splitk"),
}
"""Kinds of kernels by parts of their names, in the order in which they are tried; the rest is "other"."""


def main() -> None:
    """Run the caches one after the other and write one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--shapes", nargs="*", default=["16x30000"], help="requests x prompt tokens")
    parser.add_argument("--fill", type=int, metavar="N", help="also as many requests of N tokens as the pool holds")
    parser.add_argument("--profile", nargs="*", default=[], metavar="SHAPE", help="further shapes: time by kernel kind")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to time")
    parser.add_argument("--layers", type=int, default=36, help="layers of the model, fewer for a quick look")
    parser.add_argument("--chunk", type=int, default=16384, help="max_num_batched_tokens")
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument(
        "--partial", type=Path, help="results so far, kept between calls: caches in it are not run again"
    )
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print("RESULT " + json.dumps(measure(arguments)), flush=True)
        return
    results = {}
    if arguments.partial and arguments.partial.exists():
        results = json.loads(arguments.partial.read_text())
    for cache in arguments.caches:
        if cache in results:
            continue
        measured = run_process([sys.executable, __file__, *sys.argv[1:], "--run", cache])
        print(cache, json.dumps(measured), flush=True)
        results[cache] = measured
        if arguments.partial and "error" not in measured:
            arguments.partial.write_text(json.dumps(results))
    if arguments.out:
        names = ("shapes", "fill", "profile", "steps", "layers", "chunk", "memory")
        settings = {"model": QWEN3_8B} | {name: getattr(arguments, name) for name in names}
        print(write_record(arguments.out, "engine-h200", settings, results, commit=arguments.commit))


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
            last = line.strip() or last
    return result if process.returncode == 0 else result | {"error": last}


class Messages(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self, logger_name: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger(logger_name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text."""
        self.texts.append(record.getMessage())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start one engine, fill the batches, time decode steps."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    compilations = Messages("vllm.utils.jit_monitor")
    shapes = [parse_shape(shape) for shape in arguments.shapes]
    profiled = [parse_shape(shape) for shape in arguments.profile]
    batch_sizes = {count for count, _ in shapes + profiled} | set(range(16, MAX_REQUESTS + 1, 16))
    lengths = [length for _, length in shapes + profiled] + ([arguments.fill] if arguments.fill else [])
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
        started = time.perf_counter()
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max(lengths) + 1024,
            max_num_batched_tokens=arguments.chunk,
            max_num_seqs=MAX_REQUESTS,
            gpu_memory_utilization=arguments.memory,
            enable_prefix_caching=False,
            disable_log_stats=True,
            jit_monitor_verbose=True,
            compilation_config={"cudagraph_capture_sizes": sorted(batch_sizes)},
            **options,
        )
        cache = llm.llm_engine.vllm_config.cache_config
        pool = cache.kv_cache_size_tokens
        results: dict[str, Any] = {
            "start_up_s": round(time.perf_counter() - started, 1),
            "pool_tokens": pool,
            "num_gpu_blocks": cache.num_gpu_blocks,
        }
        # the first requests: short prompts, then decode steps of a padded batch
        run_batch(llm, 2, 600, 4, arguments.chunk)
        results["jit_compilations_first_requests"] = list(compilations.texts)
        for count, length in shapes + profiled:
            is_profiled = (count, length) in profiled
            name = f"{count}x{length}"
            if count * (length + new_tokens(count, length, arguments.steps, arguments.chunk)) > pool:
                results[name] = {"skipped": "the pool does not hold it"}
                continue
            results[name] = run_batch(llm, count, length, arguments.steps, arguments.chunk, is_profiled)
            print("PART " + json.dumps(results), flush=True)
        if arguments.fill:
            count = fitting_requests(pool, arguments)
            # the batch may be one of the shapes already
            batch = results.get(f"{count}x{arguments.fill}") or run_batch(
                llm, count, arguments.fill, arguments.steps, arguments.chunk
            )
            rate = round(count / batch["decode_step_ms"] * 1e3, 1)
            results[f"fill {arguments.fill}"] = {"requests": count, "tokens_per_s": rate} | batch
        return results | {"jit_compilations": compilations.texts}


def parse_shape(text: str) -> tuple[int, int]:
    """Requests and prompt tokens of "16x30000"."""
    count, length = map(int, text.split("x"))
    return count, length


def new_tokens(count: int, length: int, num_steps: int, chunk: int) -> int:
    """Tokens that a request may generate: the first decodes while the others' prompts are computed, and no request may
    end before the last step."""
    return 2 * -(-count * length // chunk) + num_steps + PROFILED_STEPS + 16


def fitting_requests(pool: int, arguments: argparse.Namespace) -> int:
    """Most requests of the filling length that the reported pool holds to their end."""
    count = pool // arguments.fill
    while (
        count > 1
        and count * (arguments.fill + new_tokens(count, arguments.fill, arguments.steps, arguments.chunk)) > pool
    ):
        count -= 1
    return min(count, MAX_REQUESTS)


def run_batch(
    llm: Any, count: int, length: int, num_steps: int, chunk: int, is_profiled: bool = False
) -> dict[str, Any]:
    """Step the engine through the prompts of a batch, then through decode steps of all its requests."""
    import torch
    from vllm import SamplingParams

    engine, generator = llm.llm_engine, torch.Generator().manual_seed(0)
    scheduler = engine.engine_core.engine_core.scheduler
    max_tokens = new_tokens(count, length, num_steps, chunk)
    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i in range(count):
        prompt = torch.randint(1000, 100000, (length,), generator=generator).tolist()
        engine.add_request(f"{count}x{length}-{num_steps}-{i}", {"prompt_token_ids": prompt}, parameters)
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
    kinds = profile_steps(engine) if is_profiled else None
    preemptions = sum(request.num_preemptions for request in scheduler.requests.values())
    engine.abort_request(list(started))
    while engine.has_unfinished_requests():
        engine.step()
    quartiles = statistics.quantiles(steps, n=4)
    result: dict[str, Any] = {
        "decode_step_ms": round(statistics.median(steps) * 1e3, 3),
        "decode_step_q1_ms": round(quartiles[0] * 1e3, 3),
        "decode_step_q3_ms": round(quartiles[2] * 1e3, 3),
        "prefill_tokens_per_s": round(count * length / first_tokens, 1),
        "preemptions": preemptions,
    }
    return result if kinds is None else result | {"gpu_ms_by_kind": kinds}


def profile_steps(engine: Any) -> dict[str, float]:
    """GPU milliseconds of a decode step by kind of kernel."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, parts in KERNEL_KINDS.items() if any(part in name for part in parts)), "other")
        totals[kind] = totals.get(kind, 0.0) + event.device_time_total / PROFILED_STEPS / 1e3
        if kind != "gemm":
            key = f"kernel {event.key[:60]}"
            totals[key] = totals.get(key, 0.0) + event.device_time_total / PROFILED_STEPS / 1e3
    return {kind: round(total, 4) for kind, total in totals.items()}


def write_random_artifact(model: Path, directory: Path, num_layers: int) -> None:
    """An artifact of the model's shape: orthogonal transforms, Gaussian centroids."""
    import torch

    from vllm_novakv import artifact
    from vllm_novakv.codec.codebook import DEFAULT_DTYPE, snap
    from vllm_novakv.codec.quantizer import LayerCodec
    from vllm_novakv.fingerprint import fingerprint_model

    heads, size = QWEN3_8B["num_key_value_heads"], QWEN3_8B["head_dim"]
    source = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(heads, size, size, generator=source, dtype=torch.float64)).Q.float()
    centroids = snap(torch.randn(heads, size // 4, 256, 4, generator=source), DEFAULT_DTYPE)
    record = artifact.CalibrationRecord(
        source="none: random",
        num_tokens=1,
        seq_len=QWEN3_8B["max_position_embeddings"],
        seed=0,
        vllm_version="0",
        created="1970-01-01T00:00:00+00:00",
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
        codebook_dtype=DEFAULT_DTYPE,
        calibration=record,
        figures=figures,
    )
    artifact.save(fitted, directory)


if __name__ == "__main__":
    main()
