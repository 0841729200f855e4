"""The engine takes a request in text to steps: templates, checks, one snapshot to the last token, traces and
metrics."""

import secrets
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from omnidraft.config import DecodeSettings, RecorderSettings
from omnidraft.decode.loop import Decoder
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.sampling.validation import check_sampling, require_text, unsigned_seed
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import DriftThrottle
from omnidraft.decode.step_telemetry import count_steps, span_steps
from omnidraft.errors import RequestError
from omnidraft.ports import Metrics, Mode, NoopTracing, Request, Sampling, Span, Step, Tracing
from omnidraft.vocab.tokenizer import Tokenizer


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows its model's chat template and stop ids."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def chat_prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def prompt_ids(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request in text; None takes the deployment's setting."""

    prompt: str | None = None
    """Plain text to continue; exactly one of prompt and messages is given."""
    messages: Sequence[Mapping[str, str]] | None = None
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    """None takes 64 random bits."""
    stop_strings: tuple[str, ...] = ()
    mode: Mode | None = None
    num_draft_tokens: int | None = None
    """0 is plain decoding."""
    num_log_probs: int | None = None
    """Number of most probable ids to return with each token; None returns no log-probabilities."""
    is_stored: bool = True
    """Whether it may be recorded for training."""
    tenant: str = "default"
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    traceparent: str | None = None
    """The caller's W3C trace context."""


@dataclass(frozen=True, slots=True)
class GenerationStream:
    """One text being generated."""

    snapshot: LoadedSnapshot
    seed: int
    num_prompt_tokens: int
    steps: Generator[Step, None, None]
    """Closing it ends the text early and frees the target's memory."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The target and the drafter that an engine serves, by name, with their tokenizers."""

    target: str
    drafter: str
    worker: str
    alignment: str
    target_tokenizer: PromptTokenizer
    drafter_tokenizer: PromptTokenizer


class Engine:
    """One target and one snapshot slot. Any thread may start a text; one thread at a time runs its steps."""

    def __init__(
        self,
        decoder: Decoder,
        pair: Pair,
        slot: SnapshotSlot,
        producer: TraceProducer | None,
        metrics: Metrics,
        *,
        decode: DecodeSettings,
        recording: RecorderSettings,
        tracing: Tracing | None = None,
        has_pass_spans: bool = True,
    ) -> None:
        """Serve one pair. With `has_pass_spans` every pass is a span of its own, where `tracing` is on."""
        self.drift_throttle = DriftThrottle(decode.drifted_draft_tokens)
        self.pair = pair
        self.slot = slot
        self.decoder = decoder
        self._producer = producer
        self._metrics = metrics
        self._decode = decode
        self._recording = recording
        self._tracing = tracing or NoopTracing()
        self._has_pass_spans = has_pass_spans

    def stream(self, request: GenerationRequest, snapshot: LoadedSnapshot | None = None) -> GenerationStream:
        """Start a text with this snapshot, or else with the one that the slot gives its id.

        Raises:
            RequestError: the request cannot be served.
        """
        snapshot = snapshot or self.slot.snapshot_for(request.request_id)
        decode_request = self.decode_request(request)
        span = self._begin_span(request, decode_request, snapshot)
        steps = self.decoder.decode(decode_request, snapshot.proposer)
        if self._producer is not None and request.is_stored and request.tenant not in self._recording.opted_out:
            steps = self._record_steps(steps, self._record_builder(request, decode_request, snapshot, span.context))
        if self._tracing.is_on:
            steps = span_steps(steps, self._tracing, span, has_passes=self._has_pass_spans)
        plain_pass_s = self.decoder.plain_pass_s(decode_request.mode)
        counted = count_steps(steps, self._metrics, self.pair.target, str(snapshot.version), plain_pass_s)
        return GenerationStream(snapshot, decode_request.seed, len(decode_request.prompt_ids), counted)

    def prepare(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with its grammar compiled in the caller's thread, so that decoding never waits for it.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return request
        compiled = self.decoder.grammars.compile(grammar)
        return replace(request, sampling=replace(request.sampling, grammar=compiled))

    def decode_request(self, request: GenerationRequest) -> Request:
        """Return the request in token ids, completed with the deployment's settings. Raises RequestError."""
        require_text(_client_texts(request))
        check_sampling(request.sampling, len(self.pair.target_tokenizer.vocabulary))
        default = self.drift_throttle.limit(request.tenant, self._decode.num_draft_tokens)
        num_draft = default if request.num_draft_tokens is None else request.num_draft_tokens
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if num_draft < 0:
            raise RequestError(f"num_draft_tokens must be at least 0, got {num_draft}")
        return Request(
            prompt_ids=tuple(_prompt_ids(request, self.pair.target_tokenizer)),
            drafter_prompt_ids=tuple(self._drafter_prompt_ids(request)),
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            seed=secrets.randbits(64) if request.seed is None else unsigned_seed(request.seed),
            stop_ids=self.pair.target_tokenizer.stop_ids,
            stop_strings=tuple(stop.encode() for stop in request.stop_strings if stop),
            mode=request.mode or self._decode.mode,
            num_draft_tokens=num_draft,
            tenant=request.tenant,
            num_log_probs=request.num_log_probs,
        )

    def _drafter_prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Return the drafter's prompt ids; none where it has no template, or one that refuses these messages: it then
        reads the answer only."""
        try:
            return _prompt_ids(request, self.pair.drafter_tokenizer)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self.decoder.failures.report(exc)
            return []

    def _begin_span(self, request: GenerationRequest, decode_request: Request, snapshot: LoadedSnapshot) -> Span:
        return self._tracing.begin(
            "decode",
            parent=request.traceparent,
            model=self.pair.target,
            drafter_version=str(snapshot.version),
            request_id=request.request_id,
            mode=decode_request.mode,
            prompt_tokens=len(decode_request.prompt_ids),
        )

    def _record_builder(
        self, request: GenerationRequest, decode_request: Request, snapshot: LoadedSnapshot, traceparent: str | None
    ) -> TraceRecordBuilder:
        assert self._producer is not None
        pair = self.pair
        context = RecordContext(
            request.request_id,
            request.tenant,
            pair.worker,
            pair.target,
            pair.drafter,
            snapshot.version,
            pair.alignment,
            traceparent,
        )
        return TraceRecordBuilder(decode_request, context, self._recording, self._producer.emit)

    def _record_steps(self, steps: Iterator[Step], builder: TraceRecordBuilder) -> Iterator[Step]:
        for step in steps:
            builder.take(step)
            yield step


def _prompt_ids(request: GenerationRequest, tokenizer: PromptTokenizer) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either a prompt or messages")
    if request.messages is not None:
        if not request.messages:
            raise RequestError("the prompt is empty; give at least one message")
        return tokenizer.chat_prompt_ids(request.messages)
    if not request.prompt:
        raise RequestError("the prompt is empty; give at least one character")
    return tokenizer.prompt_ids(request.prompt)


def _client_texts(request: GenerationRequest) -> Mapping[str, Iterable[str]]:
    """Return every string that the client wrote, by its field in the request."""
    messages = [text for message in request.messages or () for text in message.values()]
    texts = {"prompt": [request.prompt or ""], "stop": request.stop_strings, "user": [request.tenant]}
    grammar = request.sampling.grammar
    return {**texts, "messages": messages, **({grammar.kind: [grammar.text]} if grammar else {})}
