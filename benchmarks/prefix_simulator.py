"""Replay request traces against block caches: hit rates of the retention policies beside LRU and the optimum.

Beside the policies, some variants show what the learning policy gains from what, and what limits it:
- age-only, 4 classes, 16 classes: other numbers of classes by odds of return than 8; one leaves only the age;
- told-whether: the same policy, told for each prompt whether its blocks will ever be used again, but not when. It looks
  ahead, so it is no policy; what it misses, no forecast of who comes back can give.

    python benchmarks/prefix_simulator.py TRACE.jsonl [TRACE.jsonl ...]
"""

import argparse
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.evaluation.record import write_record
from vllm_novakv.prefix.classic_policies import BeladyPolicy
from vllm_novakv.prefix.policy import CachedBlock, PrefillCost, RetentionPolicy, make_policy, policy_names
from vllm_novakv.prefix.replay import ReplayResult, replay
from vllm_novakv.prefix.retention import NUM_FEATURES, Arrival, ExpectedReusePolicy
from vllm_novakv.prefix.return_model import ReturnModel
from vllm_novakv.prefix.traces import LoggedRequest, read_log

BREAK_EVEN_TOKENS = 28_000.0


class ToldWhetherPolicy(ExpectedReusePolicy):
    """Learns from the truth instead of from features: does a later request continue this one?"""

    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        super().__init__(model=ReturnModel(NUM_FEATURES, num_classes=2))
        self._returns = continued_later(requests)
        self._position = 0

    def _used(self, request_id: Hashable, path: Sequence[CachedBlock], now_s: float, output_tokens: int) -> None:
        super()._used(request_id, path, now_s, output_tokens)
        self._position += 1

    def _describe(self, arrival: Arrival, path: Sequence[CachedBlock], output_tokens: int) -> NDArray[np.float64]:
        features = np.zeros(NUM_FEATURES)
        features[0] = float(self._returns[self._position])
        return features


def continued_later(requests: Sequence[LoggedRequest]) -> list[bool]:
    """Whether a later request has more than half of each request's blocks."""
    returns = [False] * len(requests)
    owner: dict[int, int] = {}
    for number, request in enumerate(requests):
        known = 0
        while known < len(request.keys) and request.keys[known] in owner:
            known += 1
        if known:
            earlier = owner[request.keys[known - 1]]
            returns[earlier] |= 2 * known > len(requests[earlier].keys)
        owner.update((key, number) for key in request.keys)
    return returns


def policies(requests: Sequence[LoggedRequest]) -> dict[str, Callable[[], RetentionPolicy]]:
    """Everything that is replayed, by name."""
    cost = PrefillCost(BREAK_EVEN_TOKENS, requests[0].block_tokens)
    makers: dict[str, Callable[[], RetentionPolicy]] = {
        name: lambda name=name: make_policy(name) for name in policy_names()
    }
    makers["gdsf, cost by depth"] = lambda: make_policy("gdsf", cost)
    makers["expected-reuse, cost by depth"] = lambda: make_policy("expected-reuse", cost)
    for name, num_classes in (("age-only", 1), ("4 classes", 4), ("16 classes", 16)):
        makers[name] = lambda num_classes=num_classes: ExpectedReusePolicy(
            model=ReturnModel(NUM_FEATURES, num_classes=num_classes)
        )
    makers["told-whether (looks ahead)"] = lambda: ToldWhetherPolicy(requests)
    makers["optimum (looks ahead)"] = lambda: BeladyPolicy([request.keys for request in requests])
    return makers


def summarize_result(result: ReplayResult) -> dict[str, Any]:
    """Figures of one replay, as JSON values."""
    return {
        "block_hit_rate": round(result.block_hit_rate, 5),
        "token_hit_rate": round(result.token_hit_rate, 5),
        "saved_cost_ratio": round(result.saved_cost_ratio, 5),
        "hit_blocks": result.hit_blocks,
        "num_skipped": result.num_skipped,
    }


def replay_trace(requests: Sequence[LoggedRequest], capacities: Sequence[int]) -> dict[str, Any]:
    """All policies at all capacities, with the share of the gap between LRU and the optimum that each one closes."""
    cost = PrefillCost(BREAK_EVEN_TOKENS, requests[0].block_tokens)
    results: dict[str, Any] = {
        "num_requests": len(requests),
        "num_blocks": sum(len(request.keys) for request in requests),
        "num_distinct_blocks": len({key for request in requests for key in request.keys}),
    }
    for capacity in capacities:
        measured = {
            name: summarize_result(replay(requests, make(), capacity, cost))
            for name, make in policies(requests).items()
        }
        low = measured["lru"]["hit_blocks"]
        gap = measured["optimum (looks ahead)"]["hit_blocks"] - low
        for name, figures in measured.items():
            figures["gap_closed"] = round((figures["hit_blocks"] - low) / gap, 4) if gap else 0.0
            print(
                f"  {capacity:>8} blocks  {name:<30} hits {figures['block_hit_rate']:7.2%} of blocks, "
                f"saves {figures['saved_cost_ratio']:7.2%} of the computation, gap closed {figures['gap_closed']:7.1%}",
                flush=True,
            )
        results[str(capacity)] = measured
    return results


def main() -> int:
    """Replay every trace and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="request log, see novakv prefix analyze")
    parser.add_argument(
        "--capacities", type=int, nargs="+", default=[1_000, 5_000, 20_000], help="blocks (default: 1000 5000 20000)"
    )
    parser.add_argument("--max-requests", type=int, help="replay the first requests only")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records", help="folder for the record")
    options = parser.parse_args()
    results = {}
    for path in options.traces:
        log = read_log(path)
        requests = log.requests[: options.max_requests]
        if not requests:
            raise SystemExit(f"{path} holds no request that can be read: {'; '.join(log.problems)}")
        print(f"{path.name}: {len(requests)} requests, {log.num_broken} broken lines")
        results[path.name] = replay_trace(requests, options.capacities) | {"num_broken_lines": log.num_broken}
    settings = {
        "capacities_blocks": options.capacities,
        "max_requests": options.max_requests,
        "break_even_tokens": BREAK_EVEN_TOKENS,
        "partial_last_blocks": "counted as blocks",
    }
    print(write_record(options.records, "prefix-simulator", settings, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
