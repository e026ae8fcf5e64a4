"""`novakv doctor`: say whether this machine, and a model on it, can be served with the 2-bit cache.

Each check adds lines to one report; every line that would stop a server is also a problem and decides the exit code.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_novakv import __version__
from vllm_novakv.config import BAND_BLOCK_TOKENS, NovaKVConfig
from vllm_novakv.support import ModelSupport, assess_model, decoder_config, vllm_version_problem
from vllm_novakv.vllm_launcher import find_vllm_distribution

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "novakv"
BFLOAT16_BYTES = 2
DEFAULT_GROUP_SIZE = 4
# longer than any band: what a long sequence holds does not depend on its length
LONG_SEQUENCE_TOKENS = 1_000_000


@dataclass
class Report:
    """Lines of `name: text` under headings, and the problems among them."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.lines.append(text)

    def say(self, name: str, text: str) -> None:
        self.lines.append(f"  {name:<16} {text}")

    def problem(self, name: str, text: str) -> None:
        self.say(name, f"PROBLEM: {text}")
        self.problems.append(text)

    def __str__(self) -> str:
        verdict = "no problems found" if not self.problems else f"{len(self.problems)} problem(s) found"
        return "\n".join([*self.lines, verdict])


def _version_or_missing(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _describe_devices() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return f"{len(names)} GPU(s): {', '.join(names)}"
    return f"no GPU; CPU: {_processor_name()}, {os.cpu_count()} threads"


def check_environment(report: Report) -> None:
    """Report versions, devices and whether vLLM will load the plugin."""
    report.heading("Environment")
    report.say("vllm-novakv", __version__)
    report.say("python", platform.python_version())
    report.say("torch", _version_or_missing("torch"))
    report.say("triton", _version_or_missing("triton"))
    installed = find_vllm_distribution()
    if installed is None:
        report.problem("vllm", "not installed: pip install 'vllm-novakv[cpu]' or 'vllm-novakv[gpu]'")
    else:
        name, version = installed
        problem = vllm_version_problem(version)
        report.say(name, version) if problem is None else report.problem(name, problem)
    report.say("devices", _describe_devices())

    found = [
        entry for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN_NAME
    ]  # each installed copy lists one
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        report.problem("plugin", f"no {PLUGIN_GROUP} entry point {PLUGIN_NAME!r}: install with pip install .")
    elif allowed is not None and PLUGIN_NAME not in allowed.split(","):
        report.problem("plugin", f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading it: add {PLUGIN_NAME!r} to it")
    else:
        report.say("plugin", f"{found[0].name} = {found[0].value}")


def read_hf_config(model_dir: Path) -> Mapping[str, Any]:
    """Parse config.json of a model directory.

    Raises:
        ValueError: the file is missing or is not a JSON object.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{model_dir} holds no config.json; give the directory of a Hugging Face model") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a JSON object; download the model again")
    return config


def _ranges(indices: tuple[int, ...]) -> str:
    """Compact list of layer indices: (0, 1, 2, 5) becomes "0-2, 5"; nothing becomes "none"."""
    parts: list[str] = []
    start = previous = None
    for index in (*indices, None):
        if previous is not None and index == previous + 1:
            previous = index
            continue
        if start is not None:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = index
    return ", ".join(parts) or "none"


def check_model(report: Report, hf_config: Mapping[str, Any], skip_layers: tuple[int, ...] = ()) -> ModelSupport:
    """Report whether the model is supported and which layers are quantized."""
    support = assess_model(hf_config, skip_layers)
    architectures = ", ".join(hf_config.get("architectures") or ["unknown"])
    report.say("architecture", architectures)
    num_heads = decoder_config(hf_config).get("num_attention_heads")
    report.say("heads", f"{num_heads} query, {support.num_kv_heads} KV, size {support.head_size}")
    report.say("quantized", f"layers {_ranges(support.quantized_layers)} of {support.num_layers}")
    if support.bfloat16_layers:
        report.say("kept as is", f"layers {_ranges(support.bfloat16_layers)}")
    for note in support.notes:
        report.say("note", note)
    for problem in support.problems:
        report.problem("support", problem)
    return support


def report_sizes(report: Report, support: ModelSupport, group_size: int, config: NovaKVConfig) -> None:
    """Report bytes per token against BF16, bits per element and the size of the exact band."""
    from vllm_novakv.backend.band_geometry import BandGeometry
    from vllm_novakv.codec.layout import BLOCK_TOKENS, RecordLayout

    if support.head_size is None or support.num_kv_heads is None:
        return
    layout = RecordLayout(head_size=support.head_size, group_size=group_size)
    heads = support.num_kv_heads * len(support.quantized_layers)
    token_bytes = heads * layout.record_bytes
    exact_bytes = heads * 2 * support.head_size * BFLOAT16_BYTES
    report.say("bits/element", f"{layout.bits_per_element:.4g} (BF16: 16)")
    ratio = f"{exact_bytes / token_bytes:.2f} times as much"
    report.say("bytes/token", f"{token_bytes:,} of history (BF16: {exact_bytes:,}, {ratio}), and the band per sequence")
    geometry = BandGeometry(config.sink_tokens, config.recent_tokens, config.prompt_recent_tokens)
    blocks = geometry.steady_blocks(LONG_SEQUENCE_TOKENS)
    # a page of the band is as large as one of the history
    page_bytes = max(BAND_BLOCK_TOKENS * exact_bytes, BLOCK_TOKENS * token_bytes)
    mebibytes = blocks * page_bytes / 2**20
    report.say(
        "band",
        f"first {config.sink_tokens} and last {config.recent_tokens} tokens in BF16 ({config.prompt_recent_tokens} for "
        f"a prompt's tokens): up to {blocks} blocks of {BAND_BLOCK_TOKENS}, {mebibytes:.2f} MiB per decoding sequence",
    )


def check_artifact(
    report: Report,
    model: str,
    model_dir: Path,
    hf_config: Mapping[str, Any],
    quantized_layers: Sequence[int],
    artifact_dir: Path | None,
) -> int | None:
    """Report which artifact the server would use, whether it belongs to the model and has the layers.

    Returns:
        The artifact's group size; None if there is no usable artifact.
    """
    from vllm_novakv.artifact import load
    from vllm_novakv.fingerprint import check_artifact_matches, check_layers, default_artifact_dir, fingerprint_model

    fingerprint = fingerprint_model(model_dir, hf_config)
    directory = artifact_dir if artifact_dir is not None else default_artifact_dir(fingerprint)
    report.say("artifact", str(directory))
    if not directory.exists():
        report.problem("artifact", f"not there yet; run `novakv fit --model {model}`")
        return None
    try:
        artifact = load(directory)
        check_artifact_matches(artifact, fingerprint)
        check_layers(artifact, directory, quantized_layers)
    except ValueError as error:
        report.problem("artifact", str(error))
        return None
    calibration = artifact.manifest.calibration
    fitted_on = f"{calibration.num_tokens:,} tokens of {calibration.source} in sequences of {calibration.seq_len:,}"
    report.say("fitted on", f"{fitted_on}, seed {calibration.seed}")
    return artifact.manifest.group_size


def diagnose(model: str | None, config: NovaKVConfig) -> Report:
    """Run every check.

    Args:
        model: directory or cached hub name of a model; None checks the environment alone.
        config: the settings that the server would get; `config.artifact` None means the artifact that it would find.

    Returns:
        The report; it has problems exactly if a server would refuse to start.
    """
    report = Report()
    check_environment(report)
    if model is None:
        return report
    from vllm_novakv.fingerprint import resolve_model_dir

    report.heading(f"Model {model}")
    try:
        model_dir = resolve_model_dir(model)
        hf_config = read_hf_config(model_dir)
    except ValueError as error:
        report.problem("model", str(error))
        return report
    support = check_model(report, hf_config, config.skip_layers)
    if support.is_supported:
        group_size = check_artifact(report, model, model_dir, hf_config, support.quantized_layers, config.artifact)
        report_sizes(report, support, group_size or DEFAULT_GROUP_SIZE, config)
    return report
