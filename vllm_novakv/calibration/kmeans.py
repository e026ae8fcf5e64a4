"""Batched k-means for the key codebooks: many small independent problems (one per layer, KV head and group).

Lloyd's iterations with random initial centroids; a cluster that is left empty moves to the point that is served worst.
The nearest centroid is argmax x·c − |c|²/2, one matrix product per block of points. Sums over a cluster are integers
(fixed point), so they do not depend on the order of additions and a seed gives the same bytes on every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_ITERATIONS = 25

# Points are compared with all centroids in blocks whose scores stay in a core's second-level cache (CPU) or in a
# bounded buffer (GPU).
_CPU_BLOCK_POINTS = 1024
_GPU_BLOCK_SCORES = 1 << 28

# Fixed point with 32 fractional bits: coordinates of normalised samples are at most √head_size = 16, so the sum of a
# million points stays below 2^56.
_FIXED_POINT_SCALE = float(1 << 32)


@dataclass(frozen=True)
class KMeansResult:
    """Codebooks and how well they serve the points they were trained on.

    Attributes:
        centroids: `[num_problems, num_centroids, dim] f32`.
        distortion: mean squared distance of a point to its centroid, `[num_problems] f32`.
        history: the same before every update, `[num_iterations, num_problems] f32`.
    """

    centroids: Tensor
    distortion: Tensor
    history: Tensor


def fit_codebooks(
    samples: Tensor,
    num_centroids: int,
    seed: int,
    num_iterations: int = NUM_ITERATIONS,
    snap: Callable[[Tensor], Tensor] | None = None,
) -> KMeansResult:
    """Solve min_C Σ_j min_c ‖x_j − c‖² for every problem by Lloyd's iterations, then snap the centroids.

    1. Initial centroids: one point drawn from each of `num_centroids` equal stretches of the points.
    2. Assign every point to its nearest centroid; move each centroid to the mean of its points.
    3. Give every empty cluster one of the points that are farthest from their centroid.
    4. Repeat 2 and 3 `num_iterations` times; snap; measure the final distortion.

    Args:
        samples: points `[num_problems, num_points, dim]`, f32, coordinates of magnitude at most about 16.
        num_centroids: codebook size, at least 1 and at most `num_points`.
        seed: of the initial draw; the same seed and points give the same bytes.
        num_iterations: Lloyd updates.
        snap: maps trained centroids to representable ones (a rounding to fp8 and back); None leaves them as they are.

    Returns:
        The centroids, on the device of the samples, with their distortion after snapping.

    Raises:
        ValueError: fewer points than centroids, or a point that is not finite.

    Source: arXiv 2608.04074, section 8.3 and algorithm 3. Drawing one point per stretch instead of from all points is an
    engineering choice: the draws are distinct and spread over the text.
    """
    num_problems, num_points, _ = samples.shape
    if not 1 <= num_centroids <= num_points:
        raise ValueError(
            f"{num_points} points for {num_centroids} centroids; k-means needs at least one point per centroid: "
            "calibrate on more tokens"
        )
    if not bool(torch.isfinite(samples).all()):
        raise ValueError("a k-means sample is not finite; samples must be finite: check the model's weights and dtype")
    generator = torch.Generator().manual_seed(seed)
    fraction = torch.rand(num_problems, num_centroids, generator=generator, dtype=torch.float64)
    # [num_problems, num_centroids] indices of points
    first = ((torch.arange(num_centroids) + fraction) * num_points / num_centroids).long().clamp_(max=num_points - 1)
    initial = samples.gather(1, first.to(samples.device).unsqueeze(2).expand(-1, -1, samples.shape[2]))

    def solve(start: int, stop: int) -> KMeansResult:
        return _lloyd(samples[start:stop], initial[start:stop], num_iterations, snap)

    if samples.device.type == "cpu":
        parts = _run_on_cores(solve, num_problems)
    else:
        batch = max(1, _GPU_BLOCK_SCORES // (num_points * num_centroids))
        parts = [solve(start, start + batch) for start in range(0, num_problems, batch)]
    return KMeansResult(
        torch.cat([part.centroids for part in parts]),
        torch.cat([part.distortion for part in parts]),
        torch.cat([part.history for part in parts], dim=1),
    )


def _run_on_cores(solve: Callable[[int, int], KMeansResult], num_problems: int) -> list[KMeansResult]:
    """One problem per task, one thread per core: the blocks of one problem are too small to share among cores."""
    num_threads = torch.get_num_threads()
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_threads
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        return list(pool.map(lambda index: solve(index, index + 1), range(num_problems)))
    finally:
        # Without cancel_futures an interrupt would wait for every problem in the queue.
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(num_threads)


def _lloyd(
    points: Tensor, centroids: Tensor, num_iterations: int, snap: Callable[[Tensor], Tensor] | None
) -> KMeansResult:
    """Lloyd's iterations for a batch of problems: points `[B, n, g]`, centroids `[B, K, g]`, both f32."""
    batch, num_points, dim = points.shape
    num_centroids = centroids.shape[1]
    # A constant coordinate 1 turns x·c − |c|²/2 into one product, and counts points in the sums below.
    lifted = torch.cat([points, points.new_ones(batch, num_points, 1)], dim=2)
    fixed = (lifted.double() * _FIXED_POINT_SCALE).round_().long().view(-1, dim + 1)
    half_norms = points.square().sum(dim=2) / 2
    first_cluster = torch.arange(batch, device=points.device).unsqueeze(1) * num_centroids
    history = []
    for _ in range(num_iterations):
        assignment, score = _nearest(lifted, centroids)
        error = (half_norms - score).clamp_(min=0) * 2
        history.append(error.mean(dim=1))
        sums = torch.zeros(batch * num_centroids, dim + 1, dtype=torch.int64, device=points.device)
        sums.index_add_(0, (assignment + first_cluster).view(-1), fixed)
        totals = sums.double().view(batch, num_centroids, dim + 1)
        means = (totals[..., :dim] / totals[..., dim:].clamp(min=1)).float()
        centroids = _reseed_empty(means, totals[..., dim] == 0, points, error)
    if snap is not None:
        centroids = snap(centroids)
    _, score = _nearest(lifted, centroids)
    distortion = ((half_norms - score).clamp_(min=0) * 2).mean(dim=1)
    trace = torch.stack(history) if history else points.new_zeros(0, batch)
    return KMeansResult(centroids, distortion, trace)


def _nearest(lifted: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """argmax_c and max_c of x·c − |c|²/2: indices `[B, n] i64` and scores `[B, n] f32`; lifted is `[B, n, g + 1]`."""
    batch, num_points, _ = lifted.shape
    num_centroids = centroids.shape[1]
    bias = -centroids.square().sum(dim=2, keepdim=True) / 2
    # [B, g + 1, K]
    weights = torch.cat([centroids, bias], dim=2).transpose(1, 2).contiguous()
    assignment = torch.empty(batch, num_points, dtype=torch.int64, device=lifted.device)
    best = torch.empty(batch, num_points, dtype=torch.float32, device=lifted.device)
    on_cpu = lifted.device.type == "cpu"
    block = _CPU_BLOCK_POINTS if on_cpu else max(1, _GPU_BLOCK_SCORES // (batch * num_centroids))
    buffer = lifted.new_empty(batch, min(block, num_points), num_centroids)
    for start in range(0, num_points, block):
        rows = lifted[:, start : start + block]
        # [B, block, K]
        scores = buffer[:, : rows.shape[1]] if rows.shape[1] == buffer.shape[1] else None
        scores = torch.bmm(rows, weights, out=scores) if scores is not None else torch.bmm(rows, weights)
        if on_cpu:
            # NumPy's argmax is vectorised; torch.max with indices is several times slower on a CPU.
            index = torch.from_numpy(np.argmax(scores.numpy(), axis=2))
            value = scores.gather(2, index.unsqueeze(2)).squeeze(2)
        else:
            value, index = scores.max(dim=2)
        assignment[:, start : start + block] = index
        best[:, start : start + block] = value
    return assignment, best


def _reseed_empty(means: Tensor, is_empty: Tensor, points: Tensor, error: Tensor) -> Tensor:
    """Put the i-th empty cluster of a problem on its i-th worst-served point; other means stay as they are."""
    most = int(is_empty.sum(dim=1).max())
    if most == 0:
        return means
    worst = error.topk(min(most, error.shape[1]), dim=1).indices
    # [B, K]: which of the worst points an empty cluster takes
    rank = (is_empty.cumsum(dim=1) - 1).clamp(min=0, max=worst.shape[1] - 1)
    chosen = worst.gather(1, rank).unsqueeze(2).expand(-1, -1, points.shape[2])
    return torch.where(is_empty.unsqueeze(2), points.gather(1, chosen), means)
