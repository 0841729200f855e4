"""One answer while it is decoded: its choices part by part, its usage, and what speculation did for it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from omnidraft.decode.drafted_spans import DraftedSpans
from omnidraft.decode.engine import Engine
from omnidraft.ports import Step
from omnidraft.serving.queued_request import QueuedRequest, QueuedText
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import ChoicePart, LogprobCollector, NamedCall
from omnidraft.serving.response_metrics import response_metrics
from omnidraft.serving.response_schemas import PromptTokensDetails, ResponseMetrics, Usage
from omnidraft.serving.tool_calls import reader_of
from omnidraft.vocab.tokenizer import Vocabulary

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as clients see it."""

    engine: Engine
    fingerprint: str
    """It identifies all that a text depends on besides the request; see ports.Target."""

    @property
    def name(self) -> str:
        return self.engine.pair.target

    @property
    def vocabulary(self) -> Vocabulary:
        return self.engine.pair.target_tokenizer.vocabulary


@dataclass(frozen=True, slots=True)
class Answer:
    """What a queued request is answered with, whatever the protocol."""

    queued: QueuedRequest
    model: ServedModel
    body: Body
    created: int
    """Seconds since 1970."""

    async def parts(self, ready: asyncio.Event) -> AsyncIterator[ChoicePart]:
        """Yield every step that has something to show. Raises what decoding raised."""
        collectors = [self._collector(text) for text in self.queued.texts]
        form = self.model.engine.pair.tool_format
        readers = [reader_of(text.request, form) for text in self.queued.texts]
        spans = [self._spans() for _ in self.queued.texts]
        begun: set[int] = set()
        async for index, step in steps_of(self.queued, ready):
            pieces: list[str | NamedCall] = [step.text] if step.text else []
            part = ChoicePart(index, index not in begun, pieces, stop_string=step.stop_string)
            if step.finish_reason is not None:
                part.finish_reason = step.finish_reason.value
            collector = collectors[index]
            part.entries = None if collector is None else collector.take(step)
            if (follower := spans[index]) is not None:
                part.spans = follower.take(step)
            if (reader := readers[index]) is not None:
                reader.read(part)
            if part.pieces or part.finish_reason or part.entries:
                begun.add(index)
                yield part

    @property
    def system_fingerprint(self) -> str:
        """The snapshot that drafts, and all else that the text depends on besides the request; once a step has come."""
        generation = self.queued.texts[0].generation
        assert generation is not None
        return f"{generation.snapshot.snapshot_id}/{self.model.fingerprint}"

    def usage(self) -> Usage:
        """Return the usage so far."""
        texts, num_per_prompt = self.queued.texts, self.body.n or 1
        prompts = [text.generation for text in texts[::num_per_prompt] if text.generation]
        num_prompt = sum(each.num_prompt_tokens for each in prompts)
        num_completion = sum(text.stats.num_tokens for text in texts)
        num_cached = sum(each.num_cached_tokens for each in prompts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )

    def figures(self) -> dict[str, object]:
        """Return what speculation did, the snapshot's version and the seeds, under the name that responses have for
        it; nothing unless the request asks for it."""
        if not self.body.figures:
            return {}
        generations = [text.generation for text in self.queued.texts if text.generation]
        origin = {"snapshot_version": generations[0].snapshot.version, "seeds": [each.seed for each in generations]}
        return {"omnidraft": self.queued.stats.summary() | origin}

    def metrics(self) -> ResponseMetrics | None:
        """Return vLLM's metrics; None for several choices, as there."""
        return response_metrics(self.queued.stats) if len(self.queued.texts) == 1 else None

    def _spans(self) -> DraftedSpans | None:
        is_shown = self.body.figures and self.body.stream and self.queued.texts[0].request.tools is None
        return DraftedSpans(self.model.vocabulary) if is_shown else None

    def _collector(self, text: QueuedText) -> LogprobCollector | None:
        if self.body.num_log_probs is None:
            return None
        return LogprobCollector(self.model.vocabulary, self.model.engine.shown_ids(text.request))


async def steps_of(queued: QueuedRequest, ready: asyncio.Event) -> AsyncIterator[tuple[int, Step]]:
    """Yield each step with the number of its text, whenever `ready` is set, to the end. Raises what decoding raised."""
    while True:
        await ready.wait()
        ready.clear()
        for step in queued.ready_steps():
            if step is None:
                return
            yield step
