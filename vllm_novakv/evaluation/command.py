"""`novakv eval`: ask a served model the needle tasks or a file of questions, and report over several such runs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.endpoint import Endpoint
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.questions import load_questions
from vllm_novakv.evaluation.report import read_run, write_report
from vllm_novakv.evaluation.ruler import MAX_ANSWER_TOKENS, TASKS, build_ruler_items
from vllm_novakv.evaluation.runner import RunResult, run_items

API_KEY_VARIABLE = "OPENAI_API_KEY"

DESCRIPTION = """Measure the accuracy of a served model (any OpenAI-compatible endpoint).

  novakv eval needles ...        RULER's eight needle tasks at several lengths
  novakv eval questions ...      multiple choice and mathematics from a file
  novakv eval report RUN ...     compare finished runs

Serve the same model twice, once with novakv serve and once with vllm serve, give each run its --method, and report
over both. A run that was interrupted continues when it is started again.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="novakv eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--base-url", default="http://localhost:8000/v1", help="endpoint, with the version")
    model.add_argument("--model", required=True, help="name under which the model is served")
    model.add_argument("--method", required=True, help="name of this row in reports, such as bf16 or novakv")
    model.add_argument("--out", type=Path, required=True, help="folder for runs; each gets a folder of its own in it")
    model.add_argument("--samples", type=int, default=1, help="answers per item (default: 1)")
    model.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    model.add_argument("--parallel", type=int, default=8, help="requests in flight (default: 8)")

    needles = commands.add_parser("needles", parents=[model], help="RULER's eight needle tasks")
    needles.add_argument("--tokenizer", required=True, help="model directory or hub name, to measure prompt lengths")
    needles.add_argument("--text", type=Path, required=True, help="plain text for haystacks (UTF-8)")
    needles.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="prompt lengths in tokens")
    needles.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    needles.add_argument("--num-items", type=int, default=25, help="prompts per task and length (default: 25)")
    needles.add_argument("--seed", type=int, default=0, help="of the prompts")

    questions = commands.add_parser("questions", parents=[model], help="multiple choice and mathematics")
    questions.add_argument("file", type=Path, help="questions, one JSON object per line")
    questions.add_argument("--limit", type=int, help="ask only the first so many")
    questions.add_argument("--max-tokens", type=int, default=4096, help="answer limit in tokens (default: 4096)")

    report = commands.add_parser("report", help="compare finished runs")
    report.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    report.add_argument("--reference", required=True, help="method that the others are compared with")
    report.add_argument("--out", type=Path, required=True, help="folder for report.md and its chart")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one command of `novakv eval`.

    Args:
        arguments: what follows `novakv eval`.

    Returns:
        0 on success.

    Raises:
        ValueError: an input was refused, or the endpoint cannot be reached.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "needles":
            _ask_needles(options)
        elif options.command == "questions":
            _ask_questions(options)
        else:
            print(write_report([read_run(path) for path in options.runs], options.reference, options.out))
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(str(error)) from error
    return 0


def _ask_needles(options: argparse.Namespace) -> None:
    # a tokenizer is needed here alone, and its library takes seconds to load
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)

    def render_chat(message: str) -> list[int]:
        messages = [{"role": "user", "content": message}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])

    haystack = options.text.read_text(encoding="utf-8")
    for length in options.lengths:
        items = [
            item
            for task in options.tasks
            for item in build_ruler_items(task, haystack, render_chat, length, options.num_items, options.seed)
        ]
        config = {"prompt_tokens": length, "text": options.text.name, "seed": options.seed, "tasks": options.tasks}
        _run(options, items, f"needles-{length}", config, MAX_ANSWER_TOKENS)


def _ask_questions(options: argparse.Namespace) -> None:
    items = load_questions(options.file, options.limit)
    _run(options, items, options.file.stem, {"file": options.file.name}, options.max_tokens)


def _run(options: argparse.Namespace, items: list[Item], name: str, config: dict[str, Any], max_tokens: int) -> None:
    endpoint = Endpoint(
        options.base_url,
        options.model,
        max_tokens=max_tokens,
        temperature=options.temperature,
        api_key=os.environ.get(API_KEY_VARIABLE),
        num_parallel=options.parallel,
    )
    config |= {
        "suite": name,
        "method": options.method,
        "model": options.model.rstrip("/").rpartition("/")[2],
        "temperature": options.temperature,
        "max_tokens": max_tokens,
    }
    directory = options.out / options.method / name
    result = run_items(endpoint.answer, items, directory, config, options.samples, batch_size=4 * options.parallel)
    _show(name, result)
    print(directory)


def _show(name: str, result: RunResult) -> None:
    for task, score in [*result.task_scores.items(), ("mean", result.mean)]:
        print(f"{name}  {task:<20} {100 * score.estimate:5.1f}  [{100 * score.low:.1f}, {100 * score.high:.1f}]")
