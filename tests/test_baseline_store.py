"""Compared methods on the way into an exact history: what is stored, and that our own format reads the same."""

import pytest
import torch
from codec_samples import moment, sample_codec, sample_keys, sample_values

from vllm_novakv.baselines import BASELINES, AttentionMoments, LayerStatistics
from vllm_novakv.baselines.interface import CacheCodec, Storage
from vllm_novakv.baselines.nova import NovaKV
from vllm_novakv.baselines.scalar_methods import Kivi
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.ops.exact import ExactHistory, store_exact
from vllm_novakv.ops.reference import QuantizedHistory, paged_decode, store

NUM_BLOCKS, HEADS, SIZE = 5, 2, 64


def caches(dtype=torch.float32):
    """History and band, poisoned: nothing that was not written may be read."""
    history = torch.full((NUM_BLOCKS, HEADS, BLOCK_TOKENS, 2 * SIZE), torch.nan, dtype=dtype)
    band = torch.full((NUM_BLOCKS * BLOCK_TOKENS // 16, HEADS, 16, 2 * SIZE), torch.nan, dtype=dtype)
    return history, band


def vectors(num_tokens, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_tokens, HEADS, SIZE, generator=source).unbind()


def write(history, band, key, value, slots, baseline):
    band_slots = torch.where(slots % 2 == 0, slots, -1)
    store_exact(key, value, history, band, slots, band_slots, baseline)


def entries(cache, slots):
    return cache[slots // cache.shape[2], :, slots % cache.shape[2]].chunk(2, dim=-1)


class Halved(CacheCodec):
    """Keys halved, values doubled: what is stored can be read off."""

    name, paper = "halved", "arXiv none"
    key_storage = value_storage = Storage(1)

    def quantize_keys(self, key):
        return key / 2

    def quantize_values(self, value):
        return value * 2


def test_history_holds_what_the_method_decodes_and_the_band_stays_exact():
    key, value = vectors(6)
    history, band = caches()
    # a padding slot, and two blocks out of order
    slots = torch.tensor([300, 301, -1, 130, 131, 639])
    write(history, band, key, value, slots, Halved())
    written = slots >= 0
    stored_key, stored_value = entries(history, slots[written])
    assert torch.equal(stored_key, key[written] / 2)
    assert torch.equal(stored_value, value[written] * 2)
    assert int(history.isfinite().sum()) == 5 * HEADS * 2 * SIZE
    even = written & (slots % 2 == 0)
    assert [torch.equal(part, x[even]) for part, x in zip(entries(band, slots[even]), (key, value), strict=True)]
    assert torch.equal(entries(band, slots[even])[0], key[even])


@pytest.mark.parametrize("chunks", [[70], [1] * 70, [31, 1, 20, 18], [33, 37]], ids=["one", "tokens", "edge", "two"])
def test_groups_of_keys_are_quantized_when_their_last_token_arrives_however_it_comes(chunks):
    key, value = vectors(70)
    history, band = caches()
    slots = torch.arange(3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 70)
    method = Kivi()
    for part in torch.arange(70).split(chunks):
        write(history, band, key[part], value[part], slots[part], method)
    stored_key, stored_value = entries(history, slots)
    assert torch.equal(stored_key[:64], method.quantize_keys(key[:64]))
    assert not torch.equal(stored_key[:64], key[:64])
    assert torch.equal(stored_key[64:], key[64:])
    assert torch.equal(stored_value, method.quantize_values(value))


def test_groups_that_do_not_fill_a_block_are_refused():
    key, value = vectors(1)
    with pytest.raises(ValueError, match="key_group_tokens=48"):
        write(*caches(), key, value, torch.tensor([128]), Kivi(group_size=48))


def test_our_format_answers_the_same_from_both_histories():
    codec = sample_codec(num_heads=HEADS, head_size=SIZE)
    num_tokens, length = 300, torch.tensor([300])
    key, value = sample_keys(codec, num_tokens).float(), sample_values(codec, num_tokens).float()
    slots = torch.arange(BLOCK_TOKENS, BLOCK_TOKENS + num_tokens)
    table = torch.tensor([[1, 2, 3]])
    # the last 16 tokens are in the band
    band_slots = torch.where(torch.arange(num_tokens) >= 284, 16 + torch.arange(num_tokens) - 284, -1)
    band_table = torch.tensor([[0] * 17 + [1, 2]])
    band_slots[284:288], band_slots[288:] = 16 + torch.arange(12, 16), 32 + torch.arange(12)
    query = torch.randn(1, 4, SIZE, generator=torch.Generator().manual_seed(1))
    history, band = caches()
    packed = torch.zeros(NUM_BLOCKS, HEADS, BLOCK_TOKENS, codec.layout.record_bytes, dtype=torch.uint8)
    store(key, value, packed, band.clone(), slots, band_slots, codec)
    store_exact(key, value, history, band, slots, band_slots, NovaKV(codec))
    arguments = (band, table, band_table, length, length, SIZE**-0.5, 0, 16, 16)
    expected = paged_decode(query, QuantizedHistory(packed, codec), *arguments)
    torch.testing.assert_close(paged_decode(query, ExactHistory(history), *arguments), expected, atol=1e-4, rtol=1e-4)
    exact, exact_band = caches()
    store_exact(key, value, exact, exact_band, slots, band_slots)
    assert (paged_decode(query, ExactHistory(exact), *arguments) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("device", [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BASELINES)
def test_every_method_writes_on_every_device(name, device):
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    key, value = vectors(200)
    moments = AttentionMoments(moment(key.double()), moment(value.double()))
    layer = LayerStatistics(SIZE, moments, sample_codec(num_heads=HEADS, head_size=SIZE))
    method = BASELINES[name].build(layer)
    slots = torch.arange(BLOCK_TOKENS, BLOCK_TOKENS + 200)
    stored = []
    for target in (torch.device("cpu"), device):
        history, band = (cache.to(target) for cache in caches(torch.bfloat16))
        on = (x.to(target) for x in (key.bfloat16(), value.bfloat16(), slots))
        write(history, band, *on, method.to(target))
        stored.append(torch.cat(entries(history.cpu(), slots), -1).float())
    assert stored[0].isfinite().all()
    # codes at a cell's edge may fall to either side
    different = (stored[0] - stored[1]).abs() > 1e-2 * stored[0].abs().max()
    assert float(different.float().mean()) < 0.02
