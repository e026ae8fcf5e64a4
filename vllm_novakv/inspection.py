"""`novakv inspect`: an artifact as a table that a person can read."""

from collections.abc import Sequence

from vllm_novakv.artifact import Artifact
from vllm_novakv.codec.layout import RecordLayout


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under a header and a rule.

    Example: `format_table(["a", "long"], [["10", "2"]])` gives three lines: " a  long", "--  ----", "10     2".

    Args:
        header: one title per column.
        rows: cells, as many per row as there are titles.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, rule, *rows]
    )


def describe_artifact(artifact: Artifact) -> str:
    """Format, origin and per-layer quality of an artifact.

    Args:
        artifact: a loaded, and so verified, artifact.

    Returns:
        Several lines of text, ending in one table row per quantized layer and the mean of each column.
    """
    manifest = artifact.manifest
    layout = RecordLayout(head_size=manifest.head_size, group_size=manifest.group_size)
    model, calibration = manifest.fingerprint, manifest.calibration
    lines = [
        f"model        {model.architecture}, {manifest.num_layers} layers, {manifest.num_kv_heads} KV heads "
        f"of size {manifest.head_size} (fingerprint {model.digest()})",
        f"format       version {manifest.format_version}: {layout.num_groups} groups of {layout.group_size} "
        f"dimensions, {manifest.num_centroids} centroids each in {manifest.codebook_dtype}",
        f"size         {layout.record_bytes} bytes per token and KV head, {layout.bits_per_element:.4g} bits per "
        "element (BF16: 16)",
        f"calibration  {calibration.num_tokens:,} tokens of {calibration.source} in sequences of "
        f"{calibration.seq_len:,}, seed {calibration.seed}, vLLM {calibration.vllm_version}",
        "",
    ]
    header = ["layer", "rel. logit error", "top-1 agreement", "volume spread (bits)", "rel. value error"]
    figures = [
        (layer.relative_logit_error, layer.top1_agreement, layer.volume_spread_bits, layer.value_relative_error)
        for layer in manifest.layers
    ]
    rows = [
        [str(layer.layer), *(f"{value:.4f}" for value in values)]
        for layer, values in zip(manifest.layers, figures, strict=True)
    ]
    if figures:
        means = [sum(column) / len(column) for column in zip(*figures, strict=True)]
        rows.append(["mean", *(f"{value:.4f}" for value in means)])
    return "\n".join([*lines, format_table(header, rows)])
