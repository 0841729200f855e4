"""`omnidraft verify`: compute answers again, from receipts or from the trace log, and compare them bit for bit."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.cli.options import MOST_DRAFT_TOKENS, Config, Engine, Quantize, download_bars, printable
from omnidraft.errors import RequestError, SignatureRefused

if TYPE_CHECKING:
    from omnidraft.assembly import ServedTarget
    from omnidraft.config import Settings
    from omnidraft.decode.receipt import Receipt
    from omnidraft.ports import Request, Target
    from omnidraft.traces.record import TraceRecord
    from omnidraft.whatif.recorded_texts import RecordedText

SAME, DIFFERENT, OTHER_MODEL, LEFT_OUT = "the same bits", "DIFFERENT", "not this model", "left out: "
Verdict = tuple[str, str, str]
"""The name of an answer, one of the verdicts above, and why."""


def verify(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Receipts, or saved responses that have some.", metavar="RECEIPT...")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="worker:ed25519:...: a server's public key that you trust; may be given again."),
    ] = None,
    from_log: Annotated[bool, typer.Option("--from-log", help="Verify answers of the trace log.")] = False,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Of the log: this share of the answers.")] = 1.0,
    since: Annotated[str | None, typer.Option(help="Of the log: since 90m, 24h, 7d or an ISO time.")] = None,
    log: Annotated[str | None, typer.Option(help="sqlite:///path, kafka://host:port, or a trace archive.")] = None,
    target: Annotated[str | None, typer.Option(help="The model; without it, the one that the receipt names.")] = None,
    drafter: Annotated[str, typer.Option(help="What drafts beside the known answer.")] = "none",
    num_draft_tokens: Annotated[
        int, typer.Option(min=0, max=MOST_DRAFT_TOKENS, help="Of the known answer, for each pass; 0 decodes plainly.")
    ] = MOST_DRAFT_TOKENS,
    engine: Engine = None,
    quantize: Quantize = None,
    config_path: Config = None,
) -> None:
    """Compute answers again, and say whether they are the same bits.

    Exit code 0: all are. 1: one differs, and its first other token is shown, or a receipt was changed. 2: one is of
    another model, or cannot be judged here.
    """
    from omnidraft import config

    if bool(files) == from_log:
        raise RequestError("give receipts, or --from-log")
    found = [each for file in files or () for each in _envelopes(file)]
    receipts = [_opened(envelope, key or ()) for _, envelope, _ in found]
    named = next((each.model.name for each in receipts if not isinstance(each, SignatureRefused)), None)
    models = {"target": target or named, "drafter": drafter, "engine": engine, "precision": quantize}
    decode, url = {"mode": "reproducible", "policy": "fixed"}, log if log and "://" in log else None
    settings = config.load(config_path, models=models, decode=decode, log={"url": url})
    counts = Counter[str]()
    verdicts: Iterator[Verdict]
    if from_log:
        verdicts = _of_log(settings, log or settings.log.url, since, sample, num_draft_tokens)
    else:
        served = None if named is None else _served(settings)
        pairs = zip(found, receipts, strict=True)
        verdicts = (
            (name, *_of_receipt(receipt, around, served, num_draft_tokens)) for (name, _, around), receipt in pairs
        )
    if not (key or from_log):
        print("whose keys these are, their owners have to say: --key names those that you trust")
    for name, verdict, why in verdicts:
        counts[verdict] += 1
        if verdict in (DIFFERENT, OTHER_MODEL) or not from_log:
            print(printable(f"{name}: {verdict}{why}"))
    num = sum(num for verdict, num in counts.items() if not verdict.startswith(LEFT_OUT))
    others = "".join(f"; {num} {verdict}" for verdict, num in sorted(counts.items()) if verdict != SAME)
    print(f"{counts[SAME]} of {num}: {SAME}{others}")
    raise typer.Exit(1 if counts[DIFFERENT] else 2 if counts[SAME] < num or not num else 0)


def _envelopes(file: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the DSSE envelopes anywhere in a file of JSON, each with its name and with what is around it, as
    the ids of a response. Raises RequestError where there are none."""

    def inside(data: Any, around: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        if isinstance(data, dict) and "payloadType" in data:
            yield data, around
        elif isinstance(data, dict | list):
            around = around | data if isinstance(data, dict) else around
            for each in data.values() if isinstance(data, dict) else data:
                yield from inside(each, around)

    try:
        found = list(inside(json.loads(file.read_bytes()), {}))
    except (OSError, ValueError, RecursionError) as exc:
        raise RequestError(f"cannot read {file}: {exc}") from exc
    if not found:
        raise RequestError(f"{file} has no receipt")
    for number, each in enumerate(found):
        yield (f"{file}[{number}]" if len(found) > 1 else str(file), *each)


def _opened(envelope: dict[str, Any], trusted: Sequence[str]) -> "Receipt | SignatureRefused":
    from omnidraft.decode.receipt import read_receipt

    try:
        return read_receipt(envelope, trusted)
    except SignatureRefused as exc:
        return exc


def _served(settings: "Settings") -> "ServedTarget":
    from omnidraft import assembly
    from omnidraft.telemetry.metrics import CountingMetrics

    with download_bars() as progress:
        return assembly.engine(settings, CountingMetrics(), progress=progress).served[0]


def _of_receipt(
    receipt: "Receipt | SignatureRefused",
    around: dict[str, Any],
    served: "ServedTarget | None",
    num_draft_tokens: int,
) -> tuple[str, str]:
    """Return the verdict on a receipt, and why. Raises RequestError where its ids are missing."""
    if isinstance(receipt, SignatureRefused) or served is None:
        return DIFFERENT, f": refused: {receipt}"
    if differing := receipt.model.differences(served.identity):
        pairs = [(each, getattr(receipt.model, each), getattr(served.identity, each)) for each in differing]
        return OTHER_MODEL, ": " + "; ".join(f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs)
    try:
        prompt, answer = receipt.ids(around.get("prompt_token_ids"), around.get("token_ids"))
    except SignatureRefused as exc:
        return DIFFERENT, f": refused: {exc}"
    request = receipt.request(prompt, served.engine.pair.target_tokenizer.thought_markers)
    verdict, why = _recomputed(served, request, answer, num_draft_tokens)
    return verdict, f"{why}, {len(answer)} tokens; signed by {receipt.key}"


def _of_log(
    settings: "Settings", source: str, since: str | None, sample: float, num_draft_tokens: int
) -> Iterator[Verdict]:
    """Yield the verdict on each of a share of the target's answers in a log or an archive. Raises RequestError."""
    from omnidraft.distill.ingest.record_disposition import hash_64
    from omnidraft.progress import bar
    from omnidraft.whatif import log_slice
    from omnidraft.whatif.recorded_texts import recorded_texts

    wanted = replace(log_slice.parse_filter(since, None, ()), equal={"target": settings.models.target})
    records = log_slice.read(source, settings, wanted).require()
    texts, left_out = recorded_texts(records)
    yield from (("", LEFT_OUT + why, "") for why in left_out.elements())
    served, last = _served(settings), {each.request_id: each for each in records}
    unknown_of = {each.request_id: _unknown(each, last[each.request_id], served.target) for each in texts}
    with bar("verifying", len(texts), transient=True) as advance:
        for text in texts:
            if why := unknown_of[text.request_id]:
                yield text.request_id, LEFT_OUT + why, ""
            elif hash_64(text.request_id) / 2**64 < sample:  # always the same ones
                yield text.request_id, *_recomputed(served, text.request, text.answer_ids, num_draft_tokens)
            advance()


def _unknown(text: "RecordedText", record: "TraceRecord", target: "Target") -> str | None:
    """Return what a record lacks for its answer to be computed again; None: nothing."""
    num_ids = len(text.request.prompt_ids) + len(text.answer_ids)
    if record.mode != "reproducible":
        return "not in the reproducible mode"
    if record.has_grammar or record.has_logit_bias:
        return "with a grammar, limits or biases, which are not recorded"
    if num_ids <= target.first_context < target.context_limit:
        return "rotated by max_tokens, which is not recorded"
    return None


def _recomputed(
    served: "ServedTarget", request: "Request", answer_ids: Sequence[int], num_draft_tokens: int
) -> tuple[str, str]:
    """Return the verdict on an answer that is drawn again, and why."""
    from omnidraft.exactness.recomputation import recompute

    engine = served.engine
    proposer = engine.slot.current.proposer
    found = recompute(engine.decoder, proposer, request, answer_ids, num_draft_tokens=num_draft_tokens)
    if found is None:
        return SAME, ""
    given, drawn = (
        "its end" if token is None else f"{token} {engine.pair.spelled((token,))!r}"
        for token in (found.given, found.drawn)
    )
    apart = "" if found.logit_difference is None else f"; their logits differ by {found.logit_difference:+.4g}"
    return DIFFERENT, f" at token {found.index}: the answer has {given}, the model draws {drawn}{apart}"
