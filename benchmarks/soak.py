#!/usr/bin/env python3
"""Thousands of mixed requests in a full pool: does each get the answer that it gets alone, and does a block leak?

    python benchmarks/soak.py --model MODEL --text essays.txt --requests 2000

Requests have log-uniform prompt lengths, cut from a text; two in five begin with one of some shared prefixes, one in
twenty is aborted. They go through an engine whose pool is too small for them, so that it is full all the time, prefixes
are found and evicted, and requests are preempted. Each request then runs alone, in an engine without prefix cache.

Rule of ties: temperature 0; let t be the first place where two answers differ. It is a tie if the token of the mixed
run has, in the run alone, a logit within --tie of the best one; the answers prove nothing from there on. Any other
difference is a mismatch, and the command fails. The record lists the gap of every difference. vLLM's own cache
(--caches bf16) goes through the same, which shows how many ties the model's own rounding causes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.record import write_record

CACHES = ("novakv", "bf16")
SHARED_PREFIXES = 24
SHARE_OF_PREFIXED, SHARE_OF_ABORTED = 0.4, 0.05
TOP_LOGITS = 20


@dataclass(frozen=True)
class Request:
    """One request of the workload.

    Args:
        prompt: token ids.
        max_tokens: tokens to generate.
        abort_after: engine steps from its arrival to its abortion; None to let it finish.
    """

    prompt: list[int]
    max_tokens: int
    abort_after: int | None


def build_workload(tokens: list[int], options: argparse.Namespace) -> list[Request]:
    """The same requests for the same text and options.

    Args:
        tokens: of the text.
        options: number, lengths and seed.
    """
    source = random.Random(options.seed)

    def length(longest: int) -> int:
        return round(math.exp(source.uniform(math.log(options.min_len), math.log(longest))))

    def cut(count: int) -> list[int]:
        start = source.randrange(len(tokens) - count)
        return tokens[start : start + count]

    prefixes = [cut(length(options.max_len // 2)) for _ in range(SHARED_PREFIXES)]
    requests = []
    for _ in range(options.requests):
        count = length(options.max_len)
        prompt = cut(count)
        if source.random() < SHARE_OF_PREFIXED:
            prompt = (source.choice(prefixes) + prompt)[: max(count, options.min_len)]
        is_aborted = source.random() < SHARE_OF_ABORTED
        abort_after = source.randint(1, 20) if is_aborted else None
        requests.append(Request(prompt, source.randint(1, options.max_new_tokens), abort_after))
    return requests


def start_engine(options: argparse.Namespace, cache: str, is_mixed: bool) -> Any:
    """An engine for the mixed run, or for one request at a time."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    settings: dict[str, Any] = {}
    if cache == "novakv":
        from vllm_novakv.plugin import register

        register()
        novakv = {"artifact": str(options.artifact.resolve())} if options.artifact else {}
        settings = {"attention_backend": "NOVAKV", "additional_config": {"novakv": novakv}}
    gib = options.pool_gib[CACHES.index(cache)] if is_mixed else options.alone_gib
    return LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=options.max_len + options.max_new_tokens,
        max_num_seqs=options.max_requests if is_mixed else 1,
        max_num_batched_tokens=options.chunk,
        enable_prefix_caching=is_mixed,
        kv_cache_memory_bytes=int(gib * 2**30),
        gpu_memory_utilization=0.1,
        logprobs_mode="raw_logits",
        max_logprobs=TOP_LOGITS,
        disable_log_stats=True,
        enforce_eager=options.eager,
        seed=0,
        **settings,
    )


def parameters(request: Request, num_logits: int) -> Any:
    """Greedy, to the end, with the best logits."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, logprobs=num_logits
    )


def answer_of(output: Any) -> dict[str, Any]:
    """Tokens of a finished request and the best logits of each place."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logits": [{str(token): entry.logprob for token, entry in place.items()} for place in completion.logprobs],
    }


def run_mixed(llm: Any, requests: list[Request], outstanding: int) -> dict[str, Any]:
    """Keep the engine full until all requests have ended.

    Args:
        llm: the engine.
        requests: in the order of their arrival.
        outstanding: requests in the engine at the same time, those that wait included.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free_at_start = pool.get_num_free_blocks()
    answers: dict[str, Any] = {}
    arrival: dict[str, int] = {}
    preempted: dict[str, int] = {}
    cached_tokens = num_aborted = step = least_free = 0
    least_free = free_at_start
    waiting = list(enumerate(requests))[::-1]
    while waiting or engine.has_unfinished_requests():
        while waiting and len(arrival) < outstanding:
            number, request = waiting.pop()
            engine.add_request(str(number), {"prompt_token_ids": request.prompt}, parameters(request, 1))
            arrival[str(number)] = step
        late = [
            name
            for name, began in arrival.items()
            if (limit := requests[int(name)].abort_after) is not None and step - began >= limit
        ]
        if late:
            engine.abort_request(late)
            num_aborted += len(late)
            for name in late:
                del arrival[name]
        for output in engine.step():
            if output.finished and output.request_id in arrival:
                answers[output.request_id] = answer_of(output)
                cached_tokens += output.num_cached_tokens or 0
                del arrival[output.request_id]
        for request in scheduler.requests.values():
            if request.num_preemptions:
                preempted[request.request_id] = request.num_preemptions
        least_free = min(least_free, pool.get_num_free_blocks())
        step += 1
    for _ in range(4):  # steps that were already on their way
        engine.step()
    return {
        "answers": answers,
        "steps": step,
        "aborted": num_aborted,
        "preemptions": sum(preempted.values()),
        "preempted_requests": len(preempted),
        "cached_prompt_tokens": cached_tokens,
        "pool_tokens": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "blocks": pool.num_gpu_blocks,
        "least_free_blocks": least_free,
        "free_blocks_at_start": free_at_start,
        "free_blocks_at_end": pool.get_num_free_blocks(),
    }


def run_alone(llm: Any, requests: dict[str, Request]) -> dict[str, Any]:
    """One request after the other."""
    answers = {}
    for name, request in requests.items():
        prompt = {"prompt_token_ids": request.prompt}
        answers[name] = answer_of(llm.generate(prompt, parameters(request, TOP_LOGITS), use_tqdm=False)[0])
    return {"answers": answers}


def compare(mixed: dict[str, Any], alone: dict[str, Any], lengths: dict[str, int], tie: float) -> dict[str, Any]:
    """Count equal answers, ties and mismatches; measure how far the same token's logit moves between the runs.

    Args:
        mixed, alone: answers by request.
        lengths: tokens of each request's prompt.
        tie: largest distance to the best logit that is a tie.
    """
    differences, moved, equal = [], [], 0
    by_length: dict[int, list[float]] = defaultdict(list)
    for name, answer in mixed.items():
        reference = alone[name]
        places = zip(answer["tokens"], reference["tokens"], strict=True)
        first = next((place for place, (token, other) in enumerate(places) if token != other), None)
        shifts = []
        for place in range(len(answer["tokens"]) if first is None else first):
            token = str(answer["tokens"][place])
            shifts.append(abs(answer["logits"][place][token] - reference["logits"][place][token]))
        moved += shifts
        by_length[lengths[name].bit_length() - 1] += shifts
        if first is None:
            equal += 1
            continue
        logits = reference["logits"][first]
        best, other = logits[str(reference["tokens"][first])], logits.get(str(answer["tokens"][first]))
        gap = None if other is None else round(best - other, 6)
        differences.append({"request": int(name), "prompt_tokens": lengths[name], "place": first, "gap": gap})
    ties = sum(difference["gap"] is not None and difference["gap"] <= tie for difference in differences)
    return {
        "compared": len(mixed),
        "equal": equal,
        "ties": ties,
        "mismatches": len(differences) - ties,
        "differences": sorted(
            differences, key=lambda difference: -math.inf if difference["gap"] is None else -difference["gap"]
        ),
        "logit_shift": spread(moved),
        "logit_shift_by_prompt_tokens": {f"{1 << k}+": spread(by_length[k]) for k in sorted(by_length) if by_length[k]},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, upper quantiles and maximum."""
    values = sorted(values)
    places = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: round(values[min(int(len(values) * place), len(values) - 1)], 6) for name, place in places.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model directory or hub name")
    parser.add_argument("--text", type=Path, required=True, help="plain text that prompts are cut from (UTF-8)")
    parser.add_argument("--artifact", type=Path, help="artifact directory; left out: the one in the user's cache")
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--min-len", type=int, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--max-len", type=int, default=30_000, help="tokens of the longest prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens of the longest answer")
    parser.add_argument("--outstanding", type=int, default=200, help="requests in the engine, waiting ones included")
    parser.add_argument("--max-requests", type=int, default=128, help="running requests")
    parser.add_argument("--pool-gib", type=float, nargs=2, default=[0.5, 2.0], help="pools of novakv and bf16, GiB")
    parser.add_argument("--alone-gib", type=float, default=2.0, help="pool of the runs alone, GiB")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--dtype", default="auto", help="model type, as for vllm serve")
    parser.add_argument("--tie", type=float, default=0.25, help="logits this close are a tie")
    parser.add_argument("--shards", type=int, default=2, help="processes that share the runs alone")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="commit of the code, where it is no git checkout")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_part(options: argparse.Namespace) -> None:
    """One process: the mixed run of a cache, or a shard of its runs alone."""
    from transformers import AutoTokenizer

    cache, part, path = options.run
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    requests = build_workload(tokenizer.encode(options.text.read_text(), add_special_tokens=False), options)
    llm = start_engine(options, cache, part == "mixed")
    ready(Path(path)).touch()
    started = time.perf_counter()
    if part == "mixed":
        result = run_mixed(llm, requests, options.outstanding)
    else:
        finished = {str(n): request for n, request in enumerate(requests) if request.abort_after is None}
        # strided, so that shards take alike times
        result = run_alone(llm, dict(list(finished.items())[int(part) :: options.shards]))
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["prompt_tokens"] = {str(n): len(request.prompt) for n, request in enumerate(requests)}
    Path(path).write_text(json.dumps(result))


def ready(path: Path) -> Path:
    """The file that says that the process which will write to a path has its engine."""
    return path.with_suffix(".ready")


def main() -> int:
    options = parse_arguments()
    if options.run:
        run_part(options)
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for cache in options.caches:
            for part in ("mixed", *map(str, range(options.shards))):
                path = Path(folder) / f"{cache}-{part}.json"
                command = [sys.executable, __file__, *sys.argv[1:], "--run", cache, part, str(path)]
                process = subprocess.Popen(command)
                processes[cache, part] = process, path
                # the others find what the first has compiled
                while part == "mixed" and process.poll() is None and not ready(path).exists():
                    time.sleep(1)
        parts: dict[Any, Any] = {}
        for key, (process, path) in processes.items():
            if process.wait() != 0:
                print(f"{key} failed", file=sys.stderr)
            parts[key] = json.loads(path.read_text()) if path.exists() else None
    is_good = True
    for cache in options.caches:
        of_cache = [parts[cache, part] for part in ("mixed", *map(str, range(options.shards)))]
        if None in of_cache:
            results[cache], is_good = {"error": "a process failed"}, False
            continue
        mixed, *shards = of_cache
        alone = {name: answer for shard in shards for name, answer in shard["answers"].items()}
        # a request that ended before its abortion has an answer, but no run alone
        answers = {name: answer for name, answer in mixed.pop("answers").items() if name in alone}
        lengths = mixed.pop("prompt_tokens")
        results[cache] = (
            mixed | compare(answers, alone, lengths, options.tie) | {"never_answered": len(alone) - len(answers)}
        )
        is_good &= results[cache]["mismatches"] == results[cache]["never_answered"] == 0
        is_good &= mixed["free_blocks_at_start"] == mixed["free_blocks_at_end"]
        print(cache, json.dumps({k: v for k, v in results[cache].items() if k != "differences"}))
    if options.out:
        names = (
            "requests", "min_len", "max_len", "max_new_tokens", "outstanding", "max_requests", "pool_gib", "chunk",
            "dtype", "tie", "seed",
        )  # fmt: skip
        settings = {"model": Path(options.model).name, "text": options.text.name}
        settings |= {name: getattr(options, name) for name in names}
        print(write_record(options.out, f"soak-{settings['model'].lower()}", settings, results, commit=options.commit))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
