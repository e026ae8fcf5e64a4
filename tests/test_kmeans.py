"""k-means: exactness of the search, descent, reseeding, determinism."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from vllm_novakv.calibration import kmeans
from vllm_novakv.calibration.kmeans import fit_codebooks
from vllm_novakv.codec.codebook import CODEBOOK_DTYPES, CodebookDtype, is_exact, snap


def skewed_points(num_problems: int, num_points: int, seed: int = 0) -> Tensor:
    """Coordinates whose spreads differ as those of a group of transformed keys do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_problems, num_points, 4, generator=generator) * torch.tensor([0.3, 4.0, 1.0, 0.1])


def brute_force(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared distances to the nearest centroid in float64, `[B, n]`."""
    return torch.cdist(points.double(), centroids.double()).min(dim=2).values.square()


def plain_lloyd(points: Tensor, centroids: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's iterations as in a textbook, for one problem without empty clusters."""
    for _ in range(num_iterations):
        nearest = torch.cdist(points.double(), centroids.double()).argmin(dim=1)
        centroids = torch.stack([points[nearest == index].double().mean(dim=0) for index in range(len(centroids))])
    return centroids


@pytest.mark.parametrize("num_points", [1, 255, 1024, 3001], ids=lambda n: f"points{n}")
@pytest.mark.parametrize("search", [kmeans._SlabSearch, kmeans._FullSearch], ids=["slab", "full"])
def test_search_finds_the_nearest_centroid_again_and_again(search: type, num_points: int) -> None:
    points = skewed_points(1, num_points)
    points = points[:, points[0, :, 1].argsort()]
    centroids = skewed_points(1, 40, seed=1)
    nearest = search(points)
    # later calls reuse bounds of earlier ones, so move the centroids a little and a lot
    for shift in (0.0, 0.01, 3.0, -8.0, 0.0):
        moved = centroids + shift
        assignment, error = nearest(moved)
        chosen = (points - moved[0][assignment]).double().square().sum(dim=2)
        torch.testing.assert_close(chosen, brute_force(points, moved), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(error.double(), brute_force(points, moved), rtol=1e-4, atol=1e-3)


def test_lloyd_equals_the_textbook() -> None:
    points = skewed_points(1, 500)
    centroids = points[:, ::50].clone()
    expected = plain_lloyd(points[0], centroids[0], 8)
    torch.testing.assert_close(kmeans._lloyd(points, centroids, 8)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_fit_codebooks_starts_from_given_centroids() -> None:
    points = skewed_points(2, 500)
    initial = points[:, ::50].clone()
    books = fit_codebooks(points, 10, seed=0, schedule=((1, 8),), initial=initial)
    expected = torch.stack([plain_lloyd(points[i], initial[i], 8) for i in range(2)])
    torch.testing.assert_close(books.centroids.double(), expected, rtol=1e-5, atol=1e-5)


def test_fit_codebooks_finds_separate_clusters_exactly() -> None:
    corners = torch.cartesian_prod(*[torch.tensor([-8.0, 8.0])] * 4)
    noise = 0.1 * torch.randn(2, 16, 64, 4, generator=torch.Generator().manual_seed(5))
    points = (corners.view(1, 16, 1, 4) + noise).view(2, 1024, 4)
    result = fit_codebooks(points, 16, seed=0, schedule=((1, 50),))
    for problem in range(2):
        found = torch.cdist(result.centroids[problem], corners).min(dim=0).values
        assert found.max() < 0.1
    assert result.distortion.max() < 4 * 0.1**2 * 1.2


def test_fit_codebooks_improves_with_iterations() -> None:
    points = skewed_points(3, 4096)
    trace = [fit_codebooks(points, 64, seed=0, schedule=((1, count),)).distortion.mean() for count in (0, 1, 5, 25)]
    assert all(later < earlier for earlier, later in pairwise(trace))
    result = fit_codebooks(points, 64, seed=0, schedule=((1, 25),))
    torch.testing.assert_close(
        result.distortion.double(), brute_force(points, result.centroids).mean(dim=1), rtol=1e-3, atol=1e-4
    )


def test_default_schedule_is_nearly_as_good_as_all_points_in_every_iteration() -> None:
    points = skewed_points(4, 32 * 128)
    assert sum(count for _, count in kmeans.SCHEDULE) == 25
    plain = fit_codebooks(points, 32, seed=0, schedule=((1, 25),)).centroids
    fast = fit_codebooks(points, 32, seed=0).centroids
    assert brute_force(points, fast).mean() < 1.03 * brute_force(points, plain).mean()


def test_fit_codebooks_solves_problems_independently() -> None:
    points = skewed_points(3, 1000)
    together = kmeans._lloyd(points[1:2], points[1:2, ::100], 6)
    if torch.cuda.is_available():
        batched = kmeans._lloyd(points.cuda(), points[:, ::100].cuda(), 6)[1:2].cpu()
        torch.testing.assert_close(batched, together, rtol=1e-5, atol=1e-5)
    first = fit_codebooks(points, 10, seed=0)
    changed = points.clone()
    changed[0] += 1
    second = fit_codebooks(changed, 10, seed=0)
    assert torch.equal(first.centroids[1:], second.centroids[1:])


@pytest.mark.parametrize("num_threads", [1, 2], ids=["threads1", "threads2"])
def test_fit_codebooks_gives_the_same_bytes_for_a_seed(num_threads: int) -> None:
    points = skewed_points(5, 2000)
    expected = fit_codebooks(points, 32, seed=7).centroids
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        if torch.get_num_threads() != num_threads:
            pytest.skip("an engine of an earlier test has bound this process's threads")
        assert torch.equal(fit_codebooks(points, 32, seed=7).centroids, expected)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(fit_codebooks(points, 32, seed=8).centroids, expected)


def test_reseed_empty_moves_empty_clusters_to_the_worst_points() -> None:
    means = torch.arange(8.0).view(1, 4, 2)
    points = torch.tensor([[[10.0, 0.0], [20.0, 0.0], [30.0, 0.0]]])
    error = torch.tensor([[1.0, 3.0, 2.0]])
    result = kmeans._reseed_empty(means, torch.tensor([[False, True, False, True]]), points, error)
    assert result.tolist() == [[[0.0, 1.0], [20.0, 0.0], [4.0, 5.0], [30.0, 0.0]]]


def test_fit_codebooks_uses_every_centroid_when_points_repeat() -> None:
    # the initial draw hits the same place many times: only reseeding reaches the rare points
    points = torch.zeros(1, 600, 4)
    points[0, 590:] = torch.randn(10, 4, generator=torch.Generator().manual_seed(2)) + 5
    result = fit_codebooks(points, 11, seed=0)
    assert result.distortion.item() < 1e-6


def test_fit_codebooks_reports_the_distortion_after_snapping() -> None:
    points = skewed_points(2, 2048)
    exact = fit_codebooks(points, 32, seed=0)
    result = fit_codebooks(points, 32, seed=0, snap=lambda centroids: snap(centroids, "float8_e5m2"))
    assert torch.equal(result.centroids, exact.centroids.to(torch.float8_e5m2).float())
    assert (result.distortion > exact.distortion).all()


def test_snap_saturates_at_the_largest_value() -> None:
    assert snap(torch.tensor([1e6, -1e6, 0.3]), "float8_e4m3fn").tolist() == [448.0, -448.0, 0.3125]


def test_fit_codebooks_refuses_fewer_points_than_centroids() -> None:
    with pytest.raises(ValueError, match="15 points for 16 centroids"):
        fit_codebooks(torch.zeros(1, 15, 4), 16, seed=0)


def test_fit_codebooks_refuses_points_that_are_not_finite() -> None:
    points = skewed_points(1, 100)
    points[0, 3, 1] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        fit_codebooks(points, 4, seed=0)


def test_snap_to_integers_times_a_power_of_two() -> None:
    # 127 / 0.5 = 254 > 127, so the unit of the first group is 1; of the second 2⁻⁷: 0.9 / 2⁻⁷ = 115.2
    groups = torch.tensor([[[100.4, -3.5]], [[0.9, 0.004]], [[0.0, 0.0]]])
    assert snap(groups, "int8").tolist() == [[[100.0, -4.0]], [[115 / 128, 1 / 128]], [[0.0, 0.0]]]


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_what_is_snapped_stays(dtype: CodebookDtype) -> None:
    books = (
        torch.randn(40, 30, 4, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 40)[:, None, None]
    )
    # right at a power of two of the unit
    books[0, 0, 0], books[1, 0, 0] = 127.0, 63.5
    snapped = snap(books, dtype)
    assert is_exact(snapped, dtype)
    assert torch.equal(snapped.to(torch.bfloat16).float(), snapped)
