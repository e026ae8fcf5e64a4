"""Does it matter what a model is calibrated on? One artifact per calibration set, all measured on the same text.

    python benchmarks/calibration_ablation.py --model MODEL --text essays.txt --out ablation \\
        --sets gpqa=gpqa.csv gpqa-small=gpqa.csv:8900 essays=essays.txt:40000

A set is NAME=FILE, or NAME=FILE:TOKENS to fit on the file's first tokens only. Every set is fitted and measured by the
public commands (`novakv fit`, `novakv eval perplexity`, `novakv eval needles`), with vLLM's own cache as the reference,
and the report compares them. What is there already is neither fitted nor measured again.

Source: arXiv 2608.04074, section 9.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_novakv.cli import main as novakv

REFERENCE = "stock"


@dataclass(frozen=True)
class CalibrationSet:
    """A calibration text.

    Attributes:
        name: of its row in the report.
        file: prompt file.
        num_tokens: tokens to fit on; None takes what the file gives.
    """

    name: str
    file: Path
    num_tokens: int | None


def parse_set(text: str) -> CalibrationSet:
    """A set from NAME=FILE or NAME=FILE:TOKENS.

    Example: "small=gpqa.csv:8900" is 8,900 tokens of gpqa.csv, named small.
    """
    name, equals, rest = text.partition("=")
    file, colon, tokens = rest.rpartition(":")
    if not colon or not tokens.isdigit():
        file, tokens = rest, ""
    if not (name and equals and file) or name == REFERENCE:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE or NAME=FILE:TOKENS, with a name of its own")
    return CalibrationSet(name, Path(file), int(tokens) if tokens else None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--sets", type=parse_set, nargs="+", required=True, help="calibration sets")
    parser.add_argument("--text", type=Path, required=True, help="plain text that is measured (UTF-8)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens per calibration sequence (default: 4096)")
    parser.add_argument("--window-tokens", type=int, default=4096, help="perplexity window (default: 4096)")
    parser.add_argument("--num-windows", type=int, default=16, help="windows (default: 16)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="needle lengths (default: no needles)")
    parser.add_argument("--num-items", type=int, default=25, help="needle prompts per task and length (default: 25)")
    parser.add_argument("--dtype", default="auto", help="the model's type (default: auto)")
    parser.add_argument("--out", type=Path, required=True, help="folder for artifacts, runs and the report")
    return parser.parse_args()


def run(*arguments: object) -> None:
    """One public command.

    Raises:
        SystemExit: it failed; its message has been printed.
    """
    if status := novakv([str(argument) for argument in arguments]):
        sys.exit(status)


def main() -> None:
    options = parse_arguments()
    runs: list[Path] = []
    common = ["--model", options.model, "--text", options.text, "--dtype", options.dtype, "--out", options.out / "runs"]

    def measure(method: str, *cache: object) -> None:
        windows = ["--window-tokens", options.window_tokens, "--num-windows", options.num_windows]
        run("eval", "perplexity", *common, *windows, "--method", method, *cache)
        runs.append(options.out / "runs" / method / f"perplexity-{options.window_tokens}")
        if options.lengths:
            needles = ["--lengths", *options.lengths, "--num-items", options.num_items]
            run("eval", "needles", *common, *needles, "--method", method, *cache)
            runs.extend(options.out / "runs" / method / f"needles-{length}" for length in options.lengths)

    measure(REFERENCE, "--cache", "stock")
    for chosen in options.sets:
        artifact = options.out / "artifacts" / chosen.name
        if not artifact.exists():
            tokens = [] if chosen.num_tokens is None else ["--num-tokens", chosen.num_tokens]
            fit = ["--model", options.model, "--prompts", chosen.file, "--seq-len", options.seq_len, *tokens]
            run("fit", *fit, "--dtype", options.dtype, "--out", artifact)
        measure(chosen.name, "--cache", "novakv", "--novakv", json.dumps({"artifact": str(artifact.resolve())}))
    run("eval", "report", *runs, "--reference", REFERENCE, "--out", options.out / "report")


if __name__ == "__main__":
    main()
