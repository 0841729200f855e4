"""The engine takes a request in text to steps: templates, checks, one snapshot to the end, traces and metrics."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Event

from omnidraft.config import DecodeSettings
from omnidraft.decode import prompting
from omnidraft.decode.decoder import Decoder, SequenceOutput
from omnidraft.decode.drafting.session_pool import DrafterMemory
from omnidraft.decode.generation import GenerationRequest, GenerationStream
from omnidraft.decode.prompting import Pair
from omnidraft.decode.receipt import require_reproducible
from omnidraft.decode.recording.record_builder import SEGMENT_TOKENS, RecordContext, TraceRecordBuilder
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.step_telemetry import StepCounter, StepObserver, TextSpan
from omnidraft.decode.teacher_forcing import PromptToken, score_prompt
from omnidraft.errors import ModeRefused, RequestError
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.params import check_sampling, require_integer, require_text
from omnidraft.ports import Metrics, Mode, NoopTracing, Request, Span, Step, Tracing, ids_needed, recorded_work
from omnidraft.traces.request_ids import request_of
from omnidraft.vocab.thoughts import Thoughts


class Engine:
    """One target and one snapshot slot. One thread at a time adds texts and runs their rounds."""

    def __init__(
        self,
        decoder: Decoder,
        pair: Pair,
        slot: SnapshotSlot,
        producer: TraceProducer | None,
        metrics: Metrics,
        *,
        decode: DecodeSettings,
        opted_out: Collection[str] = (),
        tracing: Tracing | None = None,
        recent: RecentTexts | None = None,
        drafter_memory: DrafterMemory | None = None,
    ) -> None:
        """Serve one pair. Tenants that are `opted_out` are never recorded. Texts that end are remembered in `recent`,
        which the draft sources of the slot's snapshots read; their drafters keep keys in `drafter_memory`."""
        self.pair = pair
        self.slot = slot
        self.decoder = decoder
        self._producer = producer
        self._metrics = metrics
        self._decode = decode
        self._opted_out = opted_out
        self.segment_tokens = SEGMENT_TOKENS
        """Emitted tokens of a trace record, after which a text may go on with another snapshot."""
        self._tracing = tracing or NoopTracing()
        self.recent = recent
        self._drafter_memory = drafter_memory or DrafterMemory(0)
        self._num_preemptions = 0
        self._must_forget = Event()

    def add_request(
        self,
        request: GenerationRequest,
        snapshot: LoadedSnapshot | None = None,
        *,
        client: str = "",
        cache_scope: str | None = None,
        decoded: Request | None = None,
    ) -> SequenceState:
        """Add a text to the next rounds, with this snapshot or else with the one that the slot gives its id.

        Args:
            client: texts are admitted fairly over clients.
            cache_scope: texts of one scope may reuse each other's keys; None reuses nothing.
            decoded: what `decode_request` returned for the request, where it was called before.

        Raises:
            RequestError: the request cannot be served.
        """
        snapshot = snapshot or self.slot.snapshot_for(request.request_id)
        decode_request = replace(decoded or self.decode_request(request), cache_scope=cache_scope)
        return self._add(self.decoder, request, decode_request, snapshot, client=client, cache_scope=cache_scope)

    def _add(
        self,
        decoder: Decoder,
        request: GenerationRequest,
        decode_request: Request,
        snapshot: LoadedSnapshot,
        *,
        client: str = "",
        cache_scope: str | None = None,
    ) -> SequenceState:
        sequence = decoder.add(decode_request, snapshot.proposer, client=client, cache_scope=cache_scope)
        try:
            sequence.observers = self._observers(request, decode_request, snapshot)
        except BaseException:
            decoder.abort(sequence)
            raise
        sequence.snapshot, sequence.request_id = snapshot, request.request_id
        return sequence

    def step(self) -> list[SequenceOutput]:
        """Run one round over all texts; return the steps of those that drew tokens, and the errors that ended texts."""
        if self._must_forget.is_set():
            self._forget()
        outputs = self.decoder.step()
        for at, output in enumerate(outputs):
            sequence = output.sequence
            if output.error is not None:
                outputs[at] = replace(output, error=self._text_error(output.error, sequence.request.mode))
            if not sequence.has_begun:
                self._count_prefix(sequence)
            if not sequence.is_over and sequence.num_emitted >= self.segment_tokens:
                self._follow_slot(sequence)
        self._count_preemptions()
        return outputs

    def _follow_slot(self, sequence: SequenceState) -> None:
        """Move a long text from a snapshot that no longer serves, so that it can be freed; choices move to the same."""
        if all(each.proposer is not sequence.snapshot.proposer for each in self.slot.serving):
            snapshot = self.slot.snapshot_for(request_of(sequence.request_id))
            self.decoder.move(sequence, snapshot.proposer)
            sequence.move(snapshot)

    def _count_prefix(self, sequence: SequenceState) -> None:
        sequence.has_begun = True
        add = partial(self._metrics.add, target=self.pair.target)
        add("omnidraft_prefix_cache_queries_total", sequence.num_prompt_tokens)
        add("omnidraft_prefix_cache_hits_total", sequence.num_reused)

    def _count_preemptions(self) -> None:
        num_preemptions = self.decoder.scheduler.num_preemptions
        if num_preemptions > self._num_preemptions:
            added, self._num_preemptions = num_preemptions - self._num_preemptions, num_preemptions
            self._metrics.add("omnidraft_preemptions_total", added, target=self.pair.target)

    def abort(self, sequence: SequenceState) -> None:
        """End a text early, if it runs; what was read of its prompt stays for a client that asks again."""
        self.decoder.abort(sequence, keeps_keys=True)

    def has_room(self, client: str, reserved: Sequence[str] = ()) -> bool:
        """See Scheduler.has_room."""
        return self.decoder.scheduler.has_room(client, reserved)

    def forget_texts(self) -> None:
        """Drop the keys and the memory of all finished texts, before the next round; running ones will leave none.
        Any thread may call this."""
        self._must_forget.set()

    def _forget(self) -> None:
        self._must_forget.clear()
        self.decoder.scheduler.prefixes.clear()
        for sequence in self.decoder.scheduler.sequences:
            sequence.forget()
        self._drafter_memory.forget()
        if self.recent is not None:
            self.recent.clear()

    @property
    def has_work(self) -> bool:
        """Whether texts run or wait."""
        return bool(self.decoder.scheduler.sequences)

    def stream(self, request: GenerationRequest, snapshot: LoadedSnapshot | None = None) -> GenerationStream:
        """Start a text that is generated alone, beside no other one; see `add_request`."""
        snapshot = snapshot or self.slot.snapshot_for(request.request_id)
        decode_request = self.decode_request(request)
        steps = self._steps_alone(request, decode_request, snapshot)
        return GenerationStream(snapshot, decode_request.seed, len(decode_request.prompt_ids), steps)

    def score_prompt(self, request: GenerationRequest, decode_request: Request) -> Iterator[list[PromptToken]]:
        """Yield the prompt's tokens with their log-probabilities, a pass of the target for each item. `decode_request`:
        what the method of that name returned for the request. Raises RequestError."""
        assert request.num_prompt_log_probs is not None
        try:
            yield from score_prompt(self.decoder, decode_request, request.num_prompt_log_probs)
        except ModeRefused as exc:
            raise self._text_error(exc, decode_request.mode) from None

    def _text_error(self, error: Exception, mode: Mode) -> Exception:
        """Return the error that ends a text of this mode: the request's own where the target refuses a mode that is
        not the deployment's, since no setting is wrong then."""
        if isinstance(error, ModeRefused) and mode != self._decode.mode:
            return RequestError(f"mode: not served here: {error.reason}")
        return error

    def _steps_alone(
        self, request: GenerationRequest, decode_request: Request, snapshot: LoadedSnapshot
    ) -> Generator[Step, None, None]:
        alone = self.decoder.alone()
        yield from alone.steps(self._add(alone, request, decode_request, snapshot))

    def _observers(
        self, request: GenerationRequest, decode_request: Request, snapshot: LoadedSnapshot
    ) -> tuple[StepObserver, ...]:
        """Return what follows the steps of a text: its trace record, its spans and the metrics."""
        span = self._begin_span(request, decode_request, snapshot)
        observers: list[StepObserver] = []
        if decode_request.is_stored:
            if self._producer is not None:
                observers.append(self._record_builder(request, decode_request, snapshot, span.context))
            if self.recent is not None:
                observers.append(TextMemorizer(self.recent, decode_request))
        if self._tracing.is_on:
            observers.append(TextSpan(self._tracing, span))
        plain_token_s = partial(self.decoder.plain_token_s, decode_request.mode)
        observers.append(StepCounter(self._metrics, self.pair.target, str(snapshot.version), plain_token_s))
        return tuple(observers)

    def prepare(
        self, request: GenerationRequest, *, client: str = "", cache_scope: str | None = None
    ) -> GenerationRequest:
        """Return the request with its grammar compiled in the caller's thread, so that decoding never waits for it.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        request = prompting.with_grammar(request, self.pair)
        sampling = self.decoder.grammars.prepared(request.sampling, client=client, cache_scope=cache_scope)
        return replace(request, sampling=sampling)

    def decode_request(self, request: GenerationRequest) -> Request:
        """Return the request in token ids, completed with the deployment's settings. Raises RequestError."""
        require_text(prompting.client_texts(request))
        request = prompting.with_grammar(request, self.pair)
        check_sampling(request.sampling, len(self.pair.target_tokenizer.vocabulary))
        work = recorded_work(has_grammar=request.sampling.grammar is not None)
        default = self.slot.rules.limit(request.tenant, work, self._decode.num_draft_tokens)
        is_default = request.num_draft_tokens is None and default == self._decode.num_draft_tokens
        num_draft = default if request.num_draft_tokens is None else request.num_draft_tokens
        require_integer("num_draft_tokens", num_draft, at_least=0)
        mode = request.mode or self._decode.mode
        if request.has_receipt:
            require_reproducible(mode)
        context_limit = self.decoder.target.context_limit
        target_ids = prompting.read_prompt(request, self.pair, context_limit)
        thoughts = prompting.thoughts_of(request, self.pair, target_ids)
        max_new_tokens = request.max_new_tokens_after(len(target_ids), self.decoder.target)
        ids_needed(target_ids, max_new_tokens, context_limit)
        return Request(
            prompt_ids=tuple(target_ids),
            drafter_prompt_ids=self._drafter_prompt_ids(request, thoughts),
            max_new_tokens=max_new_tokens,
            sampling=request.sampling,
            seed=request.noise_seed(),
            stop_ids=prompting.stop_ids(request, self.pair.target_tokenizer),
            stop_strings=tuple(stop.encode() for stop in request.stop_strings if stop),
            mode=mode,
            num_draft_tokens=num_draft,
            num_memory_tokens=self._decode.num_memory_tokens if is_default else 0,
            tenant=request.tenant,
            is_stored=request.is_stored and request.tenant not in self._opted_out,
            num_log_probs=request.num_log_probs,
            has_tools=request.tools is not None and bool(request.tools.callable_tools),
            prediction_ids=tuple(self.pair.target_tokenizer.encode(request.prediction)),
            shown_ids=self.shown_ids(request),
            min_new_tokens=request.min_new_tokens,
            bad_ids=prompting.bad_ids(request, self.pair.target_tokenizer),
            keeps_stop=request.keeps_stop,
            thoughts=thoughts,
        )

    def shown_ids(self, request: GenerationRequest) -> Mapping[int, bytes]:
        """Return the ids that spell nothing and whose text the answer shows nevertheless."""
        if request.shows_special:
            return self.pair.special_texts
        return self.pair.shown_ids(is_chat=request.messages is not None, has_tools=request.tools is not None)

    def _drafter_prompt_ids(self, request: GenerationRequest, thoughts: Thoughts | None) -> tuple[int, ...]:
        """Return the drafter's prompt ids; none without a drafter, or where its template is missing or refuses them."""
        try:
            return tuple(prompting.drafter_prompt_ids(request, self.pair, thoughts))
        except Exception as exc:  # the boundary: see safe_drafting.py
            self.decoder.failures.report(exc)
            return ()

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
        models = (pair.worker, pair.target, pair.drafter, snapshot.version, pair.alignment)
        context = RecordContext(request.request_id, request.tenant, *models, traceparent)
        return TraceRecordBuilder(decode_request, context, self._producer.emit, segment_tokens=self.segment_tokens)
