"""From a question in text to steps: templates, checks, one snapshot to the last token, traces and metrics."""

import secrets
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from omnidraft.config import DecodeSettings, RecorderSettings
from omnidraft.decode.decode_spans import span_steps
from omnidraft.decode.loop import Decoder
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.sampling.validation import check_sampling, require_text, unsigned_seed
from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.step_metrics import count_steps
from omnidraft.errors import RequestError
from omnidraft.ports import Metrics, Mode, NoopTracing, Request, Sampling, Span, Step, Tracing
from omnidraft.vocab.tokenizer import Tokenizer


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows its model's templates and ends."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def chat_prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def prompt_ids(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asks for; None takes the deployment's setting."""

    prompt: str | None = None
    """Plain text to go on with; exactly one of prompt and messages."""
    messages: Sequence[Mapping[str, str]] | None = None
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    """None: 64 fresh random bits."""
    stop_strings: tuple[str, ...] = ()
    mode: Mode | None = None
    num_draft_tokens: int | None = None
    """0 is plain decoding."""
    num_log_probs: int | None = None
    """The likeliest ids told with each token; None tells nothing."""
    is_stored: bool = True
    """Whether the learner may see it."""
    tenant: str = "default"
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    traceparent: str | None = None
    """The caller's W3C trace context."""


@dataclass(frozen=True, slots=True)
class GenerationStream:
    """A text under way."""

    snapshot: LoadedSnapshot
    seed: int
    num_prompt_tokens: int
    steps: Generator[Step, None, None]
    """Closing it ends the text early and frees the target's memory."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What the engine serves."""

    target: str
    drafter: str
    worker: str
    alignment: str
    target_tokenizer: PromptTokenizer
    drafter_tokenizer: PromptTokenizer


class Engine:
    """One target, one slot. Answers may be asked for by any thread; their steps are run by one thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        pair: Pair,
        slot: SnapshotSlot,
        recorder: TraceProducer | None,
        metrics: Metrics,
        *,
        decode: DecodeSettings,
        recording: RecorderSettings,
        tracing: Tracing | None = None,
        has_pass_spans: bool = True,
    ) -> None:
        """`has_pass_spans`: where `tracing` is on, every pass is a span."""
        self.caution = DriftThrottle(decode.drifted_draft_tokens)
        self.pair = pair
        self.slot = slot
        self.decoder = decoder
        self._recorder = recorder
        self._metrics = metrics
        self._decode = decode
        self._recording = recording
        self._tracing = tracing or NoopTracing()
        self._has_pass_spans = has_pass_spans

    def stream(self, question: GenerationRequest, snapshot: LoadedSnapshot | None = None) -> GenerationStream:
        """Start a text with this snapshot, or else the one that its id has now.

        Raises:
            RequestError: the question asks for what cannot be served.
        """
        snapshot = snapshot or self.slot.serving(question.request_id)
        request = self.request(question)
        span = self._begun(question, request, snapshot)
        steps = self.decoder.decode(request, snapshot.proposer)
        if self._recorder is not None and question.is_stored and question.tenant not in self._recording.opted_out:
            steps = self._recorded(steps, self._tracer(question, request, snapshot, span.context))
        if self._tracing.is_on:
            steps = span_steps(steps, self._tracing, span, has_passes=self._has_pass_spans)
        plain_pass_s = self.decoder.plain_pass_s(request.mode)
        told = count_steps(steps, self._metrics, self.pair.target, str(snapshot.version), plain_pass_s)
        return GenerationStream(snapshot, request.seed, len(request.prompt_ids), told)

    def prepared(self, question: GenerationRequest) -> GenerationRequest:
        """Return the question with its grammar compiled, in the caller's thread, so that decoding never waits for it.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        grammar = question.sampling.grammar
        if grammar is None:
            return question
        compiled = self.decoder.grammars.compiled(grammar)
        return replace(question, sampling=replace(question.sampling, grammar=compiled))

    def request(self, question: GenerationRequest) -> Request:
        """The question in ids, with the deployment's settings. Raises RequestError."""
        require_text(_texts(question))
        check_sampling(question.sampling, len(self.pair.target_tokenizer.vocabulary))
        usual = self.caution.limit(question.tenant, self._decode.num_draft_tokens)
        num_draft = usual if question.num_draft_tokens is None else question.num_draft_tokens
        if question.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {question.max_new_tokens}")
        if num_draft < 0:
            raise RequestError(f"num_draft_tokens must be at least 0, got {num_draft}")
        return Request(
            prompt_ids=tuple(_prompt_ids(question, self.pair.target_tokenizer)),
            drafter_prompt_ids=tuple(self._drafter_prompt_ids(question)),
            max_new_tokens=question.max_new_tokens,
            sampling=question.sampling,
            seed=secrets.randbits(64) if question.seed is None else unsigned_seed(question.seed),
            stop_ids=self.pair.target_tokenizer.stop_ids,
            stop_strings=tuple(stop.encode() for stop in question.stop_strings if stop),
            mode=question.mode or self._decode.mode,
            num_draft_tokens=num_draft,
            tenant=question.tenant,
            num_log_probs=question.num_log_probs,
        )

    def _drafter_prompt_ids(self, question: GenerationRequest) -> list[int]:
        """None where the drafter has no template, or one that refuses these messages: it then knows the answer only."""
        try:
            return _prompt_ids(question, self.pair.drafter_tokenizer)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self.decoder.failures.tell(exc)
            return []

    def _begun(self, question: GenerationRequest, request: Request, snapshot: LoadedSnapshot) -> Span:
        return self._tracing.begin(
            "decode",
            parent=question.traceparent,
            model=self.pair.target,
            drafter_version=str(snapshot.version),
            request_id=question.request_id,
            mode=request.mode,
            prompt_tokens=len(request.prompt_ids),
        )

    def _tracer(
        self, question: GenerationRequest, request: Request, snapshot: LoadedSnapshot, traceparent: str | None
    ) -> TraceRecordBuilder:
        assert self._recorder is not None
        pair = self.pair
        origin = RecordContext(
            question.request_id,
            question.tenant,
            pair.worker,
            pair.target,
            pair.drafter,
            snapshot.version,
            pair.alignment,
            traceparent,
        )
        return TraceRecordBuilder(request, origin, self._recording, self._recorder.emit)

    def _recorded(self, steps: Iterator[Step], tracer: TraceRecordBuilder) -> Iterator[Step]:
        for step in steps:
            tracer.take(step)
            yield step


def _prompt_ids(question: GenerationRequest, tokenizer: PromptTokenizer) -> list[int]:
    if (question.prompt is None) == (question.messages is None):
        raise RequestError("give either a prompt or messages")
    if question.messages is not None:
        if not question.messages:
            raise RequestError("the prompt is empty; give at least one message")
        return tokenizer.chat_prompt_ids(question.messages)
    if not question.prompt:
        raise RequestError("the prompt is empty; give at least one character")
    return tokenizer.prompt_ids(question.prompt)


def _texts(question: GenerationRequest) -> Mapping[str, Iterable[str]]:
    """All that a client wrote, by its name in the request."""
    messages = [text for message in question.messages or () for text in message.values()]
    texts = {"prompt": [question.prompt or ""], "stop": question.stop_strings, "user": [question.tenant]}
    grammar = question.sampling.grammar
    return {**texts, "messages": messages, **({grammar.kind: [grammar.text]} if grammar else {})}
