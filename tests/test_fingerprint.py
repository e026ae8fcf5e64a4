"""Model fingerprints: what changes them, what does not, and where the artifact of a model lies."""

import json
import struct
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import ValidationError
from safetensors.torch import save_file

from vllm_novakv.fingerprint import (
    NO_WEIGHTS,
    canonical_rope,
    default_artifact_dir,
    fingerprint_model,
    resolve_model_dir,
    sample_weights,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 192,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
}


def weights(count=40, seed=0):
    source = torch.Generator().manual_seed(seed)
    return {f"layers.{i:02}.weight": torch.randn(3, 5, generator=source) for i in range(count)}


def write_model(directory, config=None, tensors=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors")
    return directory


def test_fingerprint_has_the_config_fields(tmp_path):
    fingerprint = fingerprint_model(write_model(tmp_path / "m", tensors=weights()), None)
    assert fingerprint.architecture == "LlamaForCausalLM"
    assert (fingerprint.num_layers, fingerprint.num_heads, fingerprint.num_kv_heads) == (3, 4, 2)
    assert (fingerprint.head_size, fingerprint.hidden_size, fingerprint.vocab_size) == (64, 192, 1000)
    assert json.loads(fingerprint.rope) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert len(fingerprint.weights_sha256) == 64


def test_fingerprint_takes_given_config_over_the_file(tmp_path):
    model_dir = write_model(tmp_path / "m")
    changed = fingerprint_model(model_dir, CONFIG | {"rope_theta": 50000.0})
    assert fingerprint_model(model_dir, CONFIG) == fingerprint_model(model_dir)
    assert changed.rope != fingerprint_model(model_dir).rope


def test_fingerprint_derives_absent_fields(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "num_key_value_heads")}
    fingerprint = fingerprint_model(write_model(tmp_path / "m", config))
    assert (fingerprint.head_size, fingerprint.num_kv_heads) == (48, 4)


@pytest.mark.parametrize("nested", ["text_config", "llm_config"])
def test_fingerprint_reads_nested_decoder_config(tmp_path, nested):
    whole = {"architectures": ["SomethingForConditionalGeneration"], nested: CONFIG, "vision_config": {"depth": 4}}
    fingerprint = fingerprint_model(write_model(tmp_path / "m", whole))
    assert fingerprint.architecture == "SomethingForConditionalGeneration"
    assert (fingerprint.num_layers, fingerprint.head_size) == (3, 64)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_fingerprint_refuses_config_without_field(tmp_path, field):
    config = {key: value for key, value in CONFIG.items() if key != field}
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    with pytest.raises(ValueError, match=f"config.json does not give .*{names.get(field, field)}.*is it the directory"):
        fingerprint_model(write_model(tmp_path / "m", config))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(None, r"cannot be read \(No such file or directory\)", id="missing"),
        pytest.param(b"{", "is not valid JSON", id="truncated"),
        pytest.param(b"\xff\x00", "is not valid JSON", id="binary"),
        pytest.param(b"[]", "does not hold a JSON object", id="list"),
    ],
)
def test_fingerprint_refuses_config_file(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {reason}"):
        fingerprint_model(tmp_path)


def test_digest_is_stable_and_covers_every_field(tmp_path):
    fingerprint = fingerprint_model(write_model(tmp_path / "m"))
    assert fingerprint.digest() == fingerprint.model_copy().digest()
    assert len(fingerprint.digest()) == 16
    int(fingerprint.digest(), 16)
    for field, value in fingerprint.model_dump().items():
        changed = value + 1 if isinstance(value, int) else value + "x"
        assert fingerprint.model_copy(update={field: changed}).digest() != fingerprint.digest()


def test_fingerprint_is_frozen_and_refuses_unknown_fields(tmp_path):
    fingerprint = fingerprint_model(write_model(tmp_path / "m"))
    with pytest.raises(ValidationError, match="frozen"):
        fingerprint.num_layers = 4
    with pytest.raises(ValidationError, match="Extra inputs"):
        type(fingerprint)(**fingerprint.model_dump(), extra=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            {"rope_theta": 10000},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            id="plain",
        ),
        pytest.param(
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
            id="yarn",
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 1.0},
            {"rope_theta": 5e5},
            id="neutral-fields",
        ),
        pytest.param(
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8}},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            id="per-layer-type",
        ),
        pytest.param({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, id="defaults"),
        pytest.param(
            {"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
            },
            id="yarn-original-length",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": (3, 4)}},
            {"rope_scaling": {"long_factor": [3.0, 4.0], "short_factor": [1.0, 2.0], "rope_type": "longrope"}},
            id="lists",
        ),
    ],
)
def test_rope_does_not_depend_on_spelling(first, second):
    assert canonical_rope(first) == canonical_rope(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 20000.0},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=["theta", "partial", "yarn4", "yarn8", "linear4"],
)
def test_rope_depends_on_its_numbers(changes):
    others = [{}, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}]
    assert canonical_rope(CONFIG | changes) not in [canonical_rope(CONFIG | other) for other in others]


def test_rope_keeps_flags_that_are_not_numbers():
    assert json.loads(canonical_rope({"rope_scaling": {"rope_type": "yarn", "truncate": False}}))["truncate"] is False


def test_weights_are_none_without_files(tmp_path):
    assert sample_weights(write_model(tmp_path / "m")) == NO_WEIGHTS


def test_weights_do_not_depend_on_sharding(tmp_path):
    tensors = weights()
    whole, sharded = write_model(tmp_path / "whole", tensors=tensors), write_model(tmp_path / "sharded")
    names = sorted(tensors)
    for shard in range(3):
        save_file({name: tensors[name] for name in names[shard::3]}, sharded / f"model-{shard}.safetensors")
    assert sample_weights(whole) == sample_weights(sharded)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t["layers.00.weight"].add_(1), id="first-tensor"),
        pytest.param(lambda t: t["layers.39.weight"].add_(1), id="last-tensor"),
        pytest.param(lambda t: t.update({"layers.00.weight": t["layers.00.weight"].T.contiguous()}), id="shape"),
        pytest.param(lambda t: t.update({"layers.00.weight": t["layers.00.weight"].half()}), id="dtype"),
        pytest.param(lambda t: t.update({"other.weight": t.pop("layers.39.weight")}), id="name"),
        pytest.param(lambda t: t.update({"extra": torch.zeros(1)}), id="count"),
        pytest.param(lambda t: t.update(weights(seed=1)), id="all"),
    ],
)
def test_weights_depend_on_content(tmp_path, change):
    tensors = weights()
    before = sample_weights(write_model(tmp_path / "before", tensors=tensors))
    change(tensors)
    assert sample_weights(write_model(tmp_path / "after", tensors=tensors)) != before


def test_weights_sample_sixteen_evenly_spaced_tensors(tmp_path):
    tensors = weights(46)
    before = sample_weights(write_model(tmp_path / "before", tensors=tensors))
    seen = set()
    for place, name in enumerate(sorted(tensors)):
        original = tensors[name].clone()
        tensors[name] += 1
        if sample_weights(write_model(tmp_path / "after", tensors=tensors)) != before:
            seen.add(place)
        tensors[name] = original
    assert seen == set(range(0, 46, 3))


def test_weights_depend_on_the_number_of_tensors(tmp_path):
    tensors = weights(31)
    sampled = {name: tensors[name] for name in sorted(tensors)[::2]}
    whole, part = write_model(tmp_path / "whole", tensors=tensors), write_model(tmp_path / "part", tensors=sampled)
    assert sample_weights(whole) != sample_weights(part)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_weights_of_few_tensors(tmp_path, count):
    assert len(sample_weights(write_model(tmp_path / "m", tensors=weights(count)))) == 64


def test_weights_of_empty_and_scalar_tensors(tmp_path):
    tensors = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    assert len(sample_weights(write_model(tmp_path / "m", tensors=tensors))) == 64


def test_other_weight_files_are_sampled_at_both_ends(tmp_path):
    content = bytearray(300_000)
    path = write_model(tmp_path / "m") / "pytorch_model.bin"
    digests = set()
    for position in (None, 0, 65_535, 299_999, 300_000 - 65_536):
        changed = bytearray(content)
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        digests.add(sample_weights(path.parent))
    path.write_bytes(content + b"\0")
    digests.add(sample_weights(path.parent))
    assert len(digests) == 6
    content[150_000] = 1
    path.write_bytes(content)
    assert sample_weights(path.parent) in digests


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x10\0\0\0\0\0\0\0{}", id="short-header"),
        pytest.param(b"\xff" * 64, id="huge-header"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="list-header"),
        pytest.param(struct.pack("<Q", 8) + b'{"a": 1}', id="bad-entry"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors.*download the model again"):
        sample_weights(tmp_path)


def test_truncated_safetensors_are_refused(tmp_path):
    path = write_model(tmp_path / "m", tensors=weights()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated: .* download the model again"):
        sample_weights(path.parent)


def test_fingerprint_reads_only_a_sample(tmp_path):
    # 4 GB that take no disk space: reading them would take seconds.
    header = json.dumps(
        {f"w{i:03}": {"dtype": "F32", "shape": [2**18], "data_offsets": [i << 20, (i + 1) << 20]} for i in range(4096)}
    ).encode()
    path = write_model(tmp_path / "m") / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (4096 << 20))
    start = time.process_time()
    fingerprint_model(path.parent)
    assert time.process_time() - start < 0.5


def test_default_directory_follows_cache_home(tmp_path, monkeypatch):
    fingerprint = fingerprint_model(write_model(tmp_path / "m"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_artifact_dir(fingerprint) == tmp_path / "cache" / "vllm_novakv" / fingerprint.digest()
    for unset in (lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""), lambda: monkeypatch.delenv("XDG_CACHE_HOME")):
        unset()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        expected = tmp_path / "home" / ".cache" / "vllm_novakv" / fingerprint.digest()
        assert default_artifact_dir(fingerprint) == expected


def test_resolve_takes_a_directory(tmp_path, monkeypatch):
    model_dir = write_model(tmp_path / "m")
    assert resolve_model_dir(str(model_dir)) == model_dir
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_dir("~/m") == model_dir


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "../no/such"])
def test_resolve_refuses_missing_directory(model):
    with pytest.raises(ValueError, match="is not a directory; give a model directory or a Hugging Face id"):
        resolve_model_dir(model)


def test_resolve_refuses_directory_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a model directory in Hugging Face's format"):
        resolve_model_dir(str(tmp_path))


def test_resolve_finds_cached_model_without_network(tmp_path, monkeypatch):
    model_dir = write_model(tmp_path / "snapshot")
    asked = []

    def snapshot_download(model, *, revision, local_files_only):
        asked.append((model, revision, local_files_only))
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model_dir("org/model") == model_dir
    assert resolve_model_dir("org/model", revision="v2") == model_dir
    assert asked == [("org/model", None, True), ("org/model", "v2", True)]


@pytest.mark.parametrize("model", ["org/model", "a/b/c/d", "model with spaces"])
def test_resolve_refuses_model_that_is_not_cached(monkeypatch, model):
    def snapshot_download(model, **_):
        raise LocalEntryNotFoundError(f"no {model}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="neither a directory nor a model in the local Hugging Face cache; download"):
        resolve_model_dir(model)


def test_fingerprint_imports_neither_torch_nor_vllm():
    code = "import sys, vllm_novakv.fingerprint; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
