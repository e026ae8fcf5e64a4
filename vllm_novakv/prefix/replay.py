"""Replay requests against a block cache of a given size: what a policy would have hit, and saved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_novakv.prefix.policy import PrefillCost, RetentionPolicy
from vllm_novakv.prefix.traces import LoggedRequest


@dataclass(frozen=True)
class ReplayResult:
    """What a replay counted.

    Attributes:
        num_requests: requests replayed.
        num_blocks: blocks of all prompts, the last, partial ones included.
        hit_blocks: those that were found, as the beginning of a prompt.
        num_tokens: tokens of all prompts.
        hit_tokens: those in found blocks.
        num_skipped: requests of more blocks than the cache has; they are left out of every other figure.
        cost: of computing all blocks, see `PrefillCost`.
        saved_cost: of the blocks that were found.
    """

    num_requests: int
    num_blocks: int
    hit_blocks: int
    num_tokens: int
    hit_tokens: int
    num_skipped: int
    cost: float
    saved_cost: float

    @property
    def block_hit_rate(self) -> float:
        """hit_blocks / num_blocks."""
        return self.hit_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """hit_tokens / num_tokens."""
        return self.hit_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def saved_cost_ratio(self) -> float:
        """saved_cost / cost."""
        return self.saved_cost / self.cost if self.cost else 0.0


def replay(
    requests: Sequence[LoggedRequest],
    policy: RetentionPolicy,
    capacity_blocks: int,
    cost: PrefillCost,
    observe: Callable[[LoggedRequest, int], object] | None = None,
) -> ReplayResult:
    """Serve requests one after the other: the cached beginning of a prompt is a hit, the rest is computed and cached.

    1. count the leading blocks that are cached
    2. evict until the other blocks fit beside what is cached; the request's own blocks stay
    3. cache them

    Args:
        requests: in order of arrival.
        policy: a new one; it may hold pins, which must leave room for every prompt.
        capacity_blocks: blocks of the cache, at least 1.
        cost: for the figures only.
        observe: called after each request that was served, with the number of its blocks that were found.

    Returns:
        The counts; equal for equal arguments.

    Raises:
        ValueError: capacity_blocks is not positive, or the policy has cached blocks.
    """
    if capacity_blocks < 1 or len(policy):
        raise ValueError(f"capacity_blocks={capacity_blocks} must be positive, and the policy new")
    num_blocks = hit_blocks = num_tokens = hit_tokens = num_skipped = 0
    total_cost = saved_cost = 0.0
    for number, request in enumerate(requests):
        keys = request.keys
        if len(keys) > capacity_blocks:
            num_skipped += 1
            policy.begin(number, (), request.arrival_s)
            policy.end(number, (), request.arrival_s)
            continue
        policy.begin(number, keys, request.arrival_s)
        hits = 0
        while hits < len(keys) and keys[hits] in policy:
            hits += 1
        missing = len(policy) + len(keys) - hits - capacity_blocks
        if missing > 0 and len(policy.evict(missing, request.arrival_s)) < missing:
            raise AssertionError("a policy kept blocks that no request uses")
        policy.end(number, keys, request.arrival_s, request.output_tokens)
        costs = [cost.of_block(index) for index in range(len(keys))]
        num_blocks += len(keys)
        hit_blocks += hits
        num_tokens += request.num_tokens
        hit_tokens += min(hits * request.block_tokens, request.num_tokens)
        total_cost += sum(costs)
        saved_cost += sum(costs[:hits])
        if observe is not None:
            observe(request, hits)
    served = len(requests) - num_skipped
    return ReplayResult(served, num_blocks, hit_blocks, num_tokens, hit_tokens, num_skipped, total_cost, saved_cost)
