"""Bases, quantizers, partitions, rate law and dependence against hand-computed values and known theory."""

import math

import pytest
import torch

from vllm_novakv.codec.transform import group_volumes
from vllm_novakv.evaluation.analysis.bases import BASES, key_statistics
from vllm_novakv.evaluation.analysis.codebooks import (
    fit_codebooks,
    gather_groups,
    nearest,
    num_centroids,
    scatter_groups,
)
from vllm_novakv.evaluation.analysis.compare import (
    FittedHead,
    HeadTensors,
    compare_bases,
    compare_partitions,
    measure_rates,
)
from vllm_novakv.evaluation.analysis.dependence import joint_entropy, marginal_entropy, total_correlation
from vllm_novakv.evaluation.analysis.metrics import mean_squared_error, query_weighted_distortion, top1_agreement
from vllm_novakv.evaluation.analysis.partitions import (
    PARTITIONS,
    log2_volumes,
    normalized_log10_volumes,
    partition,
)
from vllm_novakv.evaluation.analysis.quantizers import fit_entropy_coded, fit_fixed_scalar, fit_vector, normalize
from vllm_novakv.evaluation.analysis.rate_law import GroupDistortion, fit_rate_law, measure_groups

GAUSSIAN_ENTROPY_BITS = 0.5 * math.log2(2 * math.pi * math.e)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(num_tokens, seed, size=16):
    """Keys and queries with spectra of their own in bases of their own, shared by all seeds."""
    key_basis, query_basis = (torch.linalg.qr(gaussian(size, size, seed=100 + i)).Q for i in range(2))
    keys = (gaussian(num_tokens, size, seed=seed) * torch.logspace(0, -2, size)) @ key_basis + 0.3
    queries = (gaussian(500, size, seed=seed + 50) * torch.logspace(0, -1.5, size)) @ query_basis
    return HeadTensors(keys=keys, queries=queries)


@pytest.fixture(scope="module")
def pair():
    train = head(2_000, seed=1)
    return FittedHead(train.keys, key_statistics(train.keys, train.queries)), head(800, seed=2)


@pytest.mark.parametrize("name", BASES)
def test_every_basis_is_inverted_by_its_inverse(name, pair):
    basis = BASES[name](pair[0].statistics)
    torch.testing.assert_close(basis.forward @ basis.inverse, torch.eye(16).double(), atol=1e-5, rtol=0)


def test_klt_and_ours_decorrelate_and_ours_preserves_the_weighted_distance(pair):
    statistics = pair[0].statistics
    for name in ("klt", "ours"):
        forward = BASES[name](statistics).forward
        covariance = forward.mT @ statistics.key_covariance @ forward
        variances = covariance.diagonal()
        assert (variances[:-1] >= variances[1:]).all()
        torch.testing.assert_close(covariance, torch.diag(variances), atol=1e-8, rtol=0)
    ours = BASES["ours"](statistics).forward
    torch.testing.assert_close(ours @ ours.mT, statistics.query_moment)


def test_mean_squared_error_by_hand():
    assert mean_squared_error(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])) == 5.0


def test_query_weighted_distortion_by_hand():
    moment = torch.diag(torch.tensor([3.0, 5.0])).double()
    keys = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    assert query_weighted_distortion(keys, torch.zeros(2, 2), moment) == (23 + 0) / 2
    queries = gaussian(40, 2)
    error = (queries @ keys.double().mT).square().mean()
    statistics = key_statistics(keys, queries)
    assert query_weighted_distortion(keys, torch.zeros(2, 2), statistics.query_moment) == pytest.approx(float(error))


def test_top1_agreement_by_hand(monkeypatch):
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    quantized = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]])
    # exact winners 2 2 2 1, quantized winners 0 1 0 1
    assert top1_agreement(queries, keys, quantized) == 0.25
    # with only keys 0 and 1 in sight nothing changed
    seen = torch.tensor([1, 1, 1, 0])
    assert top1_agreement(queries, keys, quantized, seen) == 1.0
    # a query sees the key at its own position
    assert top1_agreement(queries, keys, quantized, torch.tensor([2, 2, 2, 2])) == 0.25
    monkeypatch.setattr("vllm_novakv.evaluation.analysis.metrics._BLOCK_SCORES", 4)
    assert top1_agreement(queries, keys, quantized) == 0.25
    assert top1_agreement(queries, keys, quantized, seen) == 1.0
    with pytest.raises(ValueError, match="no queries"):
        top1_agreement(queries[:0], keys, quantized)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        top1_agreement(queries, keys, quantized, torch.tensor([0, 1, 2, 3]))


def test_partitions_by_hand():
    variances = torch.tensor([1.0, 8.0, 4.0, 2.0])
    assert partition("sorted", variances, 2).tolist() == [[1, 2], [3, 0]]
    assert partition("equalizing", variances, 2).tolist() == [[1, 3], [2, 0]]
    assert log2_volumes(variances, partition("sorted", variances, 2)).tolist() == [5.0, 1.0]
    assert log2_volumes(variances, partition("equalizing", variances, 2)).tolist() == [4.0, 2.0]
    # v_equal is 2^3: the groups are off by a factor of 4 each way
    normalized = normalized_log10_volumes(variances, partition("sorted", variances, 2))
    assert normalized.tolist() == pytest.approx([math.log10(4), -math.log10(4)])
    with pytest.raises(ValueError, match="choose from sorted"):
        partition("other", variances, 2)


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_cover_every_coordinate_and_agree_with_the_codec(name):
    variances = torch.logspace(0, -3, 64).double()
    groups = partition(name, variances, 4, seed=7)
    assert sorted(groups.flatten().tolist()) == list(range(64))
    torch.testing.assert_close(log2_volumes(variances, groups), group_volumes(variances, 4, seed=7)[name])


def test_entropy_coded_quantizer_meets_its_rate_and_the_gaussian_high_rate_distortion():
    # at high rate an entropy-coded uniform quantizer loses 0.2546 bits: D = (πe/6) 2^{−2b}
    train, test = gaussian(20_000, 2, seed=1), gaussian(20_000, 2, seed=2)
    quantized = fit_entropy_coded(train, 4.0, 1, 0)(test)
    assert quantized.bits_per_element == pytest.approx(4.0, abs=0.02)
    distortion = float((test - quantized.coefficients).square().mean())
    assert distortion == pytest.approx(math.pi * math.e / 6 * 2**-8, rel=0.03)


def test_entropy_coded_quantizer_spends_bits_where_the_variance_is():
    # one step for both: rates differ by log2 of the ratio of deviations
    train = gaussian(20_000, 2) * torch.tensor([8.0, 1.0])
    both = fit_entropy_coded(train, 4.0, 1, 0)(train)
    error = (train - both.coefficients).square().mean(dim=0)
    assert float(error[0] / error[1]) == pytest.approx(1.0, rel=0.05)


def test_entropy_code_charges_for_symbols_it_never_saw():
    train = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).double()
    quantize = fit_entropy_coded(train, 1.0, 1, 0)
    # counts 2, 2 and 0, half a symbol more each: probabilities 2.5/5.5, 2.5/5.5, 0.5/5.5
    assert quantize(torch.tensor([[1.0]]).double()).bits_per_element == pytest.approx(math.log2(5.5 / 2.5))
    assert quantize(torch.tensor([[50.0]]).double()).bits_per_element == pytest.approx(math.log2(11))
    with pytest.raises(ValueError, match="all coefficients are zero"):
        fit_entropy_coded(torch.zeros(3, 2).double(), 2.0, 1, 0)


def test_fixed_quantizer_has_four_levels_per_token():
    quantized = fit_fixed_scalar(gaussian(1, 1), 2.0, 1, 0)(gaussian(5, 100)).coefficients
    assert all(len(row.unique()) == 4 for row in quantized)
    with pytest.raises(ValueError, match="whole number"):
        fit_fixed_scalar(gaussian(1, 1), 1.5, 1, 0)


@pytest.mark.parametrize("seed", range(5))
def test_k_means_fills_empty_clusters(seed):
    # four places, 25 points each: whatever places the initial centroids share, each place ends with its own
    points = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [3.0, 3.0]]).double().repeat(25, 1).unsqueeze(0)
    assert torch.equal(nearest(points, fit_codebooks(points, 4, seed)), points)


def test_k_means_needs_a_point_per_centroid():
    points = gaussian(1, 300, 2)
    with pytest.raises(ValueError, match="300 points for 301"):
        fit_codebooks(points, 301, 0)


def test_vector_quantizer_of_one_dimension_reaches_the_lloyd_max_distortion():
    train = gaussian(20_000, 1)
    groups = torch.tensor([[0]])
    distortion = measure_groups(train, gaussian(20_000, 1, seed=3), groups, 2.0)
    assert distortion.test[0] == pytest.approx(0.1175, rel=0.03)
    assert distortion.volume_roots[0] == pytest.approx(1.0, rel=0.03)


def test_grouping_is_undone():
    groups = torch.tensor([[3, 0], [1, 2]])
    x = gaussian(5, 4)
    grouped = gather_groups(x, groups)
    assert torch.equal(grouped[0], x[:, [3, 0]])
    assert torch.equal(scatter_groups(grouped, groups), x)


def test_vector_quantizer_scales_with_the_token():
    train = gaussian(2_000, 8)
    quantize = fit_vector(train, 1.0, 4, 0)
    x = gaussian(10, 8, seed=4)
    torch.testing.assert_close(quantize(100 * x).coefficients, 100 * quantize(x).coefficients)
    assert quantize(x).bits_per_element == 1.0
    assert normalize(torch.zeros(1, 4).double())[1].item() == 1.0


def test_rates_must_give_whole_bits_per_group():
    assert num_centroids(2.5, 4) == 1024
    with pytest.raises(ValueError, match=r"5\.2 bits per group"):
        num_centroids(1.3, 4)


def test_rate_law_of_made_distortions():
    # 1.2 · 2^{−1.8 b} for volume 1, and sixteen times that for v^{1/g} = 16
    measurements = [
        GroupDistortion(b, train=(d, 16 * d), test=(d, 16 * d), volume_roots=(1.0, 16.0))
        for b in (1.0, 1.5, 2.5)
        for d in (1.2 * 2 ** (-1.8 * b),)
    ]
    law = fit_rate_law(measurements)
    assert law.exponent == pytest.approx(1.8)
    assert law.local_exponents == pytest.approx((1.8, 1.8))
    assert law.constant == pytest.approx(2**5 * 1.2 * 2**-4.5)
    assert law.predict(2.5, 16.0) == pytest.approx(16 * 1.2 * 2**-4.5)
    with pytest.raises(ValueError, match="at least two"):
        fit_rate_law(measurements[:1])


def test_rate_law_of_gaussian_pairs_approaches_zador():
    # hexagonal cells: C_2 = Z_2 ‖p‖_{1/2} = 5/(36 √3) · 8π = 2.015 per coordinate, approached from below
    train, test, groups = gaussian(8_000, 2, seed=5), gaussian(8_000, 2, seed=6), torch.tensor([[0, 1]])
    law = fit_rate_law([measure_groups(train, test, groups, bits) for bits in (1.5, 2.0, 2.5, 3.0)])
    assert 1.6 < law.exponent < 2.0
    assert 0.8 * 2.015 < law.constant < 2.015


def test_entropies_of_known_densities():
    x = gaussian(3_000, 1)
    assert marginal_entropy(x[:, 0]) == pytest.approx(GAUSSIAN_ENTROPY_BITS, abs=0.05)
    assert joint_entropy(x) == pytest.approx(GAUSSIAN_ENTROPY_BITS, abs=0.08)
    uniform = torch.rand(3_000, 2, generator=torch.Generator().manual_seed(0)).double()
    assert marginal_entropy(8 * uniform[:, 0]) == pytest.approx(3.0, abs=0.05)
    assert joint_entropy(8 * uniform) == pytest.approx(6.0, abs=0.12)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.95], ids="corr{}".format)
def test_total_correlation_of_gaussian_pairs(correlation):
    # −½ log2(1 − c²)
    x = gaussian(3_000, 2, seed=9)
    pairs = torch.stack([5 * x[:, 0], correlation * x[:, 0] + math.sqrt(1 - correlation**2) * x[:, 1]], dim=-1)
    assert total_correlation(pairs) == pytest.approx(-0.5 * math.log2(1 - correlation**2), abs=0.08)


def test_total_correlation_sees_dependence_without_correlation():
    x = gaussian(3_000, 2, seed=9)
    radius = torch.where(gaussian(3_000, 1, seed=10) > 0, 4.0, 0.25)
    assert total_correlation(x * radius) > 0.15


@pytest.mark.parametrize(
    ("points", "words"),
    [
        pytest.param(torch.zeros(10, 2), "constant", id="constant"),
        pytest.param(torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(50, 1), "coincide", id="repeated"),
    ],
)
def test_dependence_of_impossible_points_is_refused(points, words):
    with pytest.raises(ValueError, match=words):
        total_correlation(points)


def test_neighbours_and_spacings_must_be_inside_the_sample():
    with pytest.raises(ValueError, match="num_neighbors=3"):
        joint_entropy(gaussian(3, 1))
    with pytest.raises(ValueError, match="spacing=5"):
        marginal_entropy(gaussian(5), 5)


def test_comparison_orders_bases_as_theory_says(pair):
    results = {(r.basis, r.quantizer): r for r in compare_bases(*pair, bits=2.0, group_size=2)}
    assert len(results) == 15
    coded = {name: results[name, "entropy-coded-sq"] for name in BASES}
    assert min(coded, key=lambda name: coded[name].mse) == "klt"
    assert min(coded, key=lambda name: coded[name].query_weighted) == "ours"
    assert all(abs(result.bits_per_element - 2) < 0.1 for result in coded.values())
    # a single rate cannot serve a compacted spectrum, vectors can
    assert results["ours", "vq"].query_weighted < results["oscar", "vq"].query_weighted
    assert results["ours", "vq"].query_weighted < results["ours", "fixed-sq"].query_weighted
    assert results["ours", "vq"].top1_agreement > results["ours", "fixed-sq"].top1_agreement


def test_equalizing_partition_has_the_smallest_distortion_and_spread(pair):
    by_name = {result.name: result for result in compare_partitions(*pair, bits=1.0)}
    total = {name: sum(result.distortion.test) for name, result in by_name.items()}
    assert total["equalizing"] < total["random"] < total["sorted"]
    spread = {name: float(result.log2_volumes.max() - result.log2_volumes.min()) for name, result in by_name.items()}
    assert spread["equalizing"] < spread["random"] < spread["sorted"]
    # coordinates are Gaussian and decorrelated, so next to independent
    assert max(abs(value) for result in by_name.values() for value in result.total_correlation) < 0.3


def test_rates_are_those_of_the_equalizing_partition(pair):
    equalizing = next(r for r in compare_partitions(*pair, bits=1.0) if r.name == "equalizing")
    low, high = measure_rates(*pair, rates=(1.0, 1.5))
    assert low == equalizing.distortion
    assert sum(high.test) < sum(low.test)
