"""`novakv eval`: needle tasks, questions and perplexity of a model under several caches, and reports over such runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.endpoint import Endpoint
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.perplexity import split_windows
from vllm_novakv.evaluation.perplexity_run import run_perplexity, total_perplexity
from vllm_novakv.evaluation.plots import require_matplotlib
from vllm_novakv.evaluation.questions import load_questions
from vllm_novakv.evaluation.record import portable_argument
from vllm_novakv.evaluation.report import REPORT_NAME, read_run, write_report
from vllm_novakv.evaluation.ruler import MAX_ANSWER_TOKENS, TASKS, build_ruler_items
from vllm_novakv.evaluation.run_directory import note_engine
from vllm_novakv.evaluation.runner import run_items
from vllm_novakv.evaluation.study_report import STUDY_NAME
from vllm_novakv.offline import OfflineEngine, cache_names

API_KEY_VARIABLE = "OPENAI_API_KEY"

# answers reach the disk after so many; vLLM batches them as memory allows
_OFFLINE_BATCH = 32

DESCRIPTION = """Measure what a cache does to a model.

  novakv eval needles ...        RULER's eight needle tasks at several lengths
  novakv eval perplexity ...     perplexity of a text, by position
  novakv eval questions ...      multiple choice and mathematics from a file
  novakv eval all ...            needles, perplexity and a codec study of a model, offline, and the report
  novakv eval codec ...          bases, quantizers, partitions and the rate law on captured keys and queries
  novakv eval report RUN ...     compare finished runs

With --cache, vLLM runs in a process of its own for each cache, and --model is a directory or a hub name:
  stock    vLLM's own cache, in the model's type            bf16     the same, refused if that type is not BF16
  fp8      vLLM's own FP8 cache                             novakv   this package's 2-bit cache
  exact    this package's cache with nothing quantized      others   compared methods, such as oscar-int2
Without it, a served model is asked (any OpenAI-compatible endpoint, --base-url), and --model is the name under which
it is served. The same seed gives the same prompts either way. A run that was interrupted continues when it is started
again; a finished one is read back.
"""

Model = Endpoint | OfflineEngine


@dataclass(frozen=True)
class Suite:
    """Something to ask every model.

    Attributes:
        name: of the run's folder.
        max_tokens: answer limit in tokens.
        max_model_len: longest sequence in tokens; None is the model's limit.
        run: asks a model, into a folder, with what the run's configuration says of method and engine.
    """

    name: str
    max_tokens: int
    max_model_len: int | None
    run: Callable[[Model, Path, dict[str, Any]], None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="novakv eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model, texts, windows, prompts = _model_options(), _text_options(), _window_options(), _needle_options()
    commands.add_parser("needles", parents=[model, texts, prompts], help="RULER's eight needle tasks")
    commands.add_parser("perplexity", parents=[model, texts, windows], help="perplexity of a text, by position")
    everything = commands.add_parser(
        "all", parents=[model, texts, prompts, windows], help="both and a codec study offline, and their report"
    )
    everything.add_argument("--study-tokens", type=int, default=8192, help="tokens of the codec study (default: 8192)")

    questions = commands.add_parser("questions", parents=[model], help="multiple choice and mathematics")
    questions.add_argument("file", type=Path, help="questions: .jsonl, one object per line, or .csv in GPQA's columns")
    questions.add_argument("--limit", type=int, help="ask only the first so many")
    questions.add_argument("--max-tokens", type=int, default=4096, help="answer limit in tokens (default: 4096)")
    questions.add_argument("--seed", type=int, default=0, help="of the order of a .csv file's options")

    codec = commands.add_parser("codec", help="what a key codec is made of, compared on captured keys and queries")
    codec.add_argument("--model", required=True, help="model directory, or a hub name that is already downloaded")
    codec.add_argument("--prompts", type=Path, metavar="FILE", help="prompt file, as for novakv fit")
    codec.add_argument("--num-tokens", type=int, default=8192, help="tokens to fit on (default: 8192)")
    codec.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence (default: 4096)")
    codec.add_argument("--layers", type=int, nargs="+", default=[], help="layers (default: second, middle and last)")
    codec.add_argument("--num-heads", type=int, default=1, help="KV heads per layer, the first ones (default: 1)")
    codec.add_argument("--seed", type=int, default=0, help="of k-means, samples and the random partition")
    codec.add_argument("--dtype", default="auto", help="vLLM's --dtype for the run (default: auto)")
    codec.add_argument("--out", type=Path, required=True, help="folder of the study")

    report = commands.add_parser("report", help="compare finished runs")
    report.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    report.add_argument("--reference", help="method that the others are compared with")
    report.add_argument("--out", type=Path, required=True, help="folder for report.md and its plots")
    return parser


def _model_options() -> argparse.ArgumentParser:
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", required=True, help="with --cache a directory or hub name, else the served name")
    model.add_argument(
        "--cache", nargs="+", choices=cache_names(), metavar="CACHE", help="caches to run offline: see above"
    )
    model.add_argument("--base-url", default="http://localhost:8000/v1", help="endpoint, with the version")
    model.add_argument("--method", help="name of this row in reports (default: the cache)")
    model.add_argument("--out", type=Path, required=True, help="folder for runs; each gets a folder of its own in it")
    model.add_argument("--samples", type=int, default=1, help="answers per item (default: 1)")
    model.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    model.add_argument("--parallel", type=int, default=8, help="endpoint: requests in flight (default: 8)")
    model.add_argument("--dtype", default="auto", help="offline: the model's type, as for vllm serve (default: auto)")
    model.add_argument(
        "--novakv", type=_json_object, default={}, metavar="JSON", help='offline: settings, as {"recent_tokens": 128}'
    )
    model.add_argument(
        "--engine", type=_json_object, default={}, metavar="JSON", help="offline: further arguments of vllm.LLM"
    )
    return model


def _text_options() -> argparse.ArgumentParser:
    texts = argparse.ArgumentParser(add_help=False)
    texts.add_argument("--tokenizer", help="model directory or hub name, to count tokens (default: --model)")
    texts.add_argument("--text", type=Path, required=True, help="plain text (UTF-8): haystacks, or what is predicted")
    return texts


def _needle_options() -> argparse.ArgumentParser:
    needles = argparse.ArgumentParser(add_help=False)
    needles.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="prompt lengths in tokens")
    needles.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    needles.add_argument("--num-items", type=int, default=25, help="prompts per task and length (default: 25)")
    needles.add_argument("--seed", type=int, default=0, help="of the prompts")
    return needles


def _window_options() -> argparse.ArgumentParser:
    perplexity = argparse.ArgumentParser(add_help=False)
    perplexity.add_argument("--window-tokens", type=int, default=4096, help="tokens per window (default: 4096)")
    perplexity.add_argument("--num-windows", type=int, default=16, help="windows, spread evenly (default: 16)")
    perplexity.add_argument("--bucket-tokens", type=int, default=512, help="positions per figure (default: 512)")
    return perplexity


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def main(arguments: Sequence[str]) -> int:
    """Run one command of `novakv eval`.

    Args:
        arguments: what follows `novakv eval`.

    Returns:
        0 on success.

    Raises:
        ValueError: an input was refused, the engine failed, or the endpoint cannot be reached.
        ModuleNotFoundError: plots are wanted and their library is not installed.
    """
    options = _parser().parse_args(arguments)
    if "cache" in options:
        _check_model_options(options)
    try:
        if options.command == "needles":
            _run_suites(options, _needle_suites(options, _load_tokenizer(options)))
        elif options.command == "perplexity":
            _run_suites(options, [_perplexity_suite(options, _load_tokenizer(options))])
        elif options.command == "questions":
            _run_suites(options, [_question_suite(options)])
        elif options.command == "all":
            _measure_all(options)
        elif options.command == "codec":
            _study_codec(options)
        else:
            print(write_report([read_run(path) for path in options.runs], options.reference, options.out))
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(str(error)) from error
    return 0


def _check_model_options(options: argparse.Namespace) -> None:
    if options.cache is None:
        if options.command == "all":
            raise ValueError("--cache is missing: the caches to compare, the reference first, such as stock novakv")
        if options.method is None:
            raise ValueError("--method is missing: the name of this row in reports, such as bf16 or novakv")
        if getattr(options, "tokenizer", "none is needed") is None:
            raise ValueError("--tokenizer is missing: the model directory or hub name of the served model")
    elif options.method is not None and len(options.cache) > 1:
        raise ValueError(f"--method {options.method} names one row, and there are {len(options.cache)} caches")


def _asked_models(
    options: argparse.Namespace, max_tokens: int, max_model_len: int | None
) -> Iterator[tuple[str, Model, dict[str, Any]]]:
    """One model after the other; each engine ends before the next begins."""
    if options.cache is None:
        yield options.method, _endpoint(options, max_tokens), {}
        return
    engine = {"dtype": options.dtype, **({"max_model_len": max_model_len} if max_model_len else {}), **options.engine}
    for cache in options.cache:
        settings = {"cache": cache, "engine": _portable(engine), "novakv": _portable(options.novakv)}
        with OfflineEngine(options.model, cache, options.novakv, engine, max_tokens, options.temperature) as model:
            yield options.method or cache, model, settings


def _endpoint(options: argparse.Namespace, max_tokens: int) -> Endpoint:
    return Endpoint(
        options.base_url,
        options.model,
        max_tokens=max_tokens,
        temperature=options.temperature,
        api_key=os.environ.get(API_KEY_VARIABLE),
        num_parallel=options.parallel,
    )


def _portable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the paths of this machine; what lies at a path is known by its checksum (engine.json)."""
    return {key: portable_argument(value) if isinstance(value, str) else value for key, value in settings.items()}


def _load_tokenizer(options: argparse.Namespace) -> Any:
    # its library takes seconds to load
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(options.tokenizer or options.model)


def _chat_renderer(tokenizer: Any) -> Callable[[str], list[int]]:
    def render_chat(message: str) -> list[int]:
        messages = [{"role": "user", "content": message}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])

    return render_chat


def _needle_suites(options: argparse.Namespace, tokenizer: Any) -> list[Suite]:
    haystack, render_chat = options.text.read_text(encoding="utf-8"), _chat_renderer(tokenizer)
    suites = []
    for length in options.lengths:
        items = [
            item
            for task in options.tasks
            for item in build_ruler_items(task, haystack, render_chat, length, options.num_items, options.seed)
        ]
        config = {"prompt_tokens": length, "text": options.text.name, "seed": options.seed, "tasks": options.tasks}
        suites.append(_item_suite(options, f"needles-{length}", items, config, MAX_ANSWER_TOKENS, length))
    return suites


def _question_suite(options: argparse.Namespace) -> Suite:
    items = load_questions(options.file, options.limit, options.seed)
    return _item_suite(options, options.file.stem, items, {"file": options.file.name}, options.max_tokens, None)


def _item_suite(
    options: argparse.Namespace,
    name: str,
    items: list[Item],
    config: dict[str, Any],
    max_tokens: int,
    prompt_tokens: int | None,
) -> Suite:
    batch_size = _OFFLINE_BATCH if options.cache else 4 * options.parallel
    config = config | {"temperature": options.temperature, "max_tokens": max_tokens}

    def run(model: Model, directory: Path, settings: dict[str, Any]) -> None:
        asked = _noting_engine(model, model.answer, directory)
        result = run_items(asked, items, directory, config | settings, options.samples, batch_size)
        for task, score in [*result.task_scores.items(), ("mean", result.mean)]:
            interval = f"[{100 * score.low:.1f}, {100 * score.high:.1f}]"
            print(f"{settings['method']}  {name}  {task:<20} {100 * score.estimate:5.1f}  {interval}")

    return Suite(name, max_tokens, None if prompt_tokens is None else prompt_tokens + max_tokens, run)


def _perplexity_suite(options: argparse.Namespace, tokenizer: Any) -> Suite:
    token_ids = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = split_windows(token_ids, options.window_tokens, options.num_windows)
    name = f"perplexity-{options.window_tokens}"

    def run(model: Model, directory: Path, settings: dict[str, Any]) -> None:
        asked = _noting_engine(model, model.prompt_logprobs, directory)
        config = {"text": options.text.name} | settings
        losses = run_perplexity(asked, windows, options.bucket_tokens, directory, config)
        print(f"{settings['method']}  {name}  perplexity {total_perplexity(losses):.3f}")

    # one token must be generated, because vLLM generates no fewer
    return Suite(name, 1, options.window_tokens + 1, run)


def _run_suites(options: argparse.Namespace, suites: Sequence[Suite]) -> list[Path]:
    """Every suite with every model, one engine per cache; returns the folders of the runs."""
    lengths = [suite.max_model_len for suite in suites if suite.max_model_len is not None]
    directories = []
    models = _asked_models(options, max(suite.max_tokens for suite in suites), max(lengths, default=None))
    for method, model, settings in models:
        for suite in suites:
            directory = options.out / method / suite.name
            named = {"suite": suite.name, "method": method, "model": options.model.rstrip("/").rpartition("/")[2]}
            suite.run(model, directory, settings | named)
            print(directory, flush=True)
            directories.append(directory)
    return directories


def _noting_engine(model: Model, ask: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    """The same questions; an offline engine is noted in the run's folder with its first answer."""

    def asked(*arguments: Any) -> Any:
        if isinstance(model, OfflineEngine):
            note_engine(directory, model.facts)
        return ask(*arguments)

    return asked


def _measure_all(options: argparse.Namespace) -> None:
    """Needles, perplexity and the codec study, each unless it is there already, and the report over them."""
    # hours may lie between here and the first plot
    require_matplotlib()
    report = options.out / "report"
    if (report / REPORT_NAME).exists():
        raise ValueError(f"{report} holds a report already; choose another --out")
    tokenizer = _load_tokenizer(options)
    suites = [*_needle_suites(options, tokenizer), _perplexity_suite(options, tokenizer)]
    runs = _run_suites(options, suites)
    study = options.out / "study"
    if not (study / STUDY_NAME).exists():
        _write_study(
            study, model=options.model, seed=options.seed, dtype=options.dtype, num_tokens=options.study_tokens
        )
    print(write_report([read_run(path) for path in (*runs, study)], options.method or options.cache[0], report))


def _study_codec(options: argparse.Namespace) -> None:
    chosen = {key: value for key, value in vars(options).items() if key not in ("command", "out", "layers")}
    print(_write_study(options.out, **chosen, layers=tuple(options.layers)))


def _write_study(directory: Path, **settings: Any) -> Path:
    # vLLM logs its whole start-up; a study has its own progress bars
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_novakv.codec_study import StudySettings, study_codec

    return study_codec(StudySettings(**settings), directory)
