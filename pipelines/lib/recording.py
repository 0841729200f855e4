"""Trace records made offline: of given texts, or of a target's own answers at temperature 0.

Shapes: as in traces/record.py.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft import assembly, config, prompts
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.prompting import PromptTokenizer
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.teacher_forcing import force
from omnidraft.errors import RequestError
from omnidraft.ports import Proposer, Request, Step, Target
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord


def request_for(
    prompt: Prompt, tokenizers: assembly.Vocabularies, max_new_tokens: int, num_draft_tokens: int
) -> Request:
    """Return a request in fast mode at temperature 0; `num_draft_tokens` 0 is plain decoding."""
    return Request(
        prompt_ids=tuple(ids_of(prompt, tokenizers.target)),
        drafter_prompt_ids=tuple(ids_of(prompt, tokenizers.drafter)),
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizers.target.stop_ids,
        mode="fast",
        num_draft_tokens=num_draft_tokens,
    )


def ids_of(prompt: Prompt, tokenizer: PromptTokenizer) -> Sequence[int]:
    """Return the ids that a model answers behind."""
    if tokenizer.has_chat_template:
        return tokenizer.chat_prompt_ids(_messages(prompt))
    return tokenizer.prompt_ids(prompt.text)


def fields_of(prompt: Prompt, tokenizer: PromptTokenizer) -> Mapping[str, Any]:
    """Return the field of a GenerationRequest for the target with this tokenizer."""
    return {"messages": _messages(prompt)} if tokenizer.has_chat_template else {"prompt": prompt.text}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]


WORKER = "pipelines.record"
MAX_NEW_TOKENS = 400
"""The limit of each answer where no other is given."""


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """The limits and the tenant of recorded answers."""

    max_new_tokens: int
    tenant: str


def require_not_given(options: Mapping[str, object], reason: str) -> None:
    """Raise RequestError, with this reason, where one of these command-line options has a value."""
    for name, value in options.items():
        if value is not None:
            raise RequestError(f"{name} {reason}")


def rows_of_split(path: Path, num: int, split: str, skip: int = 0) -> list[Prompt]:
    """Return `num` rows of the split after the first `skip`: what is learned must not judge.

    Raises:
        RequestError: the file is missing or too short, or does not say which rows are to be learned.
    """
    read = prompts.read(path, num, skip=skip, split=split)
    if any(each.split is None for each in read):
        raise RequestError(f"{path} has rows without `split`, train or test: what is learned must not judge")
    if len(read) < num:
        raise RequestError(f"{path} has {len(read)} rows of split {split} after the first {skip}, fewer than {num}")
    return read


class Recording:
    """Records answers of one target, and keeps each in a folder until all are there."""

    def __init__(self, settings: config.Settings, parts: Path, limits: RecordingLimits, *, is_given: bool) -> None:
        """
        Args:
            parts: folder of finished answers; those of this recording are not made again.
            is_given: score the answers that come with the prompts; otherwise the target answers them.
        """
        self._settings, self._limits, self._is_given = settings, limits, is_given
        self._parts = parts
        self._tokenizers = assembly.vocabularies(settings)
        self._target: Target | None = None
        self._drafter: Proposer | None = None

    def records_of(self, rows: Sequence[Prompt], title: str = "recording") -> list[TraceRecord]:
        """Return the records of all prompts, in order; the models are loaded when the first is missing.

        Args:
            title: of the progress bar.

        Raises:
            RequestError: a prompt without an answer where answers are to be given, or too long for the target.
        """
        self._parts.mkdir(parents=True, exist_ok=True)
        records: list[TraceRecord] = []
        with bar(title, len(rows)) as advance:
            for number, prompt in enumerate(rows):
                part = self._parts / f"{self._name(number, prompt)}.avro"
                if not part.exists():
                    archive.write(part, self._record(part.stem, prompt))
                records += archive.read(part)
                advance()
        return records

    def _name(self, number: int, prompt: Prompt) -> str:
        """Return a hash of everything that the records of a prompt depend on; it names them and their request."""
        settings = self._settings
        drafting = (settings.decode.mode,) if self._is_given else (settings.decode, settings.cache)
        dependencies = (settings.models, settings.recorder, *drafting, self._is_given, self._limits, number, prompt)
        return hashlib.sha256(repr(dependencies).encode()).hexdigest()[:24]

    def _record(self, name: str, prompt: Prompt) -> list[TraceRecord]:
        models, limits = self._settings.models, self._limits
        context = RecordContext(
            request_id=f"recorded-{name}",
            tenant=limits.tenant,
            worker=WORKER,
            target=models.target,
            drafter=models.drafter,
            snapshot_version=None,
            alignment=self._tokenizers.alignment.fingerprint,
        )
        num_draft_tokens = self._settings.decode.num_draft_tokens
        request = request_for(prompt, self._tokenizers, limits.max_new_tokens, num_draft_tokens)
        records: list[TraceRecord] = []
        builder = TraceRecordBuilder(request, context, records.append)
        for step in self._steps(request, prompt):
            builder.take(step)
        return records

    def _steps(self, request: Request, prompt: Prompt) -> Iterator[Step]:
        target = self._target = self._target or assembly.target(self._settings, self._tokenizers)
        top_k = self._settings.recorder.top_k
        if self._is_given:
            return force(target, request, self._answer_ids(prompt), top_k)
        if self._drafter is None:
            shared = assembly.shared_drafting(self._settings.decode, MeasuredCosts(target))
            self._drafter = assembly.snapshot_loader(self._settings, self._tokenizers, shared)(None, None).proposer
        return Decoder(target, self._tokenizers.target.vocabulary, trace_top_k=top_k).decode(request, self._drafter)

    def _answer_ids(self, prompt: Prompt) -> Sequence[int]:
        ids = prompt.answer_ids or self._tokenizers.target.encode(prompt.answer or "")
        if not ids:
            raise RequestError(f"no answer_ids and no answer to score: {prompt.text[:60]!r}")
        size = len(self._tokenizers.target.vocabulary)
        if not all(0 <= each < size for each in ids):
            raise RequestError(f"answer_ids outside the target's {size} ids, of the prompt {prompt.text[:60]!r}")
        return ids
