"""The bases: theorem 1, the generalized Parseval relation, corollary 1 and the grouping, on synthetic moments."""

import pytest
import torch
from codec_samples import generator, heavy_vectors, moment

from vllm_novakv.artifact import INVERSE_TOLERANCE
from vllm_novakv.codec.transform import (
    RELATIVE_EIGENVALUE_FLOOR,
    group_volumes,
    grouped_column_order,
    hadamard,
    key_transforms,
    value_transform,
    volume_spread_bits,
)

SHAPES = [
    pytest.param(size, group, id=f"hs{size}-g{group}") for size, group in [(64, 2), (64, 4), (64, 8), (128, 4)]
] + [pytest.param(256, 4, id="hs256-g4")]


def moments(head_size, num_tokens=600):
    queries = heavy_vectors(num_tokens, 1, head_size, seed=1, decades=2.0)[:, 0]
    keys = heavy_vectors(num_tokens, 1, head_size, seed=2)[:, 0]
    centred = keys - keys.mean(dim=0)
    return queries, centred, queries.T @ queries, centred.T @ centred


def close(actual, expected, relative=1e-9):
    return float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


def test_column_order_matches_example():
    assert grouped_column_order(8, 4).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert grouped_column_order(12, 4).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_column_order_deals_rank_to_group_modulo(head_size, group_size):
    num_groups = head_size // group_size
    order = grouped_column_order(head_size, group_size).tolist()
    assert sorted(order) == list(range(head_size))
    for column, rank in enumerate(order):
        assert column // group_size == rank % num_groups


@pytest.mark.parametrize("group_size", [0, -1, 3])
def test_column_order_refuses_group_size(group_size):
    with pytest.raises(ValueError, match=f"not divisible by group_size={group_size}; choose a divisor"):
        grouped_column_order(64, group_size)


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_key_transform_factors_query_moment(head_size, group_size):
    _, _, query_moment, key_scatter = moments(head_size)
    fitted = key_transforms(query_moment, key_scatter, group_size)
    assert close(fitted.key_transform @ fitted.key_transform.T, query_moment)


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_key_transform_pair_is_inverse(head_size, group_size):
    _, _, query_moment, key_scatter = moments(head_size)
    fitted = key_transforms(query_moment, key_scatter, group_size)
    identity = torch.eye(head_size, dtype=torch.float64)
    assert close(fitted.key_transform.T @ fitted.key_transform_inv_t, identity)
    assert close(fitted.key_transform @ fitted.key_transform_inv_t.T, identity)


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_transformed_scatter_is_diagonal_sorted_and_dealt(head_size, group_size):
    _, keys, query_moment, key_scatter = moments(head_size)
    fitted = key_transforms(query_moment, key_scatter, group_size)
    r = keys @ fitted.key_transform
    scatter = r.T @ r
    assert close(scatter, torch.diag(scatter.diagonal()))
    by_group = scatter.diagonal().view(-1, group_size)
    num_groups = head_size // group_size
    for rank in range(head_size):
        actual = float(by_group[rank % num_groups, rank // num_groups])
        assert actual == pytest.approx(float(fitted.eigenvalues[rank]), rel=1e-6)
    assert bool((fitted.eigenvalues.diff() <= 0).all())


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_parseval_relation_holds_for_any_error(head_size, group_size):
    _, _, query_moment, key_scatter = moments(head_size)
    fitted = key_transforms(query_moment, key_scatter, group_size)
    r_error = torch.randn(50, head_size, generator=generator(5), dtype=torch.float64)
    key_error = r_error @ fitted.key_transform_inv_t.T
    weighted = ((key_error @ query_moment) * key_error).sum(dim=-1)
    torch.testing.assert_close(weighted, r_error.square().sum(dim=-1), rtol=1e-7, atol=0)


def test_query_moments_of_heads_add_up():
    # One KV head read by three query heads: the error of all logits is the error of the transformed keys.
    queries = heavy_vectors(400, 3, 64, seed=11, decades=2.0)
    keys = heavy_vectors(300, 1, 64, seed=12)[:, 0]
    decoded = keys + 0.01 * torch.randn(300, 64, generator=generator(13), dtype=torch.float64)
    fitted = key_transforms(moment(queries).sum(dim=0), keys.T @ keys, 4)
    logit_error = sum(((queries[:, head] @ (keys - decoded).T) ** 2).sum() for head in range(3))
    r_error = ((keys - decoded) @ fitted.key_transform).square().sum()
    assert float(r_error) == pytest.approx(float(logit_error), rel=1e-9)


def test_logits_are_preserved_through_the_pair():
    queries, keys, query_moment, key_scatter = moments(64)
    fitted = key_transforms(query_moment, key_scatter, 4)
    through = (queries @ fitted.key_transform_inv_t) @ (keys @ fitted.key_transform).T
    assert close(through, queries @ keys.T)


@pytest.mark.parametrize("rank", [1, 4, 17, 63])
def test_truncation_reaches_theorem_1_minimum(rank):
    queries, keys, query_moment, key_scatter = moments(64)
    # group_size 64 is one group: columns stay in rank order
    fitted = key_transforms(query_moment, key_scatter, 64)
    root, inverse_root = fitted.key_transform[:, :rank], fitted.key_transform_inv_t[:, :rank]
    loss = ((queries @ (keys - keys @ root @ inverse_root.T).T) ** 2).sum()
    assert float(loss) == pytest.approx(float(fitted.eigenvalues[rank:].sum()), rel=1e-7)
    for seed in range(5):
        other = torch.randn(64, rank, generator=generator(seed), dtype=torch.float64)
        weighted = torch.linalg.solve(query_moment, other)
        synthesis = torch.linalg.solve(other.T @ weighted, weighted.T)
        assert float(((queries @ (keys - keys @ other @ synthesis).T) ** 2).sum()) > float(loss)


def test_common_factor_of_query_moment_scales_the_pair_inversely():
    _, _, query_moment, key_scatter = moments(64)
    base = key_transforms(query_moment, key_scatter, 4)
    scaled = key_transforms(query_moment * 64.0, key_scatter, 4)
    # Columns may change sign, so compare what does not depend on it.
    assert close(scaled.key_transform @ scaled.key_transform.T, 64.0 * (base.key_transform @ base.key_transform.T))
    assert close(scaled.key_transform.abs(), 8.0 * base.key_transform.abs(), 1e-6)
    assert close(scaled.key_transform_inv_t.abs(), base.key_transform_inv_t.abs() / 8.0, 1e-6)
    assert close(scaled.eigenvalues, 64.0 * base.eigenvalues)


def test_key_transforms_keep_leading_dimensions():
    queries, keys = heavy_vectors(300, 3, 64, seed=3, decades=2.0), heavy_vectors(300, 3, 64, seed=4)
    together = key_transforms(moment(queries), moment(keys), 4)
    for head in range(3):
        alone = key_transforms(moment(queries)[head], moment(keys)[head], 4)
        assert close(together.key_transform[head].abs(), alone.key_transform.abs(), 1e-6)
        assert close(together.eigenvalues[head], alone.eigenvalues)


@pytest.mark.parametrize("rank", [1, 8, 63])
def test_rank_deficient_query_moment_gives_usable_pair(rank):
    queries = heavy_vectors(400, 1, 64, seed=7, decades=1.0)[:, 0]
    basis = torch.linalg.qr(torch.randn(64, rank, generator=generator(8), dtype=torch.float64)).Q
    queries = queries @ basis @ basis.T
    keys = heavy_vectors(400, 1, 64, seed=9)[:, 0]
    fitted = key_transforms(queries.T @ queries, keys.T @ keys, 4)
    identity = torch.eye(64, dtype=torch.float64)
    assert bool(torch.isfinite(fitted.key_transform_inv_t).all())
    assert close(fitted.key_transform.T @ fitted.key_transform_inv_t, identity, 1e-6)
    stored = fitted.key_transform.float().double().T @ fitted.key_transform_inv_t.float().double()
    assert close(stored, identity, INVERSE_TOLERANCE / 4)
    through = (queries @ fitted.key_transform_inv_t) @ (keys @ fitted.key_transform).T
    assert close(through, queries @ keys.T, 1e-7)


def test_floor_leaves_well_conditioned_moment_alone():
    queries, _, query_moment, key_scatter = moments(64)
    eigenvalues = torch.linalg.eigvalsh(query_moment)
    assert float(eigenvalues[0] / eigenvalues[-1]) > RELATIVE_EIGENVALUE_FLOOR
    fitted = key_transforms(query_moment, key_scatter, 4)
    assert close((fitted.key_transform @ fitted.key_transform.T), query_moment, 1e-12)
    whitened = queries @ fitted.key_transform_inv_t
    assert close(whitened.T @ whitened, torch.eye(64, dtype=torch.float64), 1e-6)


def test_rank_deficient_scatter_has_no_negative_eigenvalue():
    _, keys, query_moment, _ = moments(64)
    few = keys[:5]
    fitted = key_transforms(query_moment, few.T @ few, 4)
    assert bool((fitted.eigenvalues >= 0).all())
    assert float(fitted.eigenvalues[5]) <= 1e-9 * float(fitted.eigenvalues[0])
    assert bool(torch.isfinite(fitted.key_transform).all())


def test_key_transforms_refuse_zero_query_moment():
    with pytest.raises(ValueError, match="query_moment is zero: no query was seen; calibrate with more tokens"):
        key_transforms(torch.zeros(64, 64, dtype=torch.float64), torch.eye(64, dtype=torch.float64), 4)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(lambda m: m.float(), "is torch.float32", id="float32"),
        pytest.param(lambda m: m[:3], r"\[3, 64\]", id="not-square"),
        pytest.param(lambda m: m.where(m != m[2, 2], torch.nan), "non-finite", id="nan"),
        pytest.param(lambda m: m.where(m != m[2, 2], torch.inf), "non-finite", id="inf"),
    ],
)
def test_moments_are_checked(spoil, text):
    good = moments(64)[2]
    for name, call in {
        "query_moment": lambda m: key_transforms(m, good, 4),
        "key_scatter": lambda m: key_transforms(good, m, 4),
        "output_moment": value_transform,
    }.items():
        with pytest.raises(ValueError, match=f"{name} .*{text}"):
            call(spoil(good))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_value_transform_is_orthogonal_and_evens_out_variances(head_size):
    outputs = heavy_vectors(500, 1, head_size, seed=21)[:, 0]
    output_moment = outputs.T @ outputs
    rotation = value_transform(output_moment)
    assert close(rotation.T @ rotation, torch.eye(head_size, dtype=torch.float64))
    variances = (rotation.T @ output_moment @ rotation).diagonal()
    assert close(variances, torch.full_like(variances, float(output_moment.trace()) / head_size))


def test_value_transform_decorrelates_before_hadamard():
    outputs = heavy_vectors(500, 1, 64, seed=22)[:, 0]
    eigenvectors = value_transform(outputs.T @ outputs) @ hadamard(64)
    scatter = eigenvectors.T @ (outputs.T @ outputs) @ eigenvectors
    assert close(scatter, torch.diag(scatter.diagonal()))
    assert bool((scatter.diagonal().diff() <= 0).all())


def test_value_transform_of_zero_moment_is_orthogonal():
    rotation = value_transform(torch.zeros(64, 64, dtype=torch.float64))
    assert close(rotation.T @ rotation, torch.eye(64, dtype=torch.float64))


def test_hadamard_matches_example():
    assert torch.equal(hadamard(2) * 2**0.5, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    assert close(hadamard(64) @ hadamard(64), torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize("size", [0, 3, 80, -2])
def test_hadamard_refuses_size(size):
    with pytest.raises(ValueError, match=f"size={size} is not a power of two"):
        hadamard(size)


def test_group_volumes_match_hand_computation():
    # log2 variances 7 … 0 in shuffled order, two groups of four
    eigenvalues = 2.0 ** torch.tensor([3.0, 7.0, 0.0, 5.0, 1.0, 6.0, 2.0, 4.0], dtype=torch.float64)
    volumes = group_volumes(eigenvalues, 4)
    assert volumes["sorted"].tolist() == [22.0, 6.0]
    assert volumes["equalizing"].tolist() == [16.0, 12.0]
    assert volume_spread_bits(volumes["sorted"], 4) == 2.0
    assert volume_spread_bits(volumes["equalizing"], 4) == 0.5


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_group_volumes_keep_total_and_order_of_spreads(head_size, group_size):
    eigenvalues = torch.logspace(4, -4, head_size, dtype=torch.float64)
    volumes = group_volumes(eigenvalues, group_size)
    for grouping in volumes.values():
        assert float(grouping.sum()) == pytest.approx(float(eigenvalues.log2().sum()), abs=1e-9)
    spreads = {name: volume_spread_bits(grouping, group_size) for name, grouping in volumes.items()}
    assert spreads["equalizing"] < spreads["random"] < spreads["sorted"]


def test_group_volumes_depend_on_seed_only_in_random():
    eigenvalues = torch.logspace(4, -4, 64, dtype=torch.float64)
    first, again, other = (group_volumes(eigenvalues, 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first["random"], again["random"])
    assert not torch.equal(first["random"], other["random"])
    assert torch.equal(first["equalizing"], other["equalizing"])


def test_group_volumes_of_zero_eigenvalues_are_finite():
    volumes = group_volumes(torch.zeros(64, dtype=torch.float64), 4)
    assert all(bool(torch.isfinite(grouping).all()) for grouping in volumes.values())


def test_equalizing_order_is_the_one_folded_into_the_columns():
    _, keys, query_moment, key_scatter = moments(64)
    fitted = key_transforms(query_moment, key_scatter, 4)
    variances = (keys @ fitted.key_transform).square().sum(dim=0)
    from_columns = variances.log2().view(-1, 4).sum(dim=-1)
    torch.testing.assert_close(group_volumes(fitted.eigenvalues, 4)["equalizing"], from_columns)
