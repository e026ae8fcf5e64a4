"""What a request log would have gained from a prefix cache: sharing, hit rates by policy and size, prefixes to pin.

1. read the log, count broken lines
2. unlimited cache: the share of the prompts that repeats an earlier prompt's beginning
3. replay under every policy at every size, and under the optimum
4. find the prefixes that LRU computes again so often that pinning them gains more than the room they take
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_novakv.prefix.classic_policies import BeladyPolicy, LRUPolicy
from vllm_novakv.prefix.policy import PrefillCost, make_policy, policy_names
from vllm_novakv.prefix.replay import replay
from vllm_novakv.prefix.traces import Log, LoggedRequest, read_log

MAX_PINS = 5
OPTIMUM = "optimum"
"""Name of the policy that knows the future, in results."""


@dataclass(frozen=True)
class Pin:
    """A prefix worth keeping.

    Attributes:
        num_blocks: its blocks.
        num_tokens: its tokens.
        num_requests: requests that begin with it.
        recomputed_blocks: blocks of it that LRU evicted and computed again.
        last_key: key of its last block.
        text: its beginning, if the log has texts.
    """

    num_blocks: int
    num_tokens: int
    num_requests: int
    recomputed_blocks: int
    last_key: int
    text: str


@dataclass(frozen=True)
class PinAdvice:
    """Prefixes to pin in a cache of one size: chosen in the first half of the log, checked by a replay of the second.

    Attributes:
        capacity_blocks: size of the cache.
        pins: those recommended, the most useful first; empty if they do not raise LRU's hits.
        hit_rate_without: LRU's token hit rate in the second half.
        hit_rate_with: the same with the pins; equal if there are none.
    """

    capacity_blocks: int
    pins: tuple[Pin, ...]
    hit_rate_without: float
    hit_rate_with: float


@dataclass(frozen=True)
class Analysis:
    """Everything that is known about a log.

    Attributes:
        num_requests, num_broken, num_without_time: lines read, left out, and read without a time.
        problems: why the first broken lines were left out.
        duration_s: from the first to the last arrival.
        num_tokens: tokens of all prompts.
        longest_blocks: blocks of the longest prompt.
        block_tokens: tokens per block.
        num_distinct_blocks: blocks that an unlimited cache would hold.
        sharing: token hit rate of an unlimited cache.
        is_estimated: whether token counts are estimates.
        characters_per_token: as the log's own counts have it; None if it has none.
        token_hit_rate: by capacity in blocks, then by policy; `optimum` knows the future. Prompts that do not fit are
            left out.
        advice: what to pin at one of the capacities; None if there is nothing to replay.
    """

    num_requests: int
    num_broken: int
    num_without_time: int
    problems: tuple[str, ...]
    duration_s: float
    num_tokens: int
    longest_blocks: int
    block_tokens: int
    num_distinct_blocks: int
    sharing: float
    is_estimated: bool
    characters_per_token: float | None
    token_hit_rate: dict[int, dict[str, float]]
    advice: PinAdvice | None

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return asdict(self)


def analyze_file(
    path: Path,
    capacities: Sequence[int] = (),
    block_tokens: int = 128,
    characters_per_token: float = 4.0,
    progress: Callable[[str], object] | None = None,
) -> Analysis:
    """Analyze a request log.

    Args:
        path: the log, see `traces.read_log`.
        capacities: cache sizes in blocks; none: an eighth, a quarter and half of the distinct blocks.
        block_tokens: tokens per block, for logs of texts.
        characters_per_token: for logs of texts.
        progress: called with a line of text before each long step.

    Raises:
        ValueError: no request can be read, or a number is not positive.
        OSError: the file cannot be read.
    """
    log = read_log(path, block_tokens, characters_per_token)
    if not log.requests:
        reasons = "; ".join(log.problems) or "the file is empty"
        raise ValueError(f"{path} holds no request that can be read: {reasons}")
    return analyze(log, capacities, progress)


def analyze(log: Log, capacities: Sequence[int] = (), progress: Callable[[str], object] | None = None) -> Analysis:
    """Analyze the requests of a log, at least one.

    Args:
        log: the log.
        capacities: as for `analyze_file`.
        progress: as for `analyze_file`.

    Raises:
        ValueError: the log mixes block sizes, or a capacity is not positive.
    """
    requests = log.requests
    sizes = {request.block_tokens for request in requests}
    if len(sizes) > 1:
        raise ValueError(f"the log mixes blocks of {sorted(sizes)} tokens; split it by format, or pass --block-tokens")
    if any(capacity < 1 for capacity in capacities):
        raise ValueError(f"capacities {list(capacities)} must be positive")
    block_tokens = sizes.pop()
    distinct = len({key for request in requests for key in request.keys})
    longest = max(len(request.keys) for request in requests)
    cost = PrefillCost(block_tokens=block_tokens)
    unlimited = replay(requests, LRUPolicy(), max(distinct, longest), cost)
    chosen = sorted(set(capacities)) or default_capacities(distinct, longest)
    rates: dict[int, dict[str, float]] = {}
    for capacity in chosen:
        rates[capacity] = {}
        for name in (*policy_names(), OPTIMUM):
            if progress is not None:
                progress(f"replaying {len(requests)} requests: {name} with {capacity} blocks")
            served = [request for request in requests if len(request.keys) <= capacity]
            policy = BeladyPolicy([request.keys for request in served]) if name == OPTIMUM else make_policy(name)
            rates[capacity][name] = replay(served, policy, capacity, cost).token_hit_rate
    pin_capacity = next((size for size in chosen if size >= 2 * longest), None)
    return Analysis(
        num_requests=len(requests),
        num_broken=log.num_broken,
        num_without_time=log.num_without_time,
        problems=tuple(log.problems),
        duration_s=requests[-1].arrival_s - requests[0].arrival_s,
        num_tokens=sum(request.num_tokens for request in requests),
        longest_blocks=longest,
        block_tokens=block_tokens,
        num_distinct_blocks=distinct,
        sharing=unlimited.token_hit_rate,
        is_estimated=log.is_estimated,
        characters_per_token=log.counted_characters / log.counted_tokens if log.counted_tokens else None,
        token_hit_rate=rates,
        advice=None if pin_capacity is None else advise_pins(requests, pin_capacity),
    )


def default_capacities(num_distinct_blocks: int, longest_blocks: int) -> list[int]:
    """An eighth, a quarter and half of the distinct blocks, to two digits, no less than the longest prompt twice."""
    sizes = set()
    for share in (8, 4, 2):
        size = max(num_distinct_blocks // share, 2 * longest_blocks)
        unit = 10 ** max(len(str(size)) - 2, 0)
        sizes.add(-(-size // unit) * unit)
    return sorted(sizes)


def advise_pins(requests: Sequence[LoggedRequest], capacity_blocks: int) -> PinAdvice:
    """Choose prefixes in the first half of a log, keep those that are worth their room in the second half too.

    worth of a prefix = its blocks that LRU computes again − its blocks · hits per block of the whole cache

    The second term is what the room of a pin earns without it. Prefixes are chosen greedily by worth and take at most
    a quarter of the cache.

    Args:
        requests: of the log.
        capacity_blocks: size of the cache, at least twice the longest prompt.

    Source: engineering choice; a prompt that came back often and never will again is not worth a pin.
    """
    half = len(requests) // 2
    without = _Halves(half)
    replay(requests, LRUPolicy(), capacity_blocks, PrefillCost(), without.observe)
    rates = [hits / capacity_blocks for hits in without.hit_blocks]
    paths = [
        path
        for path in _choose_paths(requests[:half], without.recomputed[0], capacity_blocks // 4, rates[0])
        if sum(without.recomputed[1][key] for key in path) > len(path) * rates[1]
    ]
    policy = LRUPolicy()
    for path in paths:
        policy.pin(path[-1], path, max_pinned_blocks=capacity_blocks // 4)
    with_pins = _Halves(half)
    replay(requests, policy, capacity_blocks, PrefillCost(), with_pins.observe)
    num_tokens = max(sum(request.num_tokens for request in requests[half:]), 1)
    before, after = (halves.hit_tokens[1] / num_tokens for halves in (without, with_pins))
    if after <= before:
        return PinAdvice(capacity_blocks, (), before, before)
    recomputed = without.recomputed[0] + without.recomputed[1]
    pins = tuple(_describe(path, requests, recomputed, without.uses) for path in paths)
    return PinAdvice(capacity_blocks, pins, before, after)


class _Halves:
    """Counts of a replay, for the first `half` requests and for the others."""

    def __init__(self, half: int) -> None:
        self.half = half
        self.num_seen = 0
        self.uses: Counter[int] = Counter()
        self.recomputed: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self.hit_blocks = [0, 0]
        self.hit_tokens = [0, 0]

    def observe(self, request: LoggedRequest, hits: int) -> None:
        part = int(self.num_seen >= self.half)
        self.recomputed[part].update(key for key in request.keys[hits:] if key in self.uses)
        self.hit_blocks[part] += hits
        self.hit_tokens[part] += min(hits * request.block_tokens, request.num_tokens)
        self.uses.update(request.keys)
        self.num_seen += 1


def _choose_paths(
    requests: Sequence[LoggedRequest], recomputed: Counter[int], max_blocks: int, hits_per_block: float
) -> list[tuple[int, ...]]:
    parent: dict[int, int | None] = {}
    for request in requests:
        parent.update(zip(request.keys, (None, *request.keys), strict=False))
    pinned: set[int] = set()
    paths: list[tuple[int, ...]] = []
    while len(paths) < MAX_PINS:
        # (gain, new blocks) of the path to each block; a parent is met before its children
        totals: dict[int | None, tuple[float, int]] = {None: (0.0, 0)}
        best, best_gain = None, 0.0
        for key, above in parent.items():
            gain, num_new = totals[above]
            if key not in pinned:
                gain, num_new = gain + recomputed[key] - hits_per_block, num_new + 1
            totals[key] = (gain, num_new)
            if gain > best_gain and len(pinned) + num_new <= max_blocks:
                best, best_gain = key, gain
        if best is None:
            break
        path: list[int] = []
        step: int | None = best
        while step is not None:
            path.append(step)
            step = parent[step]
        paths.append(tuple(reversed(path)))
        pinned.update(path)
    # a pin that begins another one is part of it
    return [path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)]


def _describe(
    path: tuple[int, ...], requests: Sequence[LoggedRequest], recomputed: Counter[int], uses: Counter[int]
) -> Pin:
    example = next(request for request in requests if request.keys[: len(path)] == path)
    return Pin(
        num_blocks=len(path),
        num_tokens=min(len(path) * example.block_tokens, example.num_tokens),
        num_requests=uses[path[-1]],
        recomputed_blocks=sum(recomputed[key] for key in path),
        last_key=path[-1],
        text=example.text,
    )


def describe_analysis(analysis: Analysis) -> str:
    """The analysis as text for a terminal."""
    tokens = "tokens (estimated)" if analysis.is_estimated else "tokens"
    lines = [
        f"requests          {analysis.num_requests:,} in {_duration(analysis.duration_s)}",
        f"broken lines      {analysis.num_broken:,}",
        *(f"                  {problem}" for problem in analysis.problems),
    ]
    if analysis.num_without_time:
        lines.append(f"without a time    {analysis.num_without_time:,}: they count as sent with the line before")
    lines += [
        f"prompts           {analysis.num_tokens:,} {tokens}, {analysis.num_tokens // analysis.num_requests:,} "
        "on average",
        f"blocks            {analysis.num_distinct_blocks:,} different ones of {analysis.block_tokens} tokens, "
        f"{analysis.longest_blocks:,} in the longest prompt",
        f"sharing available {analysis.sharing:.1%} of the prompt tokens repeat the beginning of an earlier prompt",
    ]
    if analysis.characters_per_token is not None:
        lines.append(
            f"                  the log's own counts give {analysis.characters_per_token:.2f} characters per token "
            "(--characters-per-token)"
        )
    lines += ["", "hit rate, share of the prompt tokens; the optimum knows the future:", *_table(analysis)]
    if min(analysis.token_hit_rate) < analysis.longest_blocks:
        lines.append("  prompts of more blocks than the cache has are left out of its line")
    advice = analysis.advice
    if advice is not None:
        lines += ["", f"pins for LRU with {advice.capacity_blocks:,} blocks:"]
        lines += [f"  {_pin_line(pin)}" for pin in advice.pins] or ["  none: no prefix is worth the room it would take"]
        if advice.pins:
            lines.append(
                f"  chosen in the first half; hit rate of the second half {advice.hit_rate_without:.1%} without them, "
                f"{advice.hit_rate_with:.1%} with them"
            )
    return "\n".join(lines)


def _table(analysis: Analysis) -> list[str]:
    names = (*policy_names(), OPTIMUM)
    widths = [max(len(name), 7) for name in names]
    header = "  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))
    lines = [f"  {'blocks':>10}  {'tokens':>14}  {header}"]
    for capacity, rates in analysis.token_hit_rate.items():
        cells = "  ".join(f"{rates[name]:>{width}.1%}" for name, width in zip(names, widths, strict=True))
        lines.append(f"  {capacity:>10,}  {capacity * analysis.block_tokens:>14,}  {cells}")
    return lines


def _pin_line(pin: Pin) -> str:
    name = repr(pin.text[:60]) if pin.text else f"up to block {pin.last_key}"
    return (
        f"{pin.num_tokens:,} tokens ({pin.num_blocks:,} blocks) of {pin.num_requests:,} requests, "
        f"{pin.recomputed_blocks:,} blocks computed again: {name}"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
