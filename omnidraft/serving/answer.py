"""One answer while it is decoded: its choices part by part, its usage, and what speculation did for it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from omnidraft.decode.drafted_spans import DraftedSpans
from omnidraft.decode.engine import Engine
from omnidraft.decode.receipt import ReceiptSigner, require_signer
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.params import numbers_of
from omnidraft.ports import Source, Step
from omnidraft.serving.answer_reader import AnswerReader
from omnidraft.serving.queued_request import QueuedRequest, QueuedText
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import ChoicePart, LogprobCollector, Thought
from omnidraft.serving.response_schemas import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecodingMetrics,
    Usage,
)
from omnidraft.vocab.tokenizer import Vocabulary


def response_metrics(stats: DecodeStats) -> ResponseMetrics:
    """Return the metrics of one text that has ended."""
    first_token_s = stats.first_token_s - stats.queue_s
    spent_s = first_token_s + stats.decode_s
    num_gaps = stats.num_tokens - 1
    return ResponseMetrics(
        time_to_first_token_ms=1000 * first_token_s,
        generation_time_ms=1000 * stats.decode_s,
        queue_time_ms=1000 * stats.queue_s,
        mean_itl_ms=1000 * stats.decode_s / num_gaps if num_gaps > 0 else None,
        tokens_per_second=stats.num_tokens / spent_s if spent_s > 0 else None,
        speculative_decoding=_acceptance(stats),
    )


def _acceptance(stats: DecodeStats) -> SpeculativeDecodingMetrics:
    drafted, accepted = stats.drafted_per_pass, stats.accepted_per_pass
    num_spec_tokens, num_steps = max(drafted, default=0), stats.num_passes - drafted[0]
    histogram = [accepted[count] for count in range(num_spec_tokens + 1)]
    histogram[0] -= drafted[0]  # passes without drafts accept nothing, and are no steps
    num_accepted, num_drafted = sum(accepted.elements()), sum(drafted.elements())
    return SpeculativeDecodingMetrics(
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=num_spec_tokens,
    )


Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as clients see it."""

    engine: Engine
    fingerprint: str
    """It identifies all that a text depends on besides the request; see ports.Target."""
    receipts: ReceiptSigner | None = None
    """Signs receipts; None: this worker gives none."""

    @property
    def name(self) -> str:
        return self.engine.pair.target

    @property
    def vocabulary(self) -> Vocabulary:
        return self.engine.pair.target_tokenizer.vocabulary


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a queued request, whatever the protocol."""

    queued: QueuedRequest
    model: ServedModel
    body: Body
    created: int
    """Seconds since 1970."""
    readers: list[AnswerReader] = field(default_factory=list)
    """Those of the choices, once they are read."""

    async def parts(self, ready: asyncio.Event) -> AsyncIterator[ChoicePart]:
        """Yield every step that has something to show. Raises what decoding raised."""
        collectors = [self._collector(text) for text in self.queued.texts]
        self.readers.extend(AnswerReader.of(text, self.model.engine.pair) for text in self.queued.texts)
        spans = [self._spans() for _ in self.queued.texts]
        begun: set[int] = set()
        async for index, step in steps_of(self.queued, ready):
            part = ChoicePart(index, index not in begun, stop_string=step.stop_string)
            part.token_ids = list(step.emitted)
            if step.finish_reason is not None:
                part.finish_reason = step.finish_reason.value
                part.receipt = self._receipt(index) if self.body.receipt else None
            collector = collectors[index]
            part.entries = None if collector is None else collector.take(step)
            if (follower := spans[index]) is not None:
                part.spans = follower.take(step)
            self.readers[index].read(step.text, part)
            if not self.body.include_reasoning:
                part.pieces = [piece for piece in part.pieces if not isinstance(piece, Thought)]
            if part.pieces or part.finish_reason or part.entries or self.body.return_token_ids:
                begun.add(index)
                yield part

    @property
    def system_fingerprint(self) -> str:
        """The snapshot that drafts, and all else that the text depends on besides the request; once a step has come."""
        sequence = self.queued.texts[0].sequence
        assert sequence is not None
        return f"{sequence.snapshot.snapshot_id}/{self.model.fingerprint}"

    def usage(self) -> Usage:
        """Return the usage so far."""
        texts = self.queued.texts
        prompts = [text.sequence for text in texts[:: self.body.n or 1] if text.sequence]
        num_prompt = sum(each.num_prompt_tokens for each in prompts)
        num_completion = 0 if self.body.max_tokens == 0 else sum(text.stats.num_tokens for text in texts)
        num_cached = sum(each.num_reused for each in prompts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
            completion_tokens_details=self._details(),
        )

    def _details(self) -> CompletionTokensDetails:
        """Return the tokens of thoughts, and what became of those that the client predicted, which count for each
        choice."""
        texts = self.queued.texts
        num_accepted = sum(text.stats.accepted_by_source[Source.PREDICTION] for text in texts)
        num_predicted = sum(len(text.decoded.prediction_ids) for text in texts if text.decoded is not None)
        num_rejected = max(num_predicted - num_accepted, 0)
        return CompletionTokensDetails(
            reasoning_tokens=sum(reader.num_thoughts for reader in self.readers),
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=num_rejected,
        )

    def figures(self) -> dict[str, object]:
        """Return what speculation did, the snapshot's version, the seeds and the sampling, under the name that a
        response has for it; nothing unless the request asks for it."""
        if not self.body.figures:
            return {}
        sequences = [text.sequence for text in self.queued.texts if text.sequence]
        origin = {"snapshot_version": sequences[0].snapshot.version, "seeds": [each.seed for each in sequences]}
        sampling = numbers_of(self.queued.texts[0].request.sampling)
        return {"omnidraft": {**self.queued.stats.summary(), **origin, "sampling": sampling}}

    def _receipt(self, index: int) -> dict[str, object]:
        """Return the receipt of a choice that has ended."""
        text = self.queued.texts[index]
        assert text.decoded is not None
        assert text.sequence is not None
        return require_signer(self.model.receipts).receipt(
            text.decoded,
            text.sequence.ids[len(text.decoded.prompt_ids) :],
            choice=index,
            snapshot_version=text.sequence.snapshot.version,
            as_digests=self.body.receipt == "digests",
        )

    def metrics(self) -> ResponseMetrics | None:
        """Return vLLM's metrics; None for several choices, as there."""
        return response_metrics(self.queued.stats) if len(self.queued.texts) == 1 else None

    def _spans(self) -> DraftedSpans | None:
        is_shown = self.body.figures and self.body.stream and self.queued.texts[0].request.tools is None
        return DraftedSpans(self.model.vocabulary) if is_shown else None

    def _collector(self, text: QueuedText) -> LogprobCollector | None:
        if self.body.num_log_probs is None:
            return None
        shown_ids = self.model.engine.shown_ids(text.request)
        return LogprobCollector(self.model.vocabulary, shown_ids, tells_all=self.body.tells_all_tokens)


async def steps_of(queued: QueuedRequest, ready: asyncio.Event) -> AsyncIterator[tuple[int, Step]]:
    """Yield each step with the number of its text, whenever `ready` is set, to the end. Raises what decoding raised."""
    while True:
        await ready.wait()
        ready.clear()
        for step in queued.ready_steps():
            if step is None:
                return
            yield step
