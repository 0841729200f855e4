"""The Python API: `LLM.generate`, `chat` and `stream` over the same engine as the server, with vLLM's names.

    from omnidraft import LLM, SamplingParams

    llm = LLM(target="qwen2.5-coder-0.5b", drafter="smollm2-135m")
    for output in llm.chat(["What is a monad?", "What is a torque?"], SamplingParams(temperature=0, max_tokens=64)):
        print(output.outputs[0].text, output.outputs[0].stats)

No other process is needed: no broker, no registry, no Ray. Nothing is recorded, unless `LLM(learn=True, home=DIR)`
learns in its idle moments from what it is asked.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

from omnidraft import assembly, config
from omnidraft.decode.decoder import SequenceOutput
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.device.learning import IdleLearning
from omnidraft.errors import ConfigError, RequestError
from omnidraft.ports import Step
from omnidraft.sampling_params import SamplingParams
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.tools.parser import ParsedToolCall, parse
from omnidraft.tools.tool_use import tool_use

Message = Mapping[str, Any]
Conversation = str | Sequence[Message]
"""A question, or the messages of a chat, each with a role and a content."""
_SCOPE = "llm"
"""All texts of one LLM may share the keys of what they have in common."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated text."""

    index: int
    """The number of the text among the `n` of its request."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    """The log-probabilities of each token and of the most probable ones, by token id; None unless asked for."""
    finish_reason: Literal["stop", "length"] | None = None
    """None while the text grows."""
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    """The calls in the text, if tools were offered."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    """What drafting did: passes, tokens per pass, agreement, seconds."""

    def take(self, step: Step) -> None:
        """Append the tokens of a step."""
        self.text += step.text
        self.token_ids += step.emitted
        self.stats.take(step)
        if step.log_probs is not None:
            rows = zip(step.emitted, step.log_probs.emitted, step.log_probs.likeliest, strict=True)
            self.logprobs = [*(self.logprobs or []), *({token: p} | dict(likeliest) for token, p, likeliest in rows)]
        if step.finish_reason is not None:
            self.finish_reason = "stop" if step.finish_reason.value == "stop" else "length"


@dataclass(slots=True)
class RequestOutput:
    """The texts generated for one prompt."""

    prompt: Conversation
    outputs: list[CompletionOutput]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys came from an earlier text."""
    seeds: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all texts are complete."""
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A target with a drafter of any tokenizer, in this process. One thread at a time."""

    def __init__(
        self,
        target: str | None = None,
        drafter: str | None = None,
        snapshot: str | None = None,
        *,
        learn: bool = False,
        home: Path | str | None = None,
        quantize: str | None = None,
        settings: Path | str | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """Load the models, fetching those that are not installed.

        Args:
            target: a name of the catalog (`omnidraft models list`), a repository id, a folder or a GGUF file.
            drafter: the small model that drafts; "none" drafts from earlier texts alone, and None takes the setting.
            snapshot: a folder, a version or an alias of a learned drafter; None takes the drafter as it is.
            learn: learn from what is asked, in idle moments; needs a `home`, and `close` at the end.
            home: the folder of the drafter that learns; it goes on with what it learned there before.
            quantize: the precision of the target's weights, such as `int8`; None chooses by the processor.
            settings: a TOML file of settings.
            sections: settings by section, such as `decode={"mode": "reproducible"}`.

        Raises:
            ConfigError: a setting is unknown or out of range; the home is in use, or that of other models.
            ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
        """
        models = {"target": target, "drafter": drafter, "precision": quantize, **sections.pop("models", {})}
        loaded = config.load(None if settings is None else Path(settings), models=models, **sections)
        self.learning: IdleLearning | None = None
        """Its `wait()` until all is learned, and its `problem`; None without `learn=True`."""
        self._inboxes: dict[SequenceState, deque[SequenceOutput]] = {}
        """What rounds had for each text and its reader has not taken: a round runs all texts, whoever asks for it."""
        self._engine: Engine
        if learn and home is not None and snapshot is None:
            self._engine, self.learning = assembly.learning_engine(loaded, CountingMetrics(), Path(home))
        elif learn or home is not None:
            raise ConfigError("learn=True and home=DIR belong together, without a snapshot: the home has its own")
        else:
            self._engine = assembly.engine(loaded, CountingMetrics(), snapshot=snapshot).engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End learning: finish its step, keep what was learned, and let others use the home."""
        if self.learning is not None:
            self.learning.close()

    def generate(
        self, prompts: str | Sequence[str], sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue one or several texts, together; return an output for each, in order.

        Raises:
            RequestError: a prompt or a parameter is not possible; no text is generated.
        """
        if isinstance(prompts, Mapping):
            raise RequestError("a prompt is a text, or several in a list; dicts as vLLM has them are not taken")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run([(text, {"prompt": text}) for text in texts], sampling_params or SamplingParams(), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> list[RequestOutput]:
        """Answer one or several conversations, together, in the chat template of each model; see `generate`.

        Args:
            tools: what the answers may call, in OpenAI's shape; the calls are in `tool_calls`, and in the text.
            tool_choice: `auto`, `none`, `required` or a named function, as at OpenAI.
        """
        use = tool_use(tools, tool_choice) if tools else None
        chats = [(chat, {"messages": _messages(chat), "tools": use}) for chat in _conversations(messages)]
        results = self._run(chats, sampling_params or SamplingParams(), use_tqdm)
        if use is not None:
            names = [tool.name for tool in use.callable_tools]
            for output in (output for result in results for output in result.outputs):
                output.tool_calls = parse(output.text, self._engine.pair.tool_format, names)
        return results

    def stream(self, conversation: Conversation, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one conversation; yield its text piece by piece, as it is generated.

        Several streams may be open at once, beside `generate` and `chat`. Closing one early ends its text.

        Raises:
            RequestError: the conversation or a parameter is not possible.
        """
        chosen = sampling_params or SamplingParams()
        if chosen.n != 1:
            raise RequestError(f"stream gives one text, got n = {chosen.n}")
        (request,) = chosen.requests({"messages": _messages(conversation)})
        with self._undisturbed():
            sequence = self._add(request)
            try:
                while not sequence.is_over:
                    self._run_round()
                    for step in self._take_steps(sequence):
                        yield step.text
            finally:
                self._remove(sequence)

    def _run(
        self, prompts: Sequence[tuple[Conversation, Mapping[str, Any]]], params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        from tqdm.auto import tqdm

        asked = [(prompt, request) for prompt, fields in prompts for request in params.requests(fields)]
        results = [RequestOutput(prompt, [CompletionOutput(each) for each in range(params.n)]) for prompt, _ in prompts]
        texts: dict[SequenceState, tuple[RequestOutput, CompletionOutput]] = {}
        with self._undisturbed(), tqdm(total=len(asked), desc="Generated", unit="text", disable=not use_tqdm) as bar:
            try:
                for number, (_, request) in enumerate(asked):
                    sequence = self._add(request)
                    result = results[number // params.n]
                    texts[sequence] = result, result.outputs[number % params.n]
                while any(not sequence.is_over for sequence in texts):
                    self._run_round()
                    for sequence, (_, output) in texts.items():
                        for step in self._take_steps(sequence):
                            output.take(step)
                            bar.update(step.finish_reason is not None)
            finally:
                for sequence in texts:
                    self._remove(sequence)
        for sequence, (result, _) in texts.items():
            result.num_prompt_tokens = sequence.num_prompt_tokens
            result.num_cached_tokens = max(result.num_cached_tokens, sequence.num_reused)
            result.seeds.append(sequence.seed)
        return results

    def _undisturbed(self) -> AbstractContextManager[None]:
        """Return the block inside which nothing is learned."""
        return nullcontext() if self.learning is None else self.learning.request()

    def _add(self, request: GenerationRequest) -> SequenceState:
        """Add a text to the next rounds, with an inbox. Raises RequestError."""
        sequence = self._engine.add_request(request, client=_SCOPE, cache_scope=_SCOPE)
        self._inboxes[sequence] = deque()
        return sequence

    def _remove(self, sequence: SequenceState) -> None:
        """End a text, if it has not ended, and drop its inbox."""
        self._engine.abort(sequence)
        del self._inboxes[sequence]

    def _run_round(self) -> None:
        """Run one round of all texts, and put each output into the inbox of its text."""
        for output in self._engine.step():
            self._inboxes[output.sequence].append(output)

    def _take_steps(self, sequence: SequenceState) -> Iterator[Step]:
        """Take the steps out of the inbox of a text, also those that come meanwhile. Raises what ended the text."""
        inbox = self._inboxes[sequence]
        while inbox:
            output = inbox.popleft()
            if output.error is not None:
                raise output.error
            assert output.step is not None
            yield output.step


def _conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return a list of conversations, of which one may be given alone. Raises RequestError."""
    if isinstance(given, Mapping):
        raise RequestError("a conversation is a text or a list of messages, not a message alone")
    if isinstance(given, str) or (given and isinstance(given[0], Mapping)):
        return [cast(Conversation, given)]
    return list(cast(Sequence[Conversation], given))


def _messages(conversation: Conversation) -> list[Message]:
    return [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
