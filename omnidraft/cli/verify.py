"""`omnidraft verify`: compute answers again, from receipts or from the trace log, and compare them bit for bit."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.cli.choices import archive_or_url
from omnidraft.cli.options import MOST_DRAFT_TOKENS, Config, Engine, Quantize, download_bars, printable
from omnidraft.errors import RequestError, SignatureRefused
from omnidraft.progress import bar

if TYPE_CHECKING:
    from omnidraft.assembly import ServedTarget
    from omnidraft.config import Settings
    from omnidraft.decode.receipt import Receipt
    from omnidraft.fleet.forgetting_certificate import CertifiedSnapshot
    from omnidraft.ports import Request, Target
    from omnidraft.serving.saved_response import SavedChoice
    from omnidraft.traces.record import TraceRecord
    from omnidraft.whatif.recorded_texts import RecordedText

SAME, DIFFERENT, OTHER_MODEL, LEFT_OUT = "the same bits", "DIFFERENT", "not this model", "left out: "
REFUSED, CERTIFIED, UNCHECKED = "REFUSED", "certified", "not checked"
Verdict = tuple[str, str, str]
"""The name of an answer, one of the verdicts above, and why."""


def verify(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Receipts, saved responses that have some, or certificates of forgetting.", metavar="FILE..."
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="ROLE:ed25519:...: a public key that you trust; may be given again."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Of a certificate: refuse it unless it is of this tenant.")] = None,
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
    """Compute answers again, and say whether they are the same bits, and whether a response shows their text.

    Exit code 0: all are. 1: one differs, and where it does first is shown, or one is refused: it was changed, or its
    key is not trusted. 2: one is of another model, or cannot be judged here. A certificate of `omnidraft tenants forget
    --exact` is printed, and its signature checked.
    """
    from omnidraft import config

    if bool(files) == from_log:
        raise RequestError("give receipts, or --from-log")
    keys = _public_keys(key or ())
    found = [each for file in files or () for each in _choices(file)]
    opened = [_opened(choice.envelope, keys, tenant) for _, choice in found]
    named = next((each.model.name for each in opened if not isinstance(each, tuple)), None)
    models = {"target": target or named, "drafter": drafter, "engine": engine, "precision": quantize}
    decode, (archive_path, url) = {"mode": "reproducible", "policy": "fixed"}, archive_or_url(log)
    settings = config.load(config_path, models=models, decode=decode, log={"url": url})
    if not (keys or from_log):
        print("whose keys these are, their owners have to say: --key names those that you trust")
    counts = Counter[str]()
    if from_log:
        verdicts = _of_log(settings, archive_path, since, sample, num_draft_tokens)
    else:
        verdicts = _of_files(found, opened, None if named is None else _served(settings), num_draft_tokens)
    for name, verdict, why in verdicts:
        counts[verdict] += 1
        if verdict in (DIFFERENT, OTHER_MODEL) or not from_log:
            print("\n".join(map(printable, f"{name}: {verdict}{why}".split("\n"))))
    num = sum(num for verdict, num in counts.items() if not verdict.startswith(LEFT_OUT))
    num_certificates = counts[CERTIFIED] + counts[UNCHECKED]
    others = "".join(f"; {num} {verdict}" for verdict, num in sorted(counts.items()) if verdict != SAME)
    if num > num_certificates or not num:
        print(f"{counts[SAME]} of {num - num_certificates}: {SAME}{others}")
    is_settled = 0 < counts[SAME] + counts[CERTIFIED] == num
    raise typer.Exit(1 if counts[DIFFERENT] + counts[REFUSED] else 0 if is_settled else 2)


def _public_keys(texts: Sequence[str]) -> list[str]:
    """Return the keys. Raises RequestError for a text that is none."""
    from pydantic import TypeAdapter, ValidationError

    from omnidraft.config.secrets import PublicKeyText

    try:
        return TypeAdapter(list[PublicKeyText]).validate_python(texts)
    except ValidationError as exc:
        raise RequestError(f"--key {exc.errors()[0]['msg'].removeprefix('Value error, ')}") from exc


def _choices(file: Path) -> "Iterator[tuple[str, SavedChoice]]":
    """Yield the envelopes anywhere in a file of JSON, each with its name. Raises RequestError where there are none."""
    from omnidraft.serving.saved_response import saved_choices

    try:
        found = saved_choices(json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError) as exc:
        raise RequestError(f"cannot read {file}: {exc}") from exc
    if not found:
        raise RequestError(f"{file} has no receipt")
    for number, each in enumerate(found):
        yield f"{file}[{number}]" if len(found) > 1 else str(file), each


def _opened(envelope: dict[str, Any], keys: Sequence[str], tenant: str | None) -> "Receipt | tuple[str, str]":
    """Return the receipt in an envelope; of any other the verdict, and why."""
    from omnidraft.decode.receipt import read_receipt
    from omnidraft.fleet.forgetting_certificate import PAYLOAD_TYPE

    try:
        if envelope["payloadType"] == PAYLOAD_TYPE:
            return _of_certificate(envelope, keys, tenant)
        return read_receipt(envelope, keys)
    except SignatureRefused as exc:
        return REFUSED, f": {exc}"


def _of_certificate(envelope: dict[str, Any], keys: Sequence[str], tenant: str | None) -> tuple[str, str]:
    """Return the verdict on a certificate, and what it says. Raises SignatureRefused."""
    from datetime import UTC, datetime

    from omnidraft.fleet.forgetting_certificate import name_digest, read_certificate

    said, is_signed = read_certificate(envelope, keys)
    if tenant is not None and name_digest(tenant) != said.tenant_sha256:
        raise SignatureRefused(f"it is of another tenant than {tenant}")

    def named(snapshot: "CertifiedSnapshot") -> str:
        return f"snapshot {snapshot.version} ({snapshot.snapshot_id}, digest {snapshot.digest})"

    whose = f"the tenant whose name has the SHA-256 {said.tenant_sha256}" if tenant is None else tenant
    made = datetime.fromtimestamp(said.created_ms / 1000, UTC)
    signed = "--key names no key to check its signature with" if is_signed else "it is unsigned"
    return CERTIFIED if keys else UNCHECKED, (
        ("" if keys else f": {signed}")
        + f"\n  on {made:%Y-%m-%d %H:%M:%S} UTC the drafter {said.drafter} for {said.target} had forgotten {whose}"
        + f"\n  before: {named(said.start)}, to which learning went back"
        + f"\n  after: {named(said.result)}, {said.num_records} records and {said.num_steps} steps of learning later"
    )


def _served(settings: "Settings") -> "ServedTarget":
    from omnidraft import assembly
    from omnidraft.telemetry.metrics import CountingMetrics

    with download_bars() as progress:
        return assembly.engine(settings, CountingMetrics(), progress=progress).served[0]


def _of_files(
    found: "Sequence[tuple[str, SavedChoice]]",
    opened: "Sequence[Receipt | tuple[str, str]]",
    served: "ServedTarget | None",
    num_draft_tokens: int,
) -> Iterator[Verdict]:
    with bar("verifying", len(found), transient=True) as advance:
        for (name, choice), each in zip(found, opened, strict=True):
            if isinstance(each, tuple) or served is None:
                yield name, *each
            else:
                yield name, *_of_receipt(each, choice, served, num_draft_tokens)
            advance()


def _of_receipt(
    receipt: "Receipt", choice: "SavedChoice", served: "ServedTarget", num_draft_tokens: int
) -> tuple[str, str]:
    """Return the verdict on a choice, and why. Raises RequestError where its ids are missing."""
    from omnidraft.serving.saved_response import compare

    if differing := receipt.model.differences(served.identity):
        pairs = [(each, getattr(receipt.model, each), getattr(served.identity, each)) for each in differing]
        return OTHER_MODEL, ": " + "; ".join(f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs)
    try:
        prompt, answer = receipt.ids(choice.ids("prompt_token_ids"), choice.ids("token_ids"))
    except SignatureRefused as exc:
        return REFUSED, f": {exc}"
    pair = served.engine.pair
    request = receipt.request(prompt, pair.target_tokenizer.thought_markers)
    verdict, why = _recomputed(served, request, answer, num_draft_tokens)
    if verdict is SAME:
        difference, compared = compare(choice, pair, request, answer)
        verdict, why = (SAME, f", {len(answer)} tokens{compared}") if difference is None else (DIFFERENT, difference)
    return verdict, f"{why}; signed by {receipt.key}"


def _of_log(
    settings: "Settings", archive_path: Path | None, since: str | None, sample: float, num_draft_tokens: int
) -> Iterator[Verdict]:
    """Yield the verdict on each of a share of the target's answers in a log or an archive. Raises RequestError."""
    from omnidraft.distill.ingest.record_disposition import hash_64
    from omnidraft.whatif import log_slice
    from omnidraft.whatif.recorded_texts import recorded_texts

    wanted = replace(log_slice.parse_filter(since, None, ()), equal={"target": settings.models.target})
    records = log_slice.read(archive_path, settings, wanted).require()
    texts, left_out = recorded_texts(records)
    yield from (("", LEFT_OUT + why, "") for why in left_out.elements())
    served, last = _served(settings), {each.request_id: each for each in records}
    unknown_of = {each.request_id: _unknown(each, last[each.request_id], served.target) for each in texts}
    yield from ((name, LEFT_OUT + why, "") for name, why in unknown_of.items() if why)
    known = [each for each in texts if not unknown_of[each.request_id]]
    always_the_same = sorted(known, key=lambda each: hash_64(each.request_id))
    share = always_the_same[: ceil(sample * len(known))]
    with bar("verifying", len(share), transient=True) as advance:
        for text in share:
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
