"""Errors of banded attention by hand, and against a dense computation in float64."""

import math

import pytest
import torch

from vllm_novakv.evaluation.analysis.attention_error import AttentionErrors, Band, attention_errors, key_importance


def tensor(*rows):
    """f32 [rows, 1 head, size]."""
    return torch.tensor(rows, dtype=torch.float32).unsqueeze(1)


def test_history_lies_between_sink_and_recent():
    history = Band(1, 2).is_history(torch.tensor([2, 4]), 6)
    assert history.tolist() == [[False] * 6, [False, True, True, False, False, False]]


def test_errors_by_hand():
    # size 1; q = ln 3 makes the weights of keys 0 and 1 (1/4, 3/4), and of quantized keys 0 and 0 (1/2, 1/2)
    query, positions = tensor([math.log(3)]), torch.tensor([1])
    exact = tensor([0.0], [1.0]), tensor([8.0], [4.0])
    quantized = tensor([0.0], [0.0]), tensor([8.0], [2.0])
    sums = attention_errors(query, positions, exact, quantized, Band(0, 0))
    # o = 5; quantized keys give 6, quantized values 3.5, both 5
    assert sums.output_energy == pytest.approx(25)
    assert sums.key_noise == pytest.approx(1)
    assert sums.value_noise == pytest.approx(2.25)
    assert sums.output_noise == pytest.approx(0, abs=1e-10)
    assert sums.logit_noise == sums.logit_energy == pytest.approx(math.log(3) ** 2)
    figures = sums.figures()
    assert figures["output_error_of_keys"] == pytest.approx(0.2)
    assert figures["top1_agreement"] == 0
    assert figures["history_mass"] == pytest.approx(1)


def test_band_is_read_exactly():
    query, positions = tensor([math.log(3)]), torch.tensor([1])
    exact = tensor([0.0], [1.0]), tensor([8.0], [4.0])
    poison = torch.full_like(exact[0], 1e6)
    sums = attention_errors(query, positions, exact, (poison, poison), Band(1, 1))
    assert sums == AttentionErrors(1, 1, 0, sums.logit_energy, 0, sums.output_energy, 0, 0, 0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (7, 1)], ids=["h1-kv1", "h4-kv2", "h7-kv1"])
def test_errors_equal_a_dense_computation(heads, kv_heads):
    source = torch.Generator().manual_seed(0)
    size, tokens, band = 8, 40, Band(3, 5)
    query = torch.randn(tokens, heads, size, generator=source)
    key, value, new_key, new_value = (torch.randn(tokens, kv_heads, size, generator=source) for _ in range(4))
    positions = torch.tensor([12, 25, 39])
    sums = attention_errors(query[positions], positions, (key, value), (new_key, new_value), band)
    output_noise = output_energy = 0.0
    for position in positions.tolist():
        for head in range(heads):
            seen, own = slice(0, position + 1), head * kv_heads // heads
            keys, values = key[seen, own].double(), value[seen, own].double()
            mixed_keys, mixed_values = keys.clone(), values.clone()
            history = slice(3, position + 1 - 5)
            mixed_keys[history], mixed_values[history] = new_key[history, own], new_value[history, own]
            row = query[position, head].double() / math.sqrt(size)
            output = (keys @ row).softmax(0) @ values
            output_energy += float(output.square().sum())
            output_noise += float(((mixed_keys @ row).softmax(0) @ mixed_values - output).square().sum())
    assert sums.num_rows == 3 * heads
    assert sums.output_energy == pytest.approx(output_energy, rel=1e-5)
    assert sums.output_noise == pytest.approx(output_noise, rel=1e-5)


def test_key_importance_by_hand():
    # weights (1/4, 3/4), values 8 and 4, o = 5: sensitivities (1/16 · 9, 9/16 · 1)
    query, positions = tensor([math.log(3)]), torch.tensor([1])
    mass, sensitivity = key_importance(query, positions, tensor([0.0], [1.0]), tensor([8.0], [4.0]), Band(0, 0))
    assert mass.flatten().tolist() == pytest.approx([0.25, 0.75])
    assert sensitivity.flatten().tolist() == pytest.approx([9 / 16, 9 / 16])
    mass, _ = key_importance(query, positions, tensor([0.0], [1.0]), tensor([8.0], [4.0]), Band(1, 0))
    assert mass.flatten().tolist() == pytest.approx([0, 0.75])
