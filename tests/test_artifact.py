"""Artifacts: round trip, every way in which one can be wrong, and saves that are interrupted or refused."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codec_samples import sample_codec
from safetensors.torch import load_file, save_file

from vllm_novakv import atomic_directory
from vllm_novakv.artifact import (
    MANIFEST_NAME,
    TENSORS_NAME,
    Artifact,
    ArtifactError,
    CalibrationRecord,
    LayerFigures,
    build,
    check_output_directory,
    load,
    save,
)
from vllm_novakv.codec.codebook import CODEBOOK_DTYPES
from vllm_novakv.codec.quantizer import LayerCodec, encode_keys
from vllm_novakv.fingerprint import ModelFingerprint, check_artifact_matches

CALIBRATION = CalibrationRecord(
    source="sample.txt", num_tokens=4096, seq_len=1024, seed=0, vllm_version="0.32.0", created="2030-01-01T00:00:00Z"
)
FIELDS = list(LayerCodec.__dataclass_fields__)


def model_fingerprint(**changes):
    fields = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "hidden_size": 256,
        "vocab_size": 1000,
        "rope": '{"rope_theta":10000.0,"rope_type":"default"}',
        "weights_sha256": "ab" * 32,
    }
    return ModelFingerprint(**(fields | changes))


def figures(layers):
    return [
        LayerFigures(
            layer=layer,
            relative_logit_error=0.02,
            top1_agreement=0.7,
            volume_spread_bits=0.5,
            value_relative_error=0.35,
        )
        for layer in layers
    ]


def make_artifact(layers=(0, 2), book="float8_e4m3fn", seed=0, **fingerprint):
    codecs = {layer: sample_codec(num_heads=2, num_centroids=8, book=book, seed=seed + layer) for layer in layers}
    return build(
        codecs,
        fingerprint=model_fingerprint(**fingerprint),
        codebook_dtype=book,
        calibration=CALIBRATION,
        figures=figures(layers),
    )


@pytest.fixture(scope="module")
def sample():
    return make_artifact()


@pytest.fixture
def saved(sample, tmp_path):
    """An artifact on disk, fresh for each test to damage."""
    directory = tmp_path / "artifact"
    save(sample, directory)
    return directory


def edit_manifest(directory, change):
    path = directory / MANIFEST_NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(directory, change):
    """Change tensors and give the manifest the new checksum, so that only the content is wrong."""
    path = directory / TENSORS_NAME
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_manifest(directory, lambda manifest: manifest.update(tensors_sha256=digest))


def load_error(directory):
    with pytest.raises(ArtifactError) as caught:
        load(directory)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert text.startswith(f"{directory}: ")
    assert "novakv fit --model MODEL" in text
    return text


def same_tensors(first, second):
    return all(
        torch.equal(getattr(first.layers[layer], name), getattr(second.layers[layer], name))
        for layer in first.layers
        for name in FIELDS
    )


@pytest.mark.parametrize("book", CODEBOOK_DTYPES)
def test_artifact_round_trips(tmp_path, book):
    artifact = make_artifact(book=book)
    save(artifact, tmp_path / "new" / "parents" / "artifact")
    loaded = load(tmp_path / "new" / "parents" / "artifact")
    assert loaded.manifest == artifact.manifest
    assert list(loaded.layers) == [0, 2]
    assert same_tensors(artifact, loaded)


def test_same_artifact_gives_same_bytes(sample, tmp_path):
    save(sample, tmp_path / "first")
    save(make_artifact(), tmp_path / "second")
    for name in (MANIFEST_NAME, TENSORS_NAME):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_codebooks_are_stored_as_fp8(saved):
    tensors = load_file(saved / TENSORS_NAME)
    assert {name.rsplit(".", 1)[1] for name in tensors} == set(FIELDS)
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float8_e4m3fn if name.endswith("codebook") else torch.float32)


def test_manifest_derives_its_shapes(sample):
    manifest = sample.manifest
    assert (manifest.head_size, manifest.num_layers, manifest.num_kv_heads) == (64, 3, 2)
    assert (manifest.layer_indices, manifest.group_size, manifest.num_centroids) == ((0, 2), 4, 8)
    assert manifest.layout.record_bytes == 36


def test_loaded_codec_encodes_like_the_fitted_one(sample, saved):
    keys = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(3))
    for fitted, loaded in zip(
        encode_keys(keys, sample.layers[2]), encode_keys(keys, load(saved).layers[2]), strict=True
    ):
        assert torch.equal(fitted, loaded)


# Damaged or foreign artifacts


def test_load_refuses_missing_directory(tmp_path):
    assert "there is no artifact; make one with" in load_error(tmp_path / "nothing")


def test_load_refuses_file(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "there is no artifact" in load_error(tmp_path / "file")


@pytest.mark.parametrize("name", [MANIFEST_NAME, TENSORS_NAME])
def test_load_refuses_missing_file(saved, name):
    (saved / name).unlink()
    assert f"{name} cannot be read (No such file or directory)" in load_error(saved)


@pytest.mark.parametrize("version", [0, 2, "1", None], ids=str)
def test_load_refuses_format_version(saved, version):
    edit_manifest(saved, lambda manifest: manifest.update(format_version=version, future="field"))
    text = load_error(saved)
    assert f"has format_version {version}, and this version of vllm_novakv reads 1" in text
    assert "install the version that wrote it" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "is not valid JSON", id="empty"),
        pytest.param(b'{"format_version": 1, "head', "is not valid JSON", id="truncated"),
        pytest.param(b"\xff\xfe\x00binary", "is not valid JSON", id="binary"),
        pytest.param(b"[1, 2]", "does not hold a JSON object", id="list"),
        pytest.param(b"{}", "missing key 'format_version', missing key 'fingerprint'", id="no-keys"),
    ],
)
def test_load_refuses_broken_manifest(saved, content, reason):
    (saved / MANIFEST_NAME).write_bytes(content)
    assert f"{MANIFEST_NAME} " in (text := load_error(saved))
    assert reason in text


@pytest.mark.parametrize(
    "path",
    [
        "head_size",
        "num_layers",
        "num_kv_heads",
        "layer_indices",
        "group_size",
        "num_centroids",
        "codebook_dtype",
        "tensors_sha256",
        "calibration",
        "layers",
        "fingerprint",
        "format_version",
        "fingerprint.vocab_size",
        "calibration.seed",
    ],
)
def test_load_refuses_missing_key(saved, path):
    def remove(manifest):
        *parents, last = path.split(".")
        for key in parents:
            manifest = manifest[key]
        del manifest[last]

    edit_manifest(saved, remove)
    assert f"missing key '{path}'" in load_error(saved)


@pytest.mark.parametrize("parent", [None, "fingerprint", "calibration"])
def test_load_refuses_unknown_key(saved, parent):
    edit_manifest(saved, lambda manifest: (manifest if parent is None else manifest[parent]).update(extra=1))
    assert f"unknown key '{f'{parent}.extra' if parent else 'extra'}'" in load_error(saved)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"head_size": "64"}, "valid integer 'head_size'", id="type"),
        pytest.param({"num_centroids": 257}, "less than or equal to 256 'num_centroids'", id="centroids"),
        pytest.param({"codebook_dtype": "float16"}, "'float8_e5m2' or 'int8' 'codebook_dtype'", id="fp16"),
        pytest.param({"tensors_sha256": "xyz"}, "'tensors_sha256'", id="checksum"),
        pytest.param({"layer_indices": []}, "'layer_indices'", id="no-layers"),
        pytest.param({"layer_indices": [0, 3]}, r"layer_indices [0, 3] are not ascending layers", id="beyond"),
        pytest.param({"layer_indices": [2, 0]}, r"layer_indices [2, 0] are not ascending layers", id="order"),
        pytest.param({"layer_indices": [-1, 0]}, r"layer_indices [-1, 0] are not ascending layers", id="negative"),
        pytest.param({"layer_indices": [0, 1]}, r"has figures of layers [0, 2]", id="figures"),
        pytest.param({"head_size": 128}, "head_size is 128, but 64 in the model's fingerprint", id="head-size"),
        pytest.param({"num_layers": 4}, "num_layers is 4, but 3 in the model's fingerprint", id="layer-count"),
        pytest.param({"num_kv_heads": 1}, "num_kv_heads is 1, but 2 in the model's fingerprint", id="kv-heads"),
        pytest.param({"group_size": 8}, "codebook has shape [2, 16, 8, 4], but the manifest implies", id="groups"),
        pytest.param({"num_centroids": 9}, "the manifest implies [2, 16, 9, 4]", id="num-centroids"),
        pytest.param({"codebook_dtype": "float8_e5m2"}, "has torch.float8_e5m2 there", id="codebook-dtype"),
    ],
)
def test_load_refuses_contradicting_manifest(saved, changes, reason):
    edit_manifest(saved, lambda manifest: manifest.update(changes))
    assert reason in load_error(saved)


def test_load_refuses_non_finite_figure(saved):
    edit_manifest(saved, lambda manifest: manifest["layers"][0].update(top1_agreement=float("nan")))
    assert "'layers.0.top1_agreement'" in load_error(saved)


def test_load_refuses_unsupported_group_size(saved):
    edit_manifest(saved, lambda manifest: manifest.update(group_size=5))
    with pytest.raises(ArtifactError, match=r"artifact: head_size=64 is not divisible by group_size=5; refit the"):
        load(saved)


@pytest.mark.parametrize("head_size", [96, 80])
def test_load_refuses_unsupported_head_size(saved, head_size):
    def change(manifest):
        manifest["head_size"] = manifest["fingerprint"]["head_size"] = head_size

    edit_manifest(saved, change)
    with pytest.raises(ArtifactError, match=f"head_size={head_size} is not supported: .* 64, 128, 256"):
        load(saved)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        pytest.param(
            "head_size", 128, "codebook has shape [2, 16, 8, 4], but the manifest implies [2, 32, 8, 4]", id="head-size"
        ),
        pytest.param(
            "num_kv_heads", 4, "codebook has shape [2, 16, 8, 4], but the manifest implies [4, 16, 8, 4]", id="kv-heads"
        ),
    ],
)
def test_load_refuses_tensors_of_other_shapes(saved, field, value, reason):
    def change(manifest):
        manifest[field] = manifest["fingerprint"][field] = value

    edit_manifest(saved, change)
    assert reason in load_error(saved)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1], ids=lambda kept: f"kept{kept}")
def test_load_refuses_truncated_tensors(saved, kept):
    path = saved / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{TENSORS_NAME} is damaged: its SHA-256 is" in load_error(saved)


@pytest.mark.parametrize("position", [0.0, 0.001, 0.5, 0.999], ids=lambda position: f"at{position}")
def test_load_refuses_flipped_bit(saved, position):
    path = saved / TENSORS_NAME
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 4
    path.write_bytes(content)
    text = load_error(saved)
    assert f"{TENSORS_NAME} is damaged: its SHA-256 is" in text
    assert "copy the artifact again" in text


def test_load_refuses_tensor_file_of_another_kind(saved):
    content = b"not a safetensors file" * 10
    (saved / TENSORS_NAME).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit_manifest(saved, lambda manifest: manifest.update(tensors_sha256=digest))
    assert f"{TENSORS_NAME} is not a safetensors file" in load_error(saved)


# float8_e4m3fn has no infinity; float8_e5m2 has its own test.
NON_FINITE = [
    pytest.param(field, value, id=f"{field}-{value}")
    for field in FIELDS
    for value in (float("nan"), float("inf"), -float("inf"))
    if field != "codebook" or value != value
]


@pytest.mark.parametrize(("field", "value"), NON_FINITE)
def test_load_refuses_non_finite_tensor(saved, field, value):
    name = f"layers.2.{field}"

    def spoil(tensors):
        as_float = tensors[name].float()
        as_float.view(-1)[7] = value
        tensors[name] = as_float.to(tensors[name].dtype)

    edit_tensors(saved, spoil)
    assert f"{name} has non-finite values" in load_error(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_load_refuses_non_finite_e5m2_centroid(tmp_path, value):
    save(make_artifact(book="float8_e5m2"), tmp_path / "artifact")

    def spoil(tensors):
        as_float = tensors["layers.0.codebook"].float()
        as_float[1, 2, 3, 0] = value
        tensors["layers.0.codebook"] = as_float.to(torch.float8_e5m2)

    edit_tensors(tmp_path / "artifact", spoil)
    assert "layers.0.codebook has non-finite values" in load_error(tmp_path / "artifact")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("field", FIELDS)
def test_load_refuses_wrong_dtype(saved, field, dtype):
    name = f"layers.0.{field}"
    edit_tensors(saved, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    expected = "torch.float8_e4m3fn" if field == "codebook" else "torch.float32"
    assert f"{name} is {dtype}, and the format has {expected} there" in load_error(saved)


@pytest.mark.parametrize("field", FIELDS)
def test_load_refuses_wrong_shape(saved, field):
    name = f"layers.0.{field}"
    edit_tensors(saved, lambda tensors: tensors.update({name: tensors[name].float()[:1].to(tensors[name].dtype)}))
    assert f"{name} has shape [1, " in load_error(saved)


def test_load_refuses_missing_tensor(saved):
    edit_tensors(saved, lambda tensors: tensors.pop("layers.2.value_transform"))
    assert f"{TENSORS_NAME} lacks layers.2.value_transform" in load_error(saved)


def test_load_refuses_unknown_tensor(saved):
    edit_tensors(saved, lambda tensors: tensors.update({"layers.1.key_mean": torch.zeros(2, 64)}))
    assert f"{TENSORS_NAME} has the unknown tensor layers.1.key_mean" in load_error(saved)


def test_load_refuses_value_transform_that_is_not_orthogonal(saved):
    edit_tensors(saved, lambda tensors: tensors["layers.2.value_transform"][1].mul_(1.01))
    assert "layers.2: value_transform is not orthogonal (off by 0.02, at most 0.001)" in load_error(saved)


@pytest.mark.parametrize("field", ["key_transform", "key_transform_inv_t"])
def test_load_refuses_pair_that_is_not_inverse(saved, field):
    edit_tensors(saved, lambda tensors: tensors[f"layers.0.{field}"][0].mul_(1.02))
    text = load_error(saved)
    assert "layers.0: key_transform_inv_t is not the inverse of key_transform (off by 0.02, at most 0.01)" in text


def test_load_refuses_swapped_layers(saved):
    def swap(tensors):
        first, second = "layers.0.key_transform", "layers.2.key_transform"
        tensors[first], tensors[second] = tensors[second], tensors[first]

    edit_tensors(saved, swap)
    assert "layers.0: key_transform_inv_t is not the inverse" in load_error(saved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("architecture", "Qwen2ForCausalLM", id="architecture"),
        pytest.param("num_layers", 4, id="num-layers"),
        pytest.param("num_heads", 8, id="num-heads"),
        pytest.param("num_kv_heads", 1, id="num-kv-heads"),
        pytest.param("head_size", 128, id="head-size"),
        pytest.param("hidden_size", 512, id="hidden-size"),
        pytest.param("vocab_size", 1001, id="vocab-size"),
        pytest.param("rope", '{"rope_theta":50000.0,"rope_type":"default"}', id="rope"),
        pytest.param("weights_sha256", "cd" * 32, id="weights"),
    ],
)
def test_artifact_of_another_model_is_refused(sample, field, value):
    check_artifact_matches(sample, model_fingerprint())
    own = getattr(model_fingerprint(), field)
    with pytest.raises(ArtifactError, match="fitted for another model") as caught:
        check_artifact_matches(sample, model_fingerprint(**{field: value}))
    assert f"{field} is {own} in the artifact and {value} in the model" in str(caught.value)
    assert "novakv fit --model MODEL" in str(caught.value)


def test_every_differing_field_is_named(sample):
    with pytest.raises(ArtifactError, match=r"num_layers is 3 .* and 5 .*; vocab_size is 1000 .* and 7 in the model"):
        check_artifact_matches(sample, model_fingerprint(num_layers=5, vocab_size=7))


# Building


def test_build_refuses_centroids_outside_the_type():
    codec = sample_codec(num_centroids=8)
    finer = LayerCodec(*(getattr(codec, name) for name in FIELDS[:4]), codec.codebook + 0.001)
    with pytest.raises(ArtifactError, match=r"layers.0.codebook holds values that float8_e4m3fn lacks; snap"):
        build(
            {0: finer},
            fingerprint=model_fingerprint(),
            codebook_dtype="float8_e4m3fn",
            calibration=CALIBRATION,
            figures=figures([0]),
        )


def test_build_refuses_no_layers():
    with pytest.raises(ArtifactError, match="no layer was fitted"):
        build({}, fingerprint=model_fingerprint(), codebook_dtype="float8_e5m2", calibration=CALIBRATION, figures=[])


@pytest.mark.parametrize(
    ("codecs", "reason"),
    [
        pytest.param({0: {"num_heads": 3}}, "num_kv_heads is 3, but 2 in the model's fingerprint", id="heads"),
        pytest.param({0: {"head_size": 128}}, "head_size is 128, but 64 in the model's fingerprint", id="head-size"),
        pytest.param({0: {}, 1: {"num_centroids": 16}}, r"layers.1.codebook has shape \[2, 16, 16, 4\]", id="mixed"),
        pytest.param({3: {}}, r"layer_indices \[3\] are not ascending layers of a model with 3", id="layer"),
    ],
)
def test_build_refuses_layers_that_do_not_fit(codecs, reason):
    layers = {layer: sample_codec(**({"num_centroids": 8} | options)) for layer, options in codecs.items()}
    with pytest.raises(ArtifactError, match=reason):
        build(
            layers,
            fingerprint=model_fingerprint(),
            codebook_dtype="float8_e4m3fn",
            calibration=CALIBRATION,
            figures=figures(layers),
        )


def test_build_refuses_figures_of_other_layers():
    with pytest.raises(ArtifactError, match=r"figures of layers \[1\], but layer_indices are \[0\]"):
        build(
            {0: sample_codec(num_centroids=8)},
            fingerprint=model_fingerprint(),
            codebook_dtype="float8_e4m3fn",
            calibration=CALIBRATION,
            figures=figures([1]),
        )


def test_artifact_refuses_layers_that_the_manifest_lacks(sample):
    with pytest.raises(ArtifactError, match=r"tensors of layers \[0\], but its manifest lists \[0, 2\]"):
        Artifact(sample.manifest, {0: sample.layers[0]})


def test_save_refuses_foreign_checksum(sample, tmp_path):
    other = make_artifact(seed=50)
    with pytest.raises(ArtifactError, match=r"tensors_sha256 is not that of the tensors; make artifacts with build"):
        save(Artifact(sample.manifest, other.layers), tmp_path / "artifact")
    assert list(tmp_path.iterdir()) == []


# Saving


def test_save_replaces_earlier_artifact(saved):
    newer = make_artifact(seed=7)
    save(newer, saved)
    assert load(saved).manifest.tensors_sha256 == newer.manifest.tensors_sha256
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_save_replaces_without_exchange(saved, monkeypatch):
    monkeypatch.setattr(atomic_directory, "_exchange", lambda first, second: False)
    newer = make_artifact(seed=7)
    save(newer, saved)
    assert load(saved).manifest.tensors_sha256 == newer.manifest.tensors_sha256
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_failed_replacement_without_exchange_restores_the_earlier(sample, saved, monkeypatch):
    monkeypatch.setattr(atomic_directory, "_exchange", lambda first, second: False)
    rename = Path.rename

    def fail_for_staging(self, target):
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_staging)
    with pytest.raises(ArtifactError, match="Input/output error"):
        save(make_artifact(seed=7), saved)
    monkeypatch.undo()
    assert load(saved).manifest == sample.manifest
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_save_follows_a_link_to_its_directory(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved, target_is_directory=True)
    newer = make_artifact(seed=7)
    save(newer, link)
    assert link.is_symlink()
    assert load(saved).manifest == newer.manifest


def test_save_fills_an_empty_directory(sample, tmp_path):
    (tmp_path / "empty").mkdir()
    save(sample, tmp_path / "empty")
    assert load(tmp_path / "empty").manifest == sample.manifest


@pytest.mark.parametrize("attempt", [save, lambda artifact, directory: check_output_directory(directory)])
def test_save_keeps_other_peoples_files(sample, tmp_path, attempt):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ArtifactError, match=r"holds other things \(thesis.txt\).*choose another --out directory"):
        attempt(sample, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("attempt", [save, lambda artifact, directory: check_output_directory(directory)])
def test_save_refuses_file_as_target(sample, tmp_path, attempt):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match=r"is a file, not a directory.*choose another --out directory"):
        attempt(sample, tmp_path / "file")
    with pytest.raises(
        ArtifactError, match=r"file/below: the artifact cannot be written \(File exists: .*file\); choose"
    ):
        attempt(sample, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("attempt", [save, lambda artifact, directory: check_output_directory(directory)])
def test_save_refuses_unwritable_directory(sample, tmp_path, monkeypatch, attempt):
    mkdir = Path.mkdir

    def refuse_inside(self, *args, **kwargs):
        # Permission bits do not stop a superuser, so the system's answer is simulated.
        if self.parent == tmp_path / "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return mkdir(self, *args, **kwargs)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse_inside)
    with pytest.raises(
        ArtifactError, match=r"cannot be written \(Permission denied: .*\); choose another --out directory"
    ):
        attempt(sample, tmp_path / "locked" / "artifact")
    assert list((tmp_path / "locked").iterdir()) == []


def test_output_check_leaves_no_trace(tmp_path):
    check_output_directory(tmp_path / "new" / "artifact")
    assert list((tmp_path / "new").iterdir()) == []


def test_output_check_accepts_earlier_artifact(sample, saved):
    check_output_directory(saved)
    assert load(saved).manifest == sample.manifest


INTERRUPTIONS = [
    pytest.param(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ArtifactError, id="disk-full"),
    pytest.param(KeyboardInterrupt(), KeyboardInterrupt, id="ctrl-c"),
]


@pytest.mark.parametrize(("interruption", "expected"), INTERRUPTIONS)
@pytest.mark.parametrize("flush", [0, 1, 2], ids=["in-first-file", "in-second-file", "before-rename"])
@pytest.mark.parametrize("has_earlier", [False, True], ids=["new", "replace"])
def test_interrupted_save_leaves_nothing_half_written(
    sample, tmp_path, monkeypatch, interruption, expected, flush, has_earlier
):
    directory = tmp_path / "artifact"
    if has_earlier:
        save(sample, directory)
    calls = iter(range(100))
    fsync = os.fsync

    def interrupt(descriptor):
        if next(calls) == flush:
            raise interruption
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(expected):
        save(make_artifact(seed=7), directory)
    monkeypatch.undo()
    if has_earlier:
        assert load(directory).manifest == sample.manifest
        assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_earlier", [False, True], ids=["new", "replace"])
def test_killed_save_leaves_old_or_nothing_under_the_name(sample, tmp_path, has_earlier):
    directory = tmp_path / "artifact"
    if has_earlier:
        save(sample, directory)
    script = (
        "import os, sys; from pathlib import Path; from vllm_novakv import atomic_directory;"
        "atomic_directory._take_name = lambda staging, target: os.kill(os.getpid(), 9);"
        f"atomic_directory.write_directory(Path(sys.argv[1]), {{'{MANIFEST_NAME}': b'x', '{TENSORS_NAME}': b'y'}})"
    )
    done = subprocess.run([sys.executable, "-c", script, str(directory)], cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == -9
    if has_earlier:
        assert load(directory).manifest == sample.manifest
    else:
        assert "there is no artifact" in load_error(directory)
    save(sample, directory)
    assert load(directory).manifest == sample.manifest
