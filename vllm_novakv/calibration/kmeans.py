"""Batched k-means for the key codebooks: many small independent problems (one per layer, KV head and group).

Lloyd's iterations with random initial centroids; a cluster that is left empty moves to the point that is served worst.
The nearest centroid is argmax x·c − |c|²/2, one matrix product per block of points. Sums over a cluster are integers
(fixed point), so they do not depend on the order of additions and a seed gives the same bytes on every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SCHEDULE = ((16, 8), (8, 6), (4, 5), (2, 3), (1, 3))
"""Lloyd's iterations as (stride through the points, iterations): early ones only bring centroids near their places."""

# A coarse stage keeps at least this many points per centroid, whatever its stride.
_COARSE_POINTS_PER_CENTROID = 8

# Points are compared with centroids in blocks whose scores stay in a core's second-level cache (CPU) or in a bounded
# buffer (GPU).
_CPU_BLOCK_POINTS = 2048
_GPU_BLOCK_SCORES = 1 << 28

# Fixed point with 32 fractional bits: coordinates of normalised samples are at most √head_size = 16, so the sum of a
# million points stays below 2^56.
_FIXED_POINT_SCALE = float(1 << 32)

# Relative rounding of a float32 distance, with room.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class KMeansResult:
    """Codebooks and how well they serve the points they were trained on.

    Attributes:
        centroids: `[num_problems, num_centroids, dim] f32`.
        distortion: mean squared distance of a point to its centroid, `[num_problems] f32`.
    """

    centroids: Tensor
    distortion: Tensor


def fit_codebooks(
    samples: Tensor,
    num_centroids: int,
    seed: int,
    schedule: Sequence[tuple[int, int]] = SCHEDULE,
    snap: Callable[[Tensor], Tensor] | None = None,
    initial: Tensor | None = None,
) -> KMeansResult:
    """Solve min_C Σ_j min_c ‖x_j − c‖² for every problem by Lloyd's iterations, then snap the centroids.

    1. Initial centroids: one point drawn from each of `num_centroids` equal stretches of the points.
    2. Assign every point to its nearest centroid; move each centroid to the mean of its points.
    3. Give every empty cluster one of the points that are farthest from their centroid.
    4. Repeat 2 and 3, in all 25 times: first on every sixteenth point, then on more and more of them.
    5. Snap; measure the distortion.

    Args:
        samples: points `[num_problems, num_points, dim]`, f32, coordinates of magnitude at most about 16.
        num_centroids: codebook size, at least 1 and at most `num_points`.
        seed: of the initial draw; the same seed and points give the same bytes.
        schedule: stages of (stride, iterations).
        snap: maps trained centroids to those of 8 bits; None leaves them as they are.
        initial: centroids to start from, `[num_problems, num_centroids, dim] f32`, on the samples' device; None draws
            them.

    Returns:
        The centroids, on the device of the samples, with their distortion after snapping (on the points of the first
        stage).

    Raises:
        ValueError: fewer points than centroids, or a point that is not finite.

    Source: arXiv 2608.04074, section 8.3 and algorithm 3. Drawing one point per stretch (distinct draws, spread over
    the text) and the coarse stages are engineering choices.
    """
    num_problems, num_points, _ = samples.shape
    if not 1 <= num_centroids <= num_points:
        raise ValueError(
            f"{num_points} points for {num_centroids} centroids; k-means needs at least one point per centroid: "
            "calibrate on more tokens"
        )
    if not bool(torch.isfinite(samples).all()):
        raise ValueError("a k-means sample is not finite; samples must be finite: check the model's weights and dtype")
    start_centroids = _draw(samples, num_centroids, seed) if initial is None else initial

    on_cpu = samples.device.type == "cpu"

    def solve(start: int, stop: int) -> KMeansResult:
        points, centroids = samples[start:stop], start_centroids[start:stop]
        if on_cpu:
            # see _SlabSearch
            points = points[:, points[0, :, _leading_coordinate(points[0])].argsort(stable=True)]
        largest_stride = max(1, num_points // (_COARSE_POINTS_PER_CENTROID * num_centroids))
        for stride, num_iterations in schedule:
            centroids = _lloyd(points[:, :: min(stride, largest_stride)], centroids, num_iterations)
        if snap is not None:
            centroids = snap(centroids)
        measured = points[:, :: min(schedule[0][0], largest_stride)]
        return KMeansResult(centroids, _search(measured)(centroids)[1].mean(dim=1))

    if on_cpu:
        parts = _run_on_cores(solve, num_problems)
    else:
        batch = max(1, _GPU_BLOCK_SCORES // (num_points * num_centroids))
        parts = [solve(start, min(start + batch, num_problems)) for start in range(0, num_problems, batch)]
    return KMeansResult(torch.cat([part.centroids for part in parts]), torch.cat([part.distortion for part in parts]))


def _draw(samples: Tensor, num_centroids: int, seed: int) -> Tensor:
    """One point from each of `num_centroids` equal stretches of the points, `[num_problems, num_centroids, dim]`."""
    num_problems, num_points, dim = samples.shape
    generator = torch.Generator().manual_seed(seed)
    fraction = torch.rand(num_problems, num_centroids, generator=generator, dtype=torch.float64)
    # [num_problems, num_centroids] indices of points
    first = ((torch.arange(num_centroids) + fraction) * num_points / num_centroids).long().clamp_(max=num_points - 1)
    return samples.gather(1, first.to(samples.device).unsqueeze(2).expand(-1, -1, dim))


def _run_on_cores(solve: Callable[[int, int], KMeansResult], num_problems: int) -> list[KMeansResult]:
    """One problem per task, one thread per core: the blocks of one problem are too small to share among cores."""
    num_threads = torch.get_num_threads()
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_threads
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        return list(pool.map(lambda index: solve(index, index + 1), range(num_problems)))
    finally:
        # Without cancel_futures an interrupt would wait for every problem in the queue.
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(num_threads)


def _search(points: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The nearest-centroid search that suits the device of points `[B, n, g]`: centroids `[B, K, g]` to assignment
    `[B, n] i64` and squared distance `[B, n] f32`."""
    return _SlabSearch(points) if points.device.type == "cpu" else _FullSearch(points)


def _lloyd(points: Tensor, centroids: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's iterations for a batch of problems: points `[B, n, g]`, centroids `[B, K, g]`, both f32."""
    batch, _, dim = points.shape
    num_centroids = centroids.shape[1]
    nearest = _search(points)
    # the last column counts points
    fixed = (_lifted(points).double() * _FIXED_POINT_SCALE).round_().long().view(-1, dim + 1)
    first_cluster = torch.arange(batch, device=points.device).unsqueeze(1) * num_centroids
    for _ in range(num_iterations):
        assignment, error = nearest(centroids)
        sums = torch.zeros(batch * num_centroids, dim + 1, dtype=torch.int64, device=points.device)
        sums.index_add_(0, (assignment + first_cluster).view(-1), fixed)
        totals = sums.double().view(batch, num_centroids, dim + 1)
        means = (totals[..., :dim] / totals[..., dim:].clamp(min=1)).float()
        centroids = _reseed_empty(means, totals[..., dim] == 0, points, error)
    return centroids


def _lifted(points: Tensor) -> Tensor:
    """(x, 1), so that x·c − |c|²/2 is one product with (c, −|c|²/2)."""
    return torch.cat([points, points.new_ones(*points.shape[:-1], 1)], dim=-1)


def _score_weights(centroids: Tensor) -> Tensor:
    """(c, −|c|²/2) as columns, `[..., g + 1, K]`."""
    bias = -centroids.square().sum(dim=-1, keepdim=True) / 2
    return torch.cat([centroids, bias], dim=-1).transpose(-2, -1).contiguous()


class _FullSearch:
    """Compare every point with every centroid, many problems at once."""

    def __init__(self, points: Tensor) -> None:
        self.lifted = _lifted(points)
        self.half_norms = points.square().sum(dim=2) / 2

    def __call__(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        batch, num_points, _ = self.lifted.shape
        weights = _score_weights(centroids)
        assignment = torch.empty(batch, num_points, dtype=torch.int64, device=centroids.device)
        score = torch.empty(batch, num_points, dtype=torch.float32, device=centroids.device)
        block = max(1, _GPU_BLOCK_SCORES // (batch * centroids.shape[1]))
        for start in range(0, num_points, block):
            rows = slice(start, start + block)
            score[:, rows], assignment[:, rows] = torch.bmm(self.lifted[:, rows], weights).max(dim=2)
        return assignment, (self.half_norms - score).clamp_(min=0) * 2


class _SlabSearch:
    """Compare a block of points only with centroids whose leading coordinate is near enough; exact, one problem.

    Transformed keys vary far more along one coordinate of a group than along the others. With the points sorted by it,
    a block of neighbours needs only a slab of the centroids: a point at distance u from some centroid has its nearest
    centroid within u along every coordinate. The bound u comes from the previous call and how far its centroid moved.
    """

    def __init__(self, points: Tensor) -> None:
        (self.points,) = points
        self.lead = _leading_coordinate(self.points)
        self.leading = self.points[:, self.lead].contiguous()
        num_points = self.points.shape[0]
        self.starts = np.arange(0, num_points, _CPU_BLOCK_POINTS)
        self.blocks = _lifted(self.points).split(_CPU_BLOCK_POINTS)
        self.chosen = np.empty(num_points, dtype=np.int64)
        self.previous: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        (centroids,) = centroids
        order = torch.from_numpy(centroids[:, self.lead].numpy().argsort(kind="stable"))
        by_lead = centroids[order]
        weights = _score_weights(by_lead)
        first, last = self._slabs(centroids, by_lead)
        buffer = np.empty(_CPU_BLOCK_POINTS * centroids.shape[0], dtype=np.float32)
        # Few calls, and NumPy where it is as fast: every call into torch hands the interpreter's lock over.
        for rows, start, low, high in zip(self.blocks, self.starts.tolist(), first, last, strict=True):
            scores = buffer[: len(rows) * (high - low)].reshape(len(rows), high - low)
            torch.mm(rows, weights[:, low:high], out=torch.from_numpy(scores))
            # NumPy's argmax is vectorised; torch.max with indices is several times slower on a CPU.
            scores.argmax(axis=1, out=self.chosen[start : start + len(scores)])
            self.chosen[start : start + len(scores)] += low
        chosen = torch.from_numpy(self.chosen)
        assignment = order.index_select(0, chosen)
        offset = (self.points - by_lead.index_select(0, chosen)).numpy()
        error = torch.from_numpy(np.einsum("ng,ng->n", offset, offset))
        self.previous = (centroids, assignment, error)
        return assignment.unsqueeze(0), error.unsqueeze(0)

    def _slabs(self, centroids: Tensor, by_lead: Tensor) -> tuple[list[int], list[int]]:
        """First and one-past-last centroid, in the order of the leading coordinate, of every block of points."""
        edges = by_lead[:, self.lead].contiguous()
        if self.previous is None:
            neighbour = torch.searchsorted(edges, self.leading).clamp_(max=edges.numel() - 1)
            bound = (self.points - by_lead[neighbour]).square_().sum(dim=1).sqrt_()
        else:
            previous, assignment, error = self.previous
            moved = torch.linalg.vector_norm(centroids - previous, dim=1)
            bound = error.sqrt().add_(moved.index_select(0, assignment))
        bound = bound.mul_(1 + _ROUNDING).numpy()
        low = np.minimum.reduceat(self.leading.numpy() - bound, self.starts)
        high = np.maximum.reduceat(self.leading.numpy() + bound, self.starts)
        first = np.searchsorted(edges.numpy(), low, side="left")
        last = np.searchsorted(edges.numpy(), high, side="right")
        return first.tolist(), last.tolist()


def _leading_coordinate(points: Tensor) -> int:
    return int(points.var(dim=0, correction=0).argmax())


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
