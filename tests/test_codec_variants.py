"""Alternatives to the codec's choices: by hand, and equal to the served format where they are the same."""

import pytest
import torch
from codec_choices import merged, spread_layers
from codec_samples import sample_codec, sample_keys, sample_values
from codec_variants import LayerData, around_mean, grouped, resampled, served_keys, trained, vector_values, vectors


@pytest.fixture(scope="module")
def data():
    codec = sample_codec()
    num_tokens = 600
    weights = torch.ones(num_tokens, codec.num_kv_heads)
    keys, values = sample_keys(codec, num_tokens).float(), sample_values(codec, num_tokens).float()
    return LayerData(3, codec, keys, values, torch.arange(num_tokens), weights, weights)


def test_layers_are_spread_evenly():
    assert spread_layers(tuple(range(30)), 6) == [0, 6, 12, 17, 23, 29]
    assert spread_layers((2, 5), 6) == [2, 5]


def test_results_of_layers_are_merged():
    parts = [{"values": {"a": {"bits_per_element": 2, "layers": {layer: layer}}}} for layer in ("0", "7")]
    assert merged(parts) == {"values": {"a": {"bits_per_element": 2, "layers": {"0": "0", "7": "7"}}}}


def test_least_squares_vectors_are_the_served_keys(data):
    keys = data.keys[:50]
    assert torch.equal(vectors(data.codec).quantize(keys), served_keys(data.codec).quantize(keys))


def test_unbiased_vectors_keep_the_projection_on_the_key(data):
    codec = data.codec
    read = vectors(codec, "unbiased").quantize(data.keys)
    exact, restored = (torch.einsum("thd,hde->the", x - codec.key_mean, codec.key_transform) for x in (data.keys, read))
    # a bf16 scale is within 2^-8
    torch.testing.assert_close((exact * restored).sum(-1), exact.square().sum(-1), rtol=2**-7, atol=1e-4)


def test_vector_values_are_near_the_values_in_either_basis(data):
    for basis in ("R_V", "KLT"):
        read = vector_values(data, basis).quantize(data.values)
        error = (read - data.values).square().sum() / data.values.square().sum()
        # 32 centroids for 4 elements: 1.25 bits
        assert float(error) < 0.3


def test_weight_zero_is_never_drawn(data):
    weights = torch.zeros(600, data.codec.num_kv_heads)
    weights[7] = weights[9] = 1.0
    drawn = resampled(data, weights)
    assert drawn.shape == data.samples.shape
    assert torch.equal(drawn[0].unique(dim=0), data.samples[0, [7, 9]].unique(dim=0))


def test_books_have_the_shape_of_the_codecs_and_values_of_its_type(data):
    books = trained(data, data.samples)
    assert books.shape == data.codec.codebook.shape
    assert torch.equal(books, books.to(torch.float8_e4m3fn).float())


def test_groups_and_zero_points_by_hand():
    scaled_by_largest = grouped(lambda x: x * x.amax(dim=-1, keepdim=True))
    x = torch.cat([torch.ones(32), torch.full((32,), 3.0)])
    assert scaled_by_largest(x).tolist() == [1.0] * 32 + [9.0] * 32
    # mean 1.3, rounded to 1.25
    nothing_left = around_mean(torch.zeros_like, significand_bits=4)
    assert nothing_left(torch.tensor([1.0, 1.6])).tolist() == [1.25, 1.25]
