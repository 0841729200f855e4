"""`omnidraft verify`: compute answers again, from receipts or from the trace log, and compare them bit for bit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.cli.choices import archive_or_url
from omnidraft.cli.options import MOST_DRAFT_TOKENS, Config, Engine, Quantize, download_bars, printable
from omnidraft.errors import OmnidraftError, RequestError, SignatureRefused
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
REFUSED, UNCHECKED = "REFUSED", "not checked"
CERTIFIED, NOT_CERTIFIED, UNSURE = "certified", "certificate REFUSED", "certificate not checked"
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

    Exit code 0: all are. 1: one differs, and where it does first is shown, or one is refused: it was changed, its key
    is not trusted, or no request has an answer like it. 2: one is of another model, or cannot be judged here. Each is
    judged under the name that it gives its model, which is loaded when the name changes. A certificate of `omnidraft
    tenants forget --exact` is printed, and its signature checked.
    """
    from omnidraft import config

    if bool(files) == from_log:
        raise RequestError("give receipts, or --from-log; the log or archive of that is named by --log")
    misplaced = {"key": key, "tenant": tenant} if from_log else {"log": log, "since": since, "sample": sample < 1}
    for option in [name for name, value in misplaced.items() if value]:
        raise RequestError(f"--{option} is for {'documents' if from_log else 'answers of the log'} alone; leave it out")
    keys = _public_keys(key or ())
    archive_path, url = archive_or_url(log)

    def settings(name: str | None) -> "Settings":
        models = {"target": name, "drafter": drafter, "engine": engine, "precision": quantize}
        decode = {"mode": "reproducible", "policy": "fixed"}
        return config.load(config_path, models=models, decode=decode, log={"url": url})

    @lru_cache(maxsize=1)  # that of the document before
    def served(name: str) -> "ServedTarget":
        return _served(settings(name))

    if not (keys or from_log):
        print("whose keys these are, their owners have to say: --key names those that you trust")
    counts = Counter[str]()
    if from_log:
        verdicts = _of_log(settings(target), archive_path, since, sample, num_draft_tokens)
    else:
        verdicts = _of_files(
            files or (),
            lambda each: _of_choice(each, keys, tenant, lambda name: served(target or name), num_draft_tokens),
        )
    for name, verdict, why in verdicts:
        counts[verdict] += 1
        if not (from_log and (verdict is SAME or verdict.startswith(LEFT_OUT))):
            print(f"{printable(name)}: {verdict}{why}")
    num = sum(num for verdict, num in counts.items() if not verdict.startswith(LEFT_OUT))
    num_answers = num - sum(counts[each] for each in (CERTIFIED, NOT_CERTIFIED, UNSURE))
    others = [f"{num} {verdict}" for verdict, num in sorted(counts.items()) if verdict != SAME]
    answers = [f"{counts[SAME]} of {num_answers}: {SAME}"] if num_answers or not num else []
    print("; ".join([*answers, *others]))
    is_settled = 0 < counts[SAME] + counts[CERTIFIED] == num
    raise typer.Exit(1 if counts[DIFFERENT] + counts[REFUSED] + counts[NOT_CERTIFIED] else 0 if is_settled else 2)


def _public_keys(texts: Sequence[str]) -> list[str]:
    """Return the keys. Raises RequestError for a text that is none."""
    from pydantic import TypeAdapter, ValidationError

    from omnidraft.config.secrets import PublicKeyText

    try:
        return TypeAdapter(list[PublicKeyText]).validate_python(texts)
    except ValidationError as exc:
        raise RequestError(f"--key {exc.errors()[0]['msg'].removeprefix('Value error, ')}") from exc


def _of_files(files: Sequence[Path], judge: "Callable[[SavedChoice], tuple[str, str]]") -> Iterator[Verdict]:
    """Yield the verdict on each document anywhere in the files, and on each file that has none."""
    from omnidraft.serving.saved_response import saved_choices

    for file in files:
        try:
            found = saved_choices(file.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            yield str(file), UNCHECKED, f": it cannot be read as JSON or a saved stream: {why}"
            continue
        if not found:
            yield str(file), UNCHECKED, ": it has no receipt"
        for number, each in enumerate(found):
            yield f"{file}[{number}]" if len(found) > 1 else str(file), *judge(each)


def _of_choice(
    choice: "SavedChoice",
    keys: Sequence[str],
    tenant: str | None,
    served_as: "Callable[[str], ServedTarget]",
    num_draft_tokens: int,
) -> tuple[str, str]:
    """Return the verdict on a document, and why, whatever is wrong with it or with the model that it names."""
    from omnidraft.decode.receipt import read_receipt
    from omnidraft.fleet.forgetting_certificate import PAYLOAD_TYPE

    envelope, refused, about = choice.envelope, REFUSED, ""
    if envelope is None:
        return UNCHECKED, printable(f": choice {choice.around.get('index')} has no receipt")
    try:
        if envelope["payloadType"] == PAYLOAD_TYPE:
            refused = NOT_CERTIFIED
            return _of_certificate(envelope, keys, tenant)
        if tenant is not None:
            raise RequestError("it is a receipt, which names no tenant: leave --tenant out")
        receipt = read_receipt(envelope, keys)
        model = receipt.model
        about = f"; {model.name} ({model.kernels}), signed on {_date(receipt.time_ms)} by {receipt.key}"
        verdict, why = _of_receipt(receipt, choice, served_as(receipt.model.name), num_draft_tokens)
    except SignatureRefused as exc:
        verdict, why = refused, f": {exc}"
    except (OmnidraftError, OSError) as exc:  # such as a folder of models that may not be read
        verdict, why = UNCHECKED, f": {exc}"
    return verdict, printable(why + about)


def _date(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _of_certificate(envelope: dict[str, Any], keys: Sequence[str], tenant: str | None) -> tuple[str, str]:
    """Return the verdict on a certificate, and what it says. Raises SignatureRefused."""
    from omnidraft.fleet.forgetting_certificate import name_digest, read_certificate

    said, is_signed = read_certificate(envelope, keys)
    if tenant is not None and name_digest(tenant) != said.tenant_sha256:
        raise SignatureRefused(f"it is of another tenant than {tenant}")

    def named(snapshot: "CertifiedSnapshot") -> str:
        return f"snapshot {snapshot.version} ({snapshot.snapshot_id}, digest {snapshot.digest})"

    whose = f"the tenant whose name has the SHA-256 {said.tenant_sha256}" if tenant is None else tenant
    signed = "--key names no key to check its signature with" if is_signed else "it is unsigned"
    lines = (
        "" if keys else f": {signed}",
        f"on {_date(said.created_ms)} the drafter {said.drafter} for {said.target} had forgotten {whose}",
        f"before: {named(said.start)}, to which learning went back",
        f"after: {named(said.result)}, {said.num_records} records and {said.num_steps} steps of learning later",
    )
    return CERTIFIED if keys else UNSURE, "\n  ".join(map(printable, lines))


def _served(settings: "Settings") -> "ServedTarget":
    from omnidraft import assembly
    from omnidraft.telemetry.metrics import CountingMetrics

    with download_bars() as progress:
        return assembly.engine(settings, CountingMetrics(), progress=progress).served[0]


def _of_receipt(
    receipt: "Receipt", choice: "SavedChoice", served: "ServedTarget", num_draft_tokens: int
) -> tuple[str, str]:
    """Return the verdict on a choice, and why. Raises SignatureRefused; RequestError where its ids are missing."""
    from omnidraft.serving.saved_response import NUM_SHOWN, compare

    if differing := receipt.model.differences(served.identity):
        pairs = [(each, getattr(receipt.model, each), getattr(served.identity, each)) for each in differing]
        return OTHER_MODEL, ": " + "; ".join(f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs)
    prompt, answer = receipt.ids(choice.ids("prompt_token_ids"), choice.ids("token_ids"))
    pair = served.engine.pair
    request = receipt.request(prompt, pair.target_tokenizer.thought_markers)
    verdict, why = _recomputed(served, request, answer, num_draft_tokens)
    if verdict is SAME:
        difference, compared = compare(choice, receipt.model.name, pair, request, answer)
        verdict, why = (SAME, f", {len(answer)} tokens{compared}") if difference is None else (DIFFERENT, difference)
    asked = "" if verdict is REFUSED else pair.target_tokenizer.vocabulary.spell(prompt).decode("utf-8", "replace")
    return verdict, why + (f"; its prompt ends with {asked[-NUM_SHOWN:]!r}" if asked else "")


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
    try:
        found = recompute(engine, request, answer_ids, num_draft_tokens=num_draft_tokens)
    except RequestError as exc:
        return REFUSED, f": no request has this answer: {exc}"
    if found is None:
        return SAME, ""
    given, drawn = (
        "its end" if token is None else f"{token} {engine.pair.spelled((token,))!r}"
        for token in (found.given, found.drawn)
    )
    apart = "" if found.logit_difference is None else f"; their logits differ by {found.logit_difference:+.4g}"
    return DIFFERENT, f" at token {found.index}: the answer has {given}, the model draws {drawn}{apart}"
