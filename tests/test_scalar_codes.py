"""Scalar codes by hand, and equal to the served value codes where they are the same."""

import pytest
import torch
from codec_samples import sample_codec, sample_values

from vllm_novakv.baselines.rotations import rotate
from vllm_novakv.codec.quantizer import VALUE_STEP, decode_values, encode_values
from vllm_novakv.evaluation.analysis.codebooks import spread_centroids
from vllm_novakv.evaluation.analysis.scalar_codes import quantize_levels, refit_scale, round_significand


def test_levels_by_hand():
    x = torch.tensor([4.0, 0.5])
    step = 1 / float(x.square().mean().sqrt())
    assert quantize_levels(x, steps=(step,)).tolist() == [1.5, 0.5]
    assert quantize_levels(x, steps=(step,), refit="least-squares").tolist() == [3.75, 1.25]
    # s = 1 leaves an error of 6.25, s = 2 one of 1.25
    assert quantize_levels(x, steps=(step, 2 * step)).tolist() == [3.0, 1.0]
    assert quantize_levels(torch.zeros(4), refit="unbiased").tolist() == [0.0] * 4


def test_refits_by_hand():
    x, chosen = torch.tensor([4.0, 0.5]), torch.tensor([1.5, 0.5])
    scales = [float(refit_scale(x, chosen, rule)) for rule in ("least-squares", "unbiased", "norm")]
    assert scales == pytest.approx([2.5, 2.6, 6.5**0.5])
    with pytest.raises(ValueError, match="'none' is no rule"):
        refit_scale(x, chosen, "none")


def test_default_levels_are_the_served_codes():
    codec = sample_codec()
    value = sample_values(codec, 200).float()
    served = decode_values(*encode_values(value, codec.value_transform))
    again = quantize_levels(rotate(value.double(), codec.value_transform.double()), steps=(VALUE_STEP,))
    assert torch.equal(again.float(), served)


def test_search_and_refit_never_add_error():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    errors = [
        (x - quantize_levels(x, steps=steps, refit=refit)).square().sum(dim=-1)
        for steps, refit in (((1.0,), "none"), ((1.0,), "least-squares"), ((0.9, 1.0, 1.1), "least-squares"))
    ]
    # rounding of the scale: 2^-8 of ‖x̂‖ at most
    slack = 2.0**-16 * x.square().sum(dim=-1)
    assert bool((errors[1] <= errors[0] + slack).all())
    assert bool((errors[2] <= errors[1]).all())
    assert float(errors[2].sum()) < 0.98 * float(errors[0].sum())


def test_significands_by_hand():
    x = torch.tensor([1.3, 0.65, -3.9, 0.0])
    assert round_significand(x, 4).tolist() == [1.25, 0.625, -4.0, 0.0]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_significand(x, 8), x.bfloat16().float())


def test_spread_centroids_draw_every_distinct_point_once():
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    points = torch.stack([corners.repeat(5, 1), 3 * corners.repeat(5, 1)])
    drawn = spread_centroids(points, 16, seed=0)
    assert drawn.shape == (2, 16, 4)
    for book, group in zip(drawn, points, strict=True):
        assert torch.equal(book.unique(dim=0), group.unique(dim=0))
    with pytest.raises(RuntimeError):
        spread_centroids(points, 17, seed=0)
