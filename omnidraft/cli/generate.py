"""`omnidraft generate`: answer one prompt, and print statistics of speculation."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from omnidraft import config
from omnidraft.cli.options import Config, Engine, Mode, Quantize, Snapshot, download_bars
from omnidraft.errors import RequestError
from omnidraft.params import MAX_COUNT, ROWS, Grammar, SamplingNumbers, check_sampling, given_grammar, sampling_of
from omnidraft.progress import stages


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command an option for each row of the table of sampling settings; it takes them as keywords."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    numbers = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[each.type, typer.Option(help=ROWS[each.name].doc)],
            default=each.default,
        )
        for each in fields(SamplingNumbers)
    ]
    command.__signature__ = signature.replace(parameters=[*own, *numbers])  # type: ignore[attr-defined]
    command.__annotations__ |= {each.name: each.annotation for each in numbers}
    return command


@with_sampling_options
def generate(
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    suffix: Annotated[
        str | None, typer.Option(help="Fill the gap between the prompt and this text; for code models.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The model whose text you get.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Small model that drafts; any tokenizer, or none.")] = None,
    engine: Engine = None,
    snapshot: Snapshot = None,
    quantize: Quantize = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=NUMBER: make a token of the target likelier; may be given again.")
    ] = None,
    json_schema: Annotated[Path | None, typer.Option(help="Answer in JSON that fits the schema in this file.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with a text that matches all of this pattern.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text, whatever drafts.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    prediction: Annotated[
        Path | None, typer.Option(help="A file with what the answer will probably be; it is drafted first.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=0, help="0 decodes plainly.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="How the text is decoded.")] = None,
    receipt: Annotated[
        Path | None, typer.Option(help="Write a signed receipt here, for `omnidraft verify`; with --mode reproducible.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the text as it is, without a chat template.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text as it comes.")] = True,
    config_path: Config = None,
    **numbers: float | None,
) -> None:
    """Answer a prompt with speculative decoding, and print what it gained."""
    from omnidraft import assembly
    from omnidraft.decode.generation import GenerationRequest
    from omnidraft.decode.receipt import require_reproducible, require_signer
    from omnidraft.decode.step_stats import DecodeStats
    from omnidraft.files import require_writable_file, save_json
    from omnidraft.telemetry.metrics import CountingMetrics

    sampling = sampling_of(
        SimpleNamespace(**numbers),
        logit_bias=dict(_bias(text) for text in logit_bias or ()),
        grammar=_grammar(json_schema, regex),
    )
    check_sampling(sampling, MAX_COUNT)  # before gigabytes are loaded
    models = {"target": target, "drafter": drafter, "engine": engine, "precision": quantize}
    settings = config.load(config_path, models=models, decode={"mode": mode})
    if receipt is not None:  # all of it before gigabytes are loaded, too
        require_reproducible(settings.decode.mode)
        require_signer(settings.worker.receipt_key)
        require_writable_file(receipt, makes_folder=False)
    text = _prompt(prompt, file, may_be_empty=bool(suffix))
    is_plain = raw or bool(suffix)
    with download_bars() as progress:
        worker = assembly.engine(settings, CountingMetrics(), snapshot=snapshot, progress=progress)
    request = GenerationRequest(
        prompt=text if is_plain else None,
        suffix=suffix or None,
        messages=None if is_plain else [{"role": "user", "content": text}],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop_strings=tuple(stop or ()),
        prediction="" if prediction is None else _read(prediction),
        num_draft_tokens=num_draft_tokens,
    )
    stats = DecodeStats()
    shown, answer_ids = list[str](), list[int]()
    stages.info("reading the prompt")
    generation = worker.engine.stream(request)
    for step in generation.steps:
        stats.take(step)
        answer_ids += step.emitted
        shown.append(step.text)
        if stream:
            print(step.text, end="", flush=True)
    print("" if stream else "".join(shown))
    if receipt is not None:
        signer = require_signer(assembly.receipt_signer(settings, worker.served[0].identity))
        decoded, version = worker.engine.decode_request(request), generation.snapshot.version
        save_json(signer.receipt(decoded, answer_ids, snapshot_version=version), receipt)
    agreement = "-" if stats.agreement is None else f"{stats.agreement:.2f}"
    print(
        f"{stats.num_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.tokens_per_pass:.2f} tokens per "
        f"target pass, agreement {agreement}",
        file=sys.stderr,
    )


def _prompt(prompt: str | None, file: Path | None, *, may_be_empty: bool) -> str:
    if (prompt is None) == (file is None):
        raise RequestError("give either --prompt or --file")
    text = (prompt or "") if file is None else _read(file)
    if not text and not may_be_empty:
        raise RequestError("the prompt is empty; give at least one character")
    return text


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    from omnidraft.decode.sampling.grammar_compiler import check_schema

    text = None if json_schema is None else _read(json_schema)
    grammar = given_grammar(text, regex, "give either --json-schema or --regex")
    if text is not None:
        check_schema(text, f"--json-schema {json_schema}")
    return grammar


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError as exc:
        raise RequestError(f"--logit-bias must be ID=NUMBER, got {text!r}") from exc


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"cannot read {file}: {exc}") from exc
