"""Saved moments of a model: what comes back, and what is refused."""

import json

import pytest
import torch
from test_artifact import model_fingerprint

from vllm_novakv.artifact import ArtifactError, CalibrationRecord
from vllm_novakv.baselines.moments import (
    AttentionMoments,
    check_moments_directory,
    load_moments,
    moments_directory,
    save_moments,
)

RECORD = CalibrationRecord(source="text", num_tokens=5, seq_len=5, seed=0, vllm_version="0", created="")


def random_moment(seed, num_heads=2):
    x = torch.randn(num_heads, 80, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.mT @ x


def sample_moments(**changes):
    moments = {"query_moment": random_moment(1), "output_moment": random_moment(2)}
    return AttentionMoments(**(moments | changes))


def save(directory, layers=None):
    return save_moments(layers or {2: sample_moments(), 0: sample_moments()}, model_fingerprint(), RECORD, directory)


def test_what_was_saved_is_loaded(tmp_path):
    directory = moments_directory(tmp_path / "model")
    assert directory == tmp_path / "model-moments"
    save(directory)
    saved = load_moments(directory)
    assert saved.manifest.layer_indices == (0, 2)
    assert saved.manifest.fingerprint == model_fingerprint()
    assert torch.equal(saved.layers[2].query_moment, random_moment(1))
    assert torch.equal(saved.layers[2].shard(1, 1).output_moment, random_moment(2)[1:])
    # again: replaced, not refused
    save(directory, {1: sample_moments()})
    assert load_moments(directory).manifest.layer_indices == (1,)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        pytest.param(random_moment(1).float(), "torch.float32", id="float32"),
        pytest.param(random_moment(1, num_heads=3), r"\[3, 64, 64\], not torch.float64 \[2, 64, 64\]", id="heads"),
        pytest.param(random_moment(1) * torch.nan, "not finite", id="nan"),
        pytest.param(0 * random_moment(1), "zero", id="zero"),
        pytest.param(random_moment(1).triu(), "not symmetric", id="triangle"),
    ],
)
def test_tensors_that_are_no_moments_are_not_written(tmp_path, moment, words):
    with pytest.raises(ArtifactError, match=words):
        save(tmp_path / "moments", {0: sample_moments(query_moment=moment)})
    assert not (tmp_path / "moments").exists()


def test_missing_and_damaged_moments_are_refused_with_what_to_do(tmp_path):
    directory = tmp_path / "moments"
    with pytest.raises(ArtifactError, match="novakv fit --model MODEL --save-moments"):
        load_moments(directory)
    save(directory)
    manifest = directory / "manifest.json"
    content = json.loads(manifest.read_text())
    for change, words in (
        ({"format_version": 2}, "format_version is 2"),
        ({"layer_indices": [0]}, r"layers\.2\.\w+ is missing or not of a listed layer"),
        ({"tensors_sha256": "0" * 64}, "damaged"),
        ({"extra": 1}, "manifest.json is invalid"),
    ):
        manifest.write_text(json.dumps(content | change))
        with pytest.raises(ArtifactError, match=words) as error:
            load_moments(directory)
        assert "--save-moments" in str(error.value)
    manifest.unlink()
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_moments(directory)


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="choose another --out"):
        check_moments_directory(tmp_path)
    with pytest.raises(ArtifactError, match="choose another --out"):
        save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
