"""The codec-level study: how its tensors are cut out of a capture, and that one ends in a report."""

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_model import random_text, save_tiny_llama

from vllm_novakv.calibration.moments import chunk_moments
from vllm_novakv.cli import main as novakv
from vllm_novakv.codec_study import choose_layers, fitted_head, held_out_head


def test_layers_are_those_asked_for_or_three_across_the_depth():
    assert choose_layers(range(30), []) == [1, 15, 29]
    assert choose_layers([5], []) == [5]
    assert choose_layers(range(4), [3, 0, 3]) == [0, 3]
    with pytest.raises(ValueError, match=r"layers \[9\] have no full attention; choose from \[0, 1\]"):
        choose_layers([0, 1], [9])


def test_a_head_is_fitted_on_its_own_moments_and_measured_with_its_own_queries():
    source = torch.Generator().manual_seed(0)
    query, key = (torch.randn(600, heads, 8, generator=source) for heads in (6, 2))
    capture = SimpleNamespace(
        moments=chunk_moments(query, key, query), keys=key[:50], heldout_query=query, heldout_key=key + 1
    )
    train = fitted_head(capture, 1)
    assert torch.equal(train.keys, key[:50, 1])
    own = query[:, 3:].double().reshape(-1, 8)
    torch.testing.assert_close(train.statistics.query_moment, own.mT @ own / len(own))
    torch.testing.assert_close(train.statistics.key_covariance, key[:, 1].double().T.cov(correction=0))
    test = held_out_head(capture, 1)
    # every second of 600 positions, three query heads each
    assert test.positions.tolist()[:7] == [0, 0, 0, 2, 2, 2, 4]
    assert test.queries.shape == (900, 8)
    assert torch.equal(test.queries[4], query[2, 4])
    assert torch.equal(test.keys, key[:, 1] + 1)


@pytest.mark.e2e
def test_a_study_ends_in_a_report(tmp_path, capsys):
    pytest.importorskip("vllm")
    model = save_tiny_llama(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(random_text(3_000))
    arguments = ["eval", "codec", "--model", str(model), "--prompts", str(prompts), "--num-tokens", "1100"]
    arguments += ["--layers", "1", "--dtype", "float32", "--out", str(tmp_path / "study")]
    assert novakv(arguments) == 0
    study = json.loads((tmp_path / "study" / "study.json").read_text())
    assert [(head["layer"], head["head"], len(head["bases"])) for head in study["heads"]] == [(1, 0, 15)]
    assert study["settings"]["seq_len"] == 512
    assert str(tmp_path) not in json.dumps(study)
    by_pair = {(row["basis"], row["quantizer"]): row["query_weighted"] for row in study["heads"][0]["bases"]}
    assert by_pair["ours", "vq"] < by_pair["ours", "fixed-sq"]
    assert novakv(["eval", "report", str(tmp_path / "study"), "--out", str(tmp_path / "report")]) == 0
    plots = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert plots == ["study1-distortion.png", "study1-rates.png", "study1-volumes.png"]
    assert novakv(arguments) == 1
    assert "holds a study already" in capsys.readouterr().err
