"""The command line of a fit, shared by `python calib/fit.py` and `novakv fit`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vllm_novakv.codec.codebook import CODEBOOK_DTYPES, DEFAULT_DTYPE

if TYPE_CHECKING:
    from vllm_novakv.calibration.pipeline import FitResult

_INTERRUPTED_EXIT_STATUS = 130

_DESCRIPTION = """Calibrate a model for the 2-bit KV cache: run it on text inside vLLM, fit the transforms and
codebooks, write the artifact that a server loads."""

_EPILOG = """prompt files:
  .txt    the whole file is one text
  .jsonl  one JSON string or object per line
  .csv    one prompt per row, column names in the first row
Of a row or object, --prompt-columns picks the columns, joined by newlines. Without it: Question plus Correct Answer and
Incorrect Answer 1 to 3 if those columns exist, as a question with options A) to D) whose order is drawn from the seed;
else the first column named question, prompt or text (in any case).

The text must hold --num-tokens and a sixteenth more (256 to 2,048 tokens), which is kept out of the fit and measures
it."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The options of a fit.

    Args:
        prog: name of the command in help and error texts.

    Returns:
        The parser.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model directory, or a hub name that is already downloaded")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompt file (default: the text that ships)")
    parser.add_argument(
        "--prompt-columns",
        type=_names,
        metavar="A,B,...",
        help="columns of a .csv or .jsonl file, separated by commas (default: see below)",
    )
    parser.add_argument(
        "--num-tokens", type=int, metavar="N", help="tokens for the fit (default: what the text gives, at most 131072)"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="T",
        help="tokens per sequence, as long as the context that will be served: keys at later positions are not "
        "learned (default: the model's limit, at most 32768, on a CPU 4096)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="artifact directory (default: where the server finds it by itself)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    parser.add_argument(
        "--codebook-dtype",
        choices=CODEBOOK_DTYPES,
        default=DEFAULT_DTYPE,
        help=f"8-bit type of centroids; int8: integers times a power of two of each group (default: {DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--max-samples",
        type=int,
        default=131_072,
        metavar="N",
        help="most keys per head that k-means trains on (default: 131072)",
    )
    parser.add_argument(
        "--skip-layers",
        type=_indices,
        default=(),
        metavar="I,J,...",
        help="layers that keep vLLM's own cache, separated by commas (default: none)",
    )
    parser.add_argument("--dtype", default="auto", help="vLLM's --dtype for the run (default: auto)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)"
    )
    parser.add_argument(
        "--save-moments",
        action="store_true",
        help="also write DIR-moments beside the artifact: what `novakv eval` fits OSCAR from",
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _indices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer indices such as 0,1") from error


def main(argv: Sequence[str] | None = None, prog: str = "novakv fit") -> int:
    """Run a fit and print what was fitted.

    Args:
        argv: arguments; None takes those of the process.
        prog: name of the command in help and error texts.

    Returns:
        0 on success, 1 if an input was refused, 130 if interrupted; argparse exits with 2 for a wrong command line.
    """
    options = build_parser(prog).parse_args(argv)
    # vLLM logs its whole start-up and warns of the missing tokenizer; a fit has its own progress bars.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_novakv.calibration.pipeline import FitSettings, fit

    try:
        result = fit(FitSettings(**vars(options)))
    except ValidationError as error:
        details = "; ".join(f"--{str(item['loc'][0]).replace('_', '-')}: {item['msg']}" for item in error.errors())
        print(f"{prog}: {details}; see {prog} --help", file=sys.stderr)
        return 1
    except (ValueError, NotImplementedError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED_EXIT_STATUS
    print(report(result, options.model))
    return 0


def report(result: FitResult, model: str) -> str:
    """The table of a fit, its size, and how to serve it.

    Args:
        result: a finished fit.
        model: as the user named it.

    Returns:
        Several lines of text.
    """
    from vllm_novakv.inspection import format_table

    header = [
        "layer",
        "rel. logit error",
        "top-1 agreement",
        "volume spread (bits): equalizing",
        "random",
        "sorted",
        "key distortion",
        "rel. value error",
    ]
    columns = [
        (
            layer.figures.relative_logit_error,
            layer.figures.top1_agreement,
            layer.figures.volume_spread_bits,
            layer.random_spread_bits,
            layer.sorted_spread_bits,
            layer.key_distortion,
            layer.figures.value_relative_error,
        )
        for layer in result.layers.values()
    ]
    means = [sum(column) / len(column) for column in zip(*columns, strict=True)]
    labels = [*map(str, result.layers), "mean"]
    rows = [
        [label, *(f"{value:.4f}" for value in values)] for label, values in zip(labels, [*columns, means], strict=True)
    ]
    manifest = result.artifact.manifest
    left_out = [layer for layer in range(manifest.num_layers) if layer not in result.layers]
    lines = [format_table(header, rows), ""]
    if left_out:
        lines.append(f"layers left on vLLM's own cache: {', '.join(map(str, left_out))}")
    lines += [
        f"fitted on {manifest.calibration.num_tokens:,} tokens of {manifest.calibration.source}; logit error, top-1 "
        "agreement and value error: held-out text, every token quantized (a server keeps the first and latest exact)",
        f"bits per element: {manifest.layout.bits_per_element:.4g} (BF16: 16)",
        f"artifact: {result.directory}",
        f"serve it: {_serve_command(result, model)}",
    ]
    return "\n".join(lines)


def _serve_command(result: FitResult, model: str) -> str:
    novakv: dict[str, object] = {}
    if not result.is_default_directory:
        novakv["artifact"] = str(result.directory)
    if result.skip_layers:
        novakv["skip_layers"] = list(result.skip_layers)
    command = f"novakv serve {shlex.quote(model)}"
    return f"{command} --additional-config {shlex.quote(json.dumps({'novakv': novakv}))}" if novakv else command
