"""The compared methods against theory on Gaussian data, by hand on small vectors, and their bits per element."""

import math

import pytest
import torch
from codec_samples import moment, sample_codec, sample_keys, sample_values

from vllm_novakv.baselines import BASELINES, AttentionMoments, LayerStatistics, bits_per_element
from vllm_novakv.baselines.nova import NovaKV
from vllm_novakv.baselines.rotations import (
    bit_reversal,
    hadamard_rotation,
    oscar_rotation,
    random_rotation,
    rotate,
)
from vllm_novakv.baselines.scalar import (
    clip_percentile,
    lloyd_max_levels,
    quantize_gaussian,
    quantize_min_max,
)
from vllm_novakv.baselines.scalar_methods import Fp8, Kivi, NaiveInt2, Oscar, QuaRot, TurboQuant
from vllm_novakv.codec.quantizer import decode_keys, encode_keys


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(x, quantized):
    return float((x - quantized).square().sum() / x.square().sum())


@pytest.fixture(scope="module")
def layer():
    codec = sample_codec(head_size=64)
    moments = AttentionMoments(
        query_moment=moment(gaussian(512, 2, 64, seed=1).double()),
        output_moment=moment(gaussian(512, 2, 64, seed=2).double()),
    )
    return LayerStatistics(64, moments, codec)


# distortion and outermost level from Max (1960), table I
@pytest.mark.parametrize(
    ("num_levels", "distortion", "outermost"),
    [(1, 1.0, 0.0), (2, 0.3634, 0.7980), (4, 0.1175, 1.510), (8, 0.03454, 2.152), (16, 0.009497, 2.733)],
    ids="levels{}".format,
)
def test_lloyd_max_levels_and_distortion_are_the_published_ones(num_levels, distortion, outermost):
    levels = lloyd_max_levels(num_levels)
    assert levels[-1] == pytest.approx(outermost, abs=1e-3)
    assert levels == pytest.approx([-level for level in reversed(levels)], abs=1e-9)
    x = gaussian(400_000)
    assert float((x - quantize_gaussian(x, num_levels)).square().mean()) == pytest.approx(distortion, rel=0.02)


def test_min_max_by_hand():
    x = torch.tensor([[0.0, 0.4, 2.6, 3.0], [5.0, 5.0, 5.0, 5.0], [-3.0, 0.0, 3.0, 6.0]])
    expected = torch.tensor([[0.0, 0.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-3.0, 0.0, 3.0, 6.0]])
    assert torch.equal(quantize_min_max(x), expected)
    assert torch.equal(quantize_min_max(x.T, dim=0), expected.T)


def test_min_max_error_of_uniform_data_is_a_twelfth_of_the_squared_step():
    x = 3 * torch.rand(8, 20_000, generator=torch.Generator().manual_seed(0))
    assert float((x - quantize_min_max(x)).square().mean()) == pytest.approx(1 / 12, rel=0.02)


def test_percentile_clip_by_hand():
    x = torch.tensor([[1.0, -2.0, 3.0, -40.0]])
    assert torch.equal(clip_percentile(x, 0.75), torch.tensor([[1.0, -2.0, 3.0, -3.0]]))
    assert torch.equal(clip_percentile(x, 1.0), x)
    for percentile in (0.0, 1.5):
        with pytest.raises(ValueError, match="percentile"):
            clip_percentile(x, percentile)


def test_bit_reversal_by_hand():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    order = bit_reversal(128)
    assert torch.equal(order[order], torch.arange(128))


@pytest.mark.parametrize(
    "rotation",
    [
        pytest.param(hadamard_rotation(64), id="hadamard"),
        pytest.param(random_rotation(64, seed=3), id="random"),
        pytest.param(oscar_rotation(moment(gaussian(300, 2, 64).double())), id="oscar"),
    ],
)
def test_rotations_are_orthogonal(rotation):
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(64).expand_as(rotation), atol=1e-5, rtol=0)
    x = gaussian(5, 2, 64)
    torch.testing.assert_close(rotate(rotate(x, rotation), rotation.mT), x)


def test_random_rotation_repeats_with_its_seed():
    assert torch.equal(random_rotation(16, 1), random_rotation(16, 1))
    assert not torch.equal(random_rotation(16, 1), random_rotation(16, 2))


def test_oscar_basis_gives_every_coordinate_the_same_query_energy():
    scales = torch.logspace(0, -2, 64, dtype=torch.float64)
    query_moment = moment(gaussian(500, 2, 64).double() * scales)
    rotation = oscar_rotation(query_moment).double()
    diagonal = (rotation.mT @ query_moment @ rotation).diagonal(dim1=-2, dim2=-1)
    mean = query_moment.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    torch.testing.assert_close(diagonal, mean.expand_as(diagonal), rtol=1e-5, atol=0)


def test_oscar_columns_are_hadamard_s_in_bit_reversed_order():
    # a diagonal moment leaves the axes where they are, up to their signs, which the first column (all ones) shows
    rotation = oscar_rotation(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])).double().unsqueeze(0))[0]
    expected = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
    torch.testing.assert_close(rotation * rotation[:, :1].sign(), expected)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)], ids="b{}".format)
def test_turboquant_reaches_the_lloyd_max_distortion_whatever_the_norm_and_direction(bits, distortion):
    # one coordinate carries almost everything, norms span decades
    x = torch.zeros(400, 2, 128)
    x[..., 7] = torch.logspace(-2, 2, 400).unsqueeze(1)
    x += 0.001 * gaussian(400, 2, 128)
    errors = [relative_error(x, TurboQuant(128, bits, seed).quantize_keys(x)) for seed in range(8)]
    assert sum(errors) / len(errors) == pytest.approx(distortion, rel=0.15)
    dense = gaussian(2_000, 2, 128)
    assert relative_error(dense, TurboQuant(128, bits).quantize_values(dense)) == pytest.approx(distortion, rel=0.03)


def test_quarot_spreads_an_outlier_that_ruins_naive_int2():
    # after the rotation a vector along one axis has entries ±1/√d: two levels hold it, up to the rounding of the scale
    x = torch.zeros(3, 2, 64)
    x[..., 5] = 8.0
    torch.testing.assert_close(QuaRot(64).quantize_keys(x), x, atol=2e-2, rtol=0)
    x = gaussian(500, 2, 64)
    x[..., 5] *= 50
    rest = [i for i in range(64) if i != 5]
    assert relative_error(x[..., rest], NaiveInt2(64).quantize_keys(x)[..., rest]) > 1
    assert relative_error(x, QuaRot(64).quantize_keys(x)) < 0.2


def test_percentile_clip_helps_oscar_on_gaussian_data():
    x = gaussian(2_000, 2, 128)
    moments = moment(x.double())
    clipped = relative_error(x, Oscar(moments, moments).quantize_keys(x))
    unclipped = relative_error(x, Oscar(moments, moments, percentile=1.0).quantize_keys(x))
    assert 0.1175 < clipped < unclipped


def test_kivi_keys_are_exact_where_channels_are_constant():
    x = gaussian(1, 2, 64).bfloat16().float().expand(70, 2, 64)
    assert torch.equal(Kivi().quantize_keys(x), x)
    x = gaussian(70, 2, 64)
    x[..., 5] *= 50
    quantized = Kivi().quantize_keys(x)
    # groups 0-31, 32-63 and 64-69: a change in one leaves the others
    changed = x.clone()
    changed[40] += 1
    other = Kivi().quantize_keys(changed)
    assert torch.equal(other[:32], quantized[:32])
    assert torch.equal(other[64:], quantized[64:])
    rest = [i for i in range(64) if i != 5]
    assert relative_error(x[..., rest], quantized[..., rest]) < 0.2


def test_kivi_values_are_grouped_by_channels():
    x = gaussian(10, 2, 64)
    changed = x.clone()
    changed[..., 40] += 100
    assert torch.equal(Kivi().quantize_values(x)[..., :32], Kivi().quantize_values(changed)[..., :32])
    with pytest.raises(ValueError, match="head_size=64"):
        Kivi(group_size=24).quantize_values(x)


def test_fp8_rounds_to_three_bits_of_mantissa_and_saturates():
    x = torch.tensor([[[1.0, 1.0625, 1.07, -500.0, 0.0]]])
    assert Fp8().quantize_keys(x).flatten().tolist() == [1.0, 1.0, 1.125, -448.0, 0.0]
    x = gaussian(100, 2, 64).clamp(min=0.02)
    assert float(((x - Fp8().quantize_values(x)) / x).abs().max()) <= 2**-4


def test_nova_keys_are_what_the_codec_decodes(layer):
    key = sample_keys(layer.codec, 50).float()
    indices, scale = encode_keys(key, layer.codec)
    logits = torch.einsum("thd,hd->th", decode_keys(indices, scale, layer.codec.codebook), query_side(layer.codec))
    expected = logits + (layer.codec.key_mean * torch.ones(64)).sum(-1)
    quantized = NovaKV(layer.codec).quantize_keys(key)
    torch.testing.assert_close(quantized.sum(-1), expected, rtol=1e-3, atol=1e-3)


def query_side(codec):
    """q R_K^{-T} of a query of ones."""
    return torch.einsum("d,hde->he", torch.ones(64), codec.key_transform_inv_t)


def test_least_squares_scale_is_better_than_the_norm_in_the_transformed_basis(layer):
    key = sample_keys(layer.codec, 300).float()
    center = layer.codec.key_mean

    def error(codec):
        return float(rotate(key - codec.quantize_keys(key), layer.codec.key_transform).square().sum())

    assert error(NovaKV(layer.codec)) < error(NovaKV(layer.codec, key_scale="norm"))
    assert error(NovaKV(layer.codec)) < float(rotate(key - center, layer.codec.key_transform).square().sum())


def test_symmetric_values_have_the_gaussian_distortion_of_a_uniform_quantizer(layer):
    # Max (1960), table II: four uniform levels with step 0.9957 leave 0.1188 of a Gaussian
    value = gaussian(4_000, 2, 64)
    symmetric = relative_error(value, NovaKV(layer.codec).quantize_values(value))
    assert symmetric == pytest.approx(0.1188, rel=0.03)
    assert symmetric < relative_error(value, NovaKV(layer.codec, value_format="min-max").quantize_values(value))


@pytest.mark.parametrize("name", BASELINES)
def test_every_method_keeps_shape_and_dtype_and_names_its_paper(name, layer):
    method = BASELINES[name].build(layer)
    assert method.name == name
    assert method.paper.startswith("arXiv ")
    assert vars(method.to(torch.device("meta"))).keys() == vars(method).keys()
    key, value = sample_keys(layer.codec, 33), sample_values(layer.codec, 33)
    for x, quantized in ((key, method.quantize_keys(key)), (value, method.quantize_values(value))):
        assert (quantized.shape, quantized.dtype) == (x.shape, x.dtype)
        assert torch.isfinite(quantized).all()
        assert method.quantize_keys(x[:0]).shape == (0, 2, 64)
    zero = torch.zeros(2, 2, 64)
    assert torch.equal(method.quantize_values(zero), zero)


# at head_size 64: 2 + 32/64; t + 16/64; 2 + 32/32; keys log2(32)/4 + 16/64 = 1.5, values 2.25 or 2.5
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("naive-int2", 2.5),
        ("quarot-int2", 2.5),
        ("oscar-int2", 2.5),
        ("turboquant-3", 3.25),
        ("turboquant-4", 4.25),
        ("kivi-int2", 3.0),
        ("fp8-e4m3", 8.0),
        ("novakv-least-squares-symmetric", 1.875),
        ("novakv-least-squares-min-max", 2.0),
        ("novakv-norm-min-max", 2.0),
    ],
)
def test_bits_per_element_at_head_size_64(name, bits, layer):
    assert bits_per_element(BASELINES[name].build(layer)) == bits


def test_bits_per_element_of_the_paper():
    # head size 128, 256 centroids, band of 320 tokens at 128K: 2.1875 and 2.22 for ours, 2.25 and 2.28 for OSCAR
    codec = sample_codec(head_size=128, num_centroids=256)
    paper = NovaKV(codec, key_scale="norm", value_format="min-max")
    assert bits_per_element(paper) == 2.1875
    assert bits_per_element(paper, 128 * 1024) == pytest.approx(2.1875 + 320 / 131_072 * (16 - 2.1875))
    assert round(bits_per_element(paper, 128 * 1024), 2) == 2.22
    assert bits_per_element(NovaKV(codec)) == 2.125
    oscar = Oscar(torch.eye(128).double().unsqueeze(0), torch.eye(128).double().unsqueeze(0))
    assert bits_per_element(oscar) == 2.25
    assert round(bits_per_element(oscar, 128 * 1024), 2) == 2.28


def test_short_contexts_are_exact_and_empty_ones_refused():
    assert bits_per_element(Fp8(), 320) == 16.0
    assert bits_per_element(Fp8(), 100) == 16.0
    assert bits_per_element(Fp8(), 640) == 12.0
    with pytest.raises(ValueError, match="context_tokens=0"):
        bits_per_element(Fp8(), 0)


def test_min_max_of_gaussian_data_costs_more_than_the_optimal_uniform_quantizer():
    # 128 Gaussian numbers span about 5.2 standard deviations: step 1.73 instead of 0.9957
    x = gaussian(2_000, 128)
    span = float((x.amax(-1) - x.amin(-1)).mean())
    step = span / 3
    granular = step * step / 12
    assert float((x - quantize_min_max(x)).square().mean()) == pytest.approx(granular, rel=0.2)
    assert math.isclose(step, 1.75, rel_tol=0.05)
