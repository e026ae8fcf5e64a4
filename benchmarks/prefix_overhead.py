"""What the prefix index costs the scheduler: processor time per step and per request; no model runs.

    python benchmarks/prefix_overhead.py [--requests 64] [--prompt-tokens 8000] [--output-tokens 400]

Requests are served through vLLM's KVCacheManager and a block pool that is full of cached blocks. "manager" is what
vLLM's cache manager takes in a run without the index, "index" what the index itself takes in a run with it. Divide the
latter by the time of a decode step of the model in question.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine_simulation import Engine, Setup
from indexed_engine import IndexedEngine

from vllm_novakv.evaluation.record import write_record


class Timed:
    """Processor time of some methods, summed up."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def wrap(self, owner: object, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: object, **kwargs: object) -> object:
            if self._depth:
                return method(*args, **kwargs)
            self._depth = 1
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.total_s += time.thread_time() - start
                self._depth = 0

        setattr(owner, name, timed)


def serve(engine: Engine, arguments: argparse.Namespace) -> dict[str, float]:
    """Keep `requests` requests running until `total` have ended; returns milliseconds of processor time."""
    # what an earlier run left is not collected at this one's expense; vLLM too sets its start-up heap aside
    gc.collect()
    gc.freeze()
    rng = random.Random(0)
    engine.worker.execute = lambda step: None  # type: ignore[method-assign]
    timed = Timed()
    hook = getattr(engine, "hook", None)
    if hook is None:
        for name in ("get_computed_blocks", "allocate_slots", "free", "cache_blocks"):
            timed.wrap(engine.manager, name)
    else:
        for name in ("arrived", "admitted", "ended"):
            timed.wrap(hook, name)
        # the queue's only other work is to count blocks without a hash
        timed.wrap(engine.pool.free_block_queue, "_choose")
    shared = [list(rng.randbytes(arguments.prompt_tokens // 2)) for _ in range(16)]

    def add() -> None:
        length = arguments.prompt_tokens // 2 + rng.randint(0, arguments.prompt_tokens // 4)
        output = rng.randint(arguments.output_tokens // 2, arguments.output_tokens)
        engine.add((rng.choice(shared) if rng.random() < 0.5 else []) + list(rng.randbytes(length)), output)

    for _ in range(arguments.requests):
        add()
    steps: list[float] = []
    decode_steps: list[float] = []
    num_done = 0
    while len(engine.finished) < arguments.total:
        for _ in range(len(engine.finished) - num_done):
            add()
        num_done = len(engine.finished)
        before, num_chunks = timed.total_s, engine.counts["chunks"]
        engine.step()
        # the second half: by then the pool is full
        if num_done > arguments.total // 2:
            steps.append(1e3 * (timed.total_s - before))
            if engine.counts["chunks"] == num_chunks:
                decode_steps.append(steps[-1])
    return {
        "decode_step_median_ms": round(statistics.median(decode_steps), 4),
        "decode_step_mean_ms": round(statistics.fmean(decode_steps), 4),
        "decode_steps": len(decode_steps),
        "step_mean_ms": round(statistics.fmean(steps), 4),
        "steps": len(steps),
        "per_request_ms": round(1e3 * timed.total_s / len(engine.finished), 4),
        "hit_tokens": engine.counts["hit_tokens"],
    }


def main() -> None:
    """Serve, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="running at the same time")
    parser.add_argument("--total", type=int, default=400, help="requests until the end")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=20_000, help="of the pool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policy", default="expected-reuse")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records", help="folder for the record")
    arguments = parser.parse_args()
    setup = Setup(
        arguments.blocks,
        max_model_len=20_000,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_steps_in_flight=2,
        prompt_recent_tokens=1024,
    )
    results: dict[str, object] = {}
    # in turns, so that a slow moment of the machine hits both
    for number in range(arguments.repeats):
        results[f"manager {number}"] = serve(Engine(setup), arguments)
        results[f"index {number}"] = serve(IndexedEngine(setup, arguments.policy, seconds=time.monotonic), arguments)
    print(json.dumps(results, indent=1))
    settings = {name: value for name, value in vars(arguments).items() if name != "records"}
    print(write_record(arguments.records, "prefix-overhead", settings, results))


if __name__ == "__main__":
    main()
