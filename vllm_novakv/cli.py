"""The `novakv` command: fit, serve, eval, inspect, doctor, prefix.

`fit`, `eval` and `serve` hand their arguments on untouched, so they accept exactly what calibration, evaluation and
`vllm serve` accept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_novakv import __version__

ATTENTION_BACKEND = "NOVAKV"

DESCRIPTION = """Serve language models on vLLM with a 2-bit KV cache.

  novakv fit --model MODEL       calibrate: fit the transforms and codebooks of a model (once)
  novakv serve MODEL ...         the same as: vllm serve MODEL --attention-backend NOVAKV ...
  novakv eval needles ...        measure what a cache does to a model's answers
  novakv inspect ARTIFACT        show what was fitted
  novakv doctor [MODEL]          check this machine and a model
  novakv prefix analyze LOG      what a request log gains from prefix caching
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="novakv", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"vllm-novakv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("fit", add_help=False, help="calibrate a model; see novakv fit --help")
    commands.add_parser("eval", add_help=False, help="measure what a cache does to a model; see novakv eval --help")
    commands.add_parser("serve", add_help=False, help="start an OpenAI-compatible server; takes vllm serve's options")

    inspect = commands.add_parser("inspect", help="show what an artifact holds")
    inspect.add_argument("artifact", type=Path, help="artifact directory, as printed by novakv fit")

    doctor = commands.add_parser("doctor", help="check this machine and, if given, a model")
    doctor.add_argument("model", nargs="?", help="model directory, or a hub name that is already downloaded")
    doctor.add_argument(
        "--additional-config", default="{}", help="the JSON that the server would get, for example its novakv settings"
    )

    prefix = commands.add_parser("prefix", help="tools for prefix caching").add_subparsers(
        dest="prefix_command", required=True, metavar="COMMAND"
    )
    analyze = prefix.add_parser(
        "analyze", help="sharing, hit rates by policy and size, and prefixes to pin, from a log"
    )
    analyze.add_argument("log", type=Path, help="requests, one JSON object per line: OpenAI-style, or with hash_ids")
    analyze.add_argument(
        "--capacities", type=int, nargs="+", default=[], metavar="BLOCKS", help="cache sizes (default: from the log)"
    )
    analyze.add_argument(
        "--block-tokens", type=int, default=128, help="tokens per block, for logs of texts (default: 128)"
    )
    analyze.add_argument("--characters-per-token", type=float, default=4.0, help="for logs of texts (default: 4)")
    analyze.add_argument("--json", action="store_true", help="print JSON instead of text")
    analyze.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the hit rates as a picture, too")
    return parser


def serve(arguments: Sequence[str]) -> int:
    """Run `vllm serve ARGUMENTS... --attention-backend NOVAKV`; returns when the server stops.

    Raises:
        ValueError: the arguments choose an attention backend themselves.
    """
    chosen = [argument for argument in arguments if argument.split("=")[0].replace("_", "-") == "--attention-backend"]
    if chosen:
        raise ValueError(
            f"{chosen[0]} conflicts with novakv serve, which sets --attention-backend {ATTENTION_BACKEND}; "
            "leave it out, or use vllm serve for another backend"
        )
    from vllm_novakv.vllm_launcher import run_vllm

    # the backend goes first after the model so that help and error texts of vLLM stay as they are
    if arguments and not arguments[0].startswith("-"):
        head, rest = [arguments[0]], list(arguments[1:])
    else:
        head, rest = [], list(arguments)
    run_vllm(["serve", *head, "--attention-backend", ATTENTION_BACKEND, *rest])
    return 0


def _analyze_log(options: argparse.Namespace) -> int:
    from vllm_novakv.prefix.analyze import analyze_file, describe_analysis

    def show(step: str) -> None:
        print(step, file=sys.stderr, flush=True)

    try:
        analysis = analyze_file(
            options.log, options.capacities, options.block_tokens, options.characters_per_token, progress=show
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"{options.log} cannot be read: {error.strerror or error}") from error
    if options.plot is not None:
        from vllm_novakv.prefix.plot import hit_rate_svg

        try:
            options.plot.write_text(hit_rate_svg(analysis), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{options.plot} cannot be written: {error.strerror or error}") from error
    print(json.dumps(analysis.as_json(), indent=2) if options.json else describe_analysis(analysis), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after `novakv`; None takes those of the process.

    Returns:
        0 on success; 1 if a check failed or an input was refused; 2 for a wrong command line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:
            return serve(arguments[1:])
        if arguments[:1] == ["fit"]:
            from vllm_novakv.calibration.command import main as fit

            return fit(arguments[1:])
        if arguments[:1] == ["eval"]:
            from vllm_novakv.eval_command import main as evaluate

            return evaluate(arguments[1:])

        options = _parser().parse_args(arguments)
        if options.command == "inspect":
            from vllm_novakv.artifact import load
            from vllm_novakv.inspection import describe_artifact

            print(describe_artifact(load(options.artifact)), flush=True)
            return 0

        if options.command == "prefix":
            return _analyze_log(options)

        from vllm_novakv.config import NovaKVConfig
        from vllm_novakv.doctor import diagnose

        try:
            additional_config = json.loads(options.additional_config)
        except json.JSONDecodeError as error:
            raise ValueError(f"--additional-config is not valid JSON: {error}") from error
        report = diagnose(options.model, NovaKVConfig.from_additional_config(additional_config))
        print(report, flush=True)
        return 1 if report.problems else 0
    except BrokenPipeError:  # the reader has seen enough, as in `novakv inspect ARTIFACT | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ModuleNotFoundError) as error:
        print(f"novakv: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
