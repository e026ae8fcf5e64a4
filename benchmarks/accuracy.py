"""Accuracy of the 2-bit cache against vLLM's own caches, all measured in this run on the same tokens.

Perplexity of a text in windows, and retrieval of needles hidden in it:

    python benchmarks/accuracy.py --model MODEL --text essays.txt --lengths 4096

writes a record into benchmarks/records/ and prints its figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_novakv.evaluation.needle import NeedleCase, NeedleResult, build_needle_cases, measure_needles
from vllm_novakv.evaluation.perplexity import PerplexityResult, measure_perplexity, split_windows
from vllm_novakv.evaluation.record import write_record
from vllm_novakv.evaluation.statistics import paired_perplexity_ratio

HERE = Path(__file__).resolve().parent
MAX_ANSWER_TOKENS = 24
BASELINE, CANDIDATE, FP8 = "stock", "novakv", "fp8"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model directory or hub name")
    parser.add_argument("--text", type=Path, required=True, help="plain text for windows and haystacks (UTF-8)")
    parser.add_argument("--artifact", type=Path, help="artifact directory; left out: the one in the user's cache")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096], help="needle prompt lengths in tokens")
    parser.add_argument("--num-needles", type=int, default=20, help="needles per length")
    parser.add_argument("--window-tokens", type=int, default=2048, help="perplexity window in tokens")
    parser.add_argument("--num-windows", type=int, default=16, help="windows, spread evenly over the text")
    parser.add_argument("--sink-tokens", type=int, default=64, help="exact tokens at the start")
    parser.add_argument("--recent-tokens", type=int, default=256, help="exact window of a generated token")
    parser.add_argument("--prompt-recent-tokens", type=int, default=1024, help="exact window of a prompt token")
    parser.add_argument("--dtype", default="auto", help="model type, as for vllm serve")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens per prefill chunk")
    parser.add_argument("--cache-gib", type=float, default=1.0, help="size of the KV cache in GiB")
    parser.add_argument("--seed", type=int, default=0, help="of the needles")
    parser.add_argument("--fp8", action="store_true", help="measure vLLM's FP8 cache too")
    parser.add_argument("--jobs", type=int, default=1, help="engines that run side by side on one GPU")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--name", help="name of the record; default: accuracy-<model>")
    parser.add_argument("--records", type=Path, default=HERE / "records", help="folder for the record")
    return parser.parse_args()


def engine_settings(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Arguments of the offline engine for one cache; the engines differ in the cache alone."""
    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": max([options.window_tokens, *options.lengths]) + MAX_ANSWER_TOKENS,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": int(options.cache_gib * 2**30),
        "seed": 0,
    }
    if options.jobs > 1:
        settings["gpu_memory_utilization"] = 0.8 / options.jobs
    if cache == FP8:
        settings["kv_cache_dtype"] = "fp8"
    if cache == CANDIDATE:
        names = ("sink_tokens", "recent_tokens", "prompt_recent_tokens")
        novakv: dict[str, Any] = {name: getattr(options, name) for name in names}
        if options.artifact is not None:
            novakv["artifact"] = str(options.artifact.resolve())
        settings |= {"attention_backend": "NOVAKV", "additional_config": {"novakv": novakv}}
    return settings


def run_engine(settings: dict[str, Any], windows: list[list[int]], prompts: list[list[int]]) -> dict[str, Any]:
    """Answer of `vllm_worker.py`, run in a process of its own, to one job.

    Raises:
        subprocess.CalledProcessError: the engine failed; its output has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        job.write_text(
            json.dumps(
                {"engine": settings, "windows": windows, "prompts": prompts, "max_answer_tokens": MAX_ANSWER_TOKENS}
            )
        )
        subprocess.run([sys.executable, str(HERE / "vllm_worker.py"), str(job), str(answer)], check=True)
        return json.loads(answer.read_text())


def needle_figures(answer: dict[str, Any], cases: dict[int, list[NeedleCase]]) -> dict[str, Any]:
    """Found needles per length, from the answers that follow each other length by length."""
    figures, position = {}, 0
    for length, members in cases.items():
        replies = answer["answers"][position : position + len(members)]
        position += len(members)
        result: NeedleResult = measure_needles(lambda _, replies=replies: replies, members)
        figures[str(length)] = {
            "found": result.num_found,
            "asked": len(members),
            "rate_interval": [result.rate.low, result.rate.high],
            "is_found": list(result.is_found),
            "answers": list(result.answers),
        }
    return figures


def artifact_origin(options: argparse.Namespace) -> dict[str, Any]:
    """What the artifact of this run was fitted on."""
    from vllm_novakv.artifact import load
    from vllm_novakv.fingerprint import default_artifact_dir, fingerprint_model, resolve_model_dir

    directory = options.artifact or default_artifact_dir(fingerprint_model(resolve_model_dir(options.model), None))
    manifest = load(directory).manifest
    calibration = manifest.calibration.model_dump(mode="json")
    calibration["source"] = Path(calibration["source"]).name
    return {
        "calibration": calibration,
        "group_size": manifest.group_size,
        "num_centroids": manifest.num_centroids,
        "codebook_dtype": manifest.codebook_dtype,
        "tensors_sha256": manifest.tensors_sha256,
    }


def main() -> None:
    options = parse_arguments()
    origin = artifact_origin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text()

    def tokenize(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    def render_chat(message: str) -> list[int]:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=True
        )["input_ids"]

    windows = split_windows(tokenize(text), options.window_tokens, options.num_windows)
    cases = {
        length: build_needle_cases(text, tokenize, render_chat, length, options.num_needles, options.seed)
        for length in options.lengths
    }
    prompts = [list(case.prompt_token_ids) for members in cases.values() for case in members]

    perplexities: dict[str, PerplexityResult] = {}
    results: dict[str, Any] = {}
    caches = [BASELINE, CANDIDATE, *([FP8] if options.fp8 else [])]
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = pool.map(lambda cache: run_engine(engine_settings(options, cache), windows, prompts), caches)
        answer_of = dict(zip(caches, answers, strict=True))
    for cache, answer in answer_of.items():
        if (cache == CANDIDATE) != ("NOVAKV" in answer["backends"]):
            raise RuntimeError(f"the {cache} engine ran on {answer['backends']}; the comparison would be meaningless")
        perplexities[cache] = measure_perplexity(lambda _, answer=answer: answer["window_logprobs"], windows)
        results[cache] = {
            "perplexity": perplexities[cache].perplexity,
            "window_nll": list(perplexities[cache].window_nll),
            "needles": needle_figures(answer, cases),
            "backends": answer["backends"],
            "num_cache_blocks": answer["num_cache_blocks"],
            "perplexity_seconds": answer["perplexity_seconds"],
            "needle_seconds": answer["generate_seconds"],
        }

    baseline, candidate = perplexities[BASELINE], perplexities[CANDIDATE]
    ratio = paired_perplexity_ratio(baseline.window_nll, candidate.window_nll, baseline.window_tokens)
    results["perplexity_ratio"] = {"estimate": ratio.estimate, "interval": [ratio.low, ratio.high]}
    settings = {
        "model": Path(options.model).name,
        "text": options.text.name,
        "window_tokens": options.window_tokens,
        "num_windows": len(windows),
        "needle_lengths": options.lengths,
        "sink_tokens": options.sink_tokens,
        "recent_tokens": options.recent_tokens,
        "prompt_recent_tokens": options.prompt_recent_tokens,
        "dtype": options.dtype,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "seed": options.seed,
        "artifact": origin,
    }
    name = options.name or f"accuracy-{Path(options.model).name.lower()}"
    path = write_record(options.records, name, settings, results, commit=options.commit)

    change = 100 * (ratio.estimate - 1)
    low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
    print("perplexity ", *(f" {cache} {perplexities[cache].perplexity:.3f}" for cache in caches), end="")
    print(f"  ({CANDIDATE} {change:+.2f} %, 95 % interval {low:+.2f}..{high:+.2f} %)")
    for length in cases:
        found = {cache: results[cache]["needles"][str(length)]["found"] for cache in caches}
        print(f"needle {length:>6}", *(f" {cache} {count}/{options.num_needles}" for cache, count in found.items()))
    print(f"record      {path}")


if __name__ == "__main__":
    main()
