"""Drafts for a model that transformers has loaded: `model.generate(..., custom_generate=drafter)`.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from omnidraft.transformers import Drafter

    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    drafter = Drafter(model, tokenizer, "smollm2-135m")
    model.generate(**tokenizer("def fib(n):", return_tensors="pt"), max_new_tokens=64, custom_generate=drafter)
    print(drafter.stats.tokens_per_pass)

The result is that of `generate` without it, up to the rounding of passes over several tokens: greedily and, by torch's
own random numbers, for every seed. Nothing is recorded.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft import assembly, config
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import RequestError
from omnidraft.params import given_grammar
from omnidraft.ports import Grammar, Request, Sampling, Target
from omnidraft.telemetry.metrics import CountingMetrics

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.streamers import BaseStreamer

    from omnidraft.assembly import LoadedModel
    from omnidraft.models.hf.generation.request import GenerateRequest
    from omnidraft.models.hf.generation.rows import GenerateRow

_SCOPE = "generate"
"""The rows of a call may share the keys of what they have in common."""


class Drafter:
    """Drafts for one loaded model: with a small model with a tokenizer of its own, and earlier texts. It is passed to
    `model.generate` as `custom_generate`. One thread at a time."""

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        drafter: str | None = None,
        snapshot: str | None = None,
        *,
        settings: Path | str | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """Load the drafter, fetching it if it is not installed, and measure what passes of the model cost.

        Args:
            model: a causal language model with the default attention ("sdpa"); its weights are shared, not copied.
            tokenizer: the model's own.
            drafter: a name of the catalog (`omnidraft models list`), a repository id or a folder; "none" drafts from
                the text and earlier ones alone, and None takes the setting.
            snapshot: a folder, a version or an alias of a learned drafter, with what it remembers of the tenant
                "default"; None takes the drafter as it is.
            settings: a TOML file of settings.
            sections: settings by section, such as `decode={"mode": "reproducible"}`.

        Raises:
            ConfigError: a setting is unknown or out of range.
            ModelError, SnapshotError, VocabularyError: the model cannot be drafted for, or a drafter not be loaded.
        """
        from omnidraft.models.hf.generation.lent_model import lent, require_lendable

        self._model = _without_adapters(model)
        self._tokenizer = tokenizer
        require_lendable(self._model)
        name = self._model.name_or_path or self._model.config.model_type
        models = {"target": name, "drafter": drafter, **sections.pop("models", {})}
        loaded = config.load(None if settings is None else Path(settings), models=models, **sections)
        with lent(self._model):
            self._loaded = assembly.loaded_model(self._model, tokenizer, loaded, CountingMetrics(), snapshot=snapshot)
        self.stats = DecodeStats()
        """Of the last call, all rows together: passes, tokens per pass, agreement, seconds."""

    def __call__(
        self,
        model: "PreTrainedModel",
        input_ids: "torch.Tensor",
        logits_processor: "LogitsProcessorList",
        stopping_criteria: "StoppingCriteriaList",
        generation_config: "GenerationConfig",
        streamer: "BaseStreamer | None" = None,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        num_draft_tokens: int | None = None,
        **model_inputs: Any,
    ) -> "torch.Tensor | GenerateDecoderOnlyOutput":
        """Decode what `generate` prepared; `generate` calls this.

        Args:
            json_schema: every row is JSON that this schema allows; an argument of `generate` too, as are the next two.
            regex: the whole of every row matches this pattern.
            num_draft_tokens: the maximum of a pass: 0 decodes plainly, None takes the setting.

        Raises:
            RequestError: the call asks for what drafting does not have; no row is generated.
            ModelError: the model has another attention by now.
        """
        from omnidraft.models.hf.generation.lent_model import require_lendable
        from omnidraft.models.hf.generation.request import checked_request

        if model is not self._model:
            raise RequestError("this drafter was made for another model; make one for each model")
        require_lendable(self._model)
        if num_draft_tokens is not None and num_draft_tokens < 0:
            raise RequestError(f"num_draft_tokens must be at least 0, got {num_draft_tokens}")
        has_streamer = streamer is not None
        request = checked_request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_inputs, has_streamer=has_streamer
        )
        return self._decode(request, given_grammar(json_schema, regex), num_draft_tokens, streamer)

    def generate(
        self,
        inputs: "torch.Tensor | None" = None,
        *,
        streamer: "BaseStreamer | None" = None,
        stop_strings: str | Sequence[str] | None = None,
        **options: Any,
    ) -> "torch.Tensor | GenerateDecoderOnlyOutput":
        """Call `model.generate` with this drafter, where a streamer or stop strings are used: it hands neither to a
        `custom_generate`. Raises RequestError, and what `generate` raises."""
        from omnidraft.models.hf.generation.request import with_stop_strings

        if stop_strings is not None:
            options = with_stop_strings(options, stop_strings, self._tokenizer)
        decoding = partial(self, streamer=streamer)
        result: Any = self._model.generate(  # type: ignore[operator]
            inputs, streamer=streamer, custom_generate=decoding, **options
        )
        return result  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop the memory of earlier texts, and the drafter's keys of them."""
        self._loaded.host.recent.clear()
        self._loaded.host.drafter_memory.forget()

    def _decode(
        self,
        request: "GenerateRequest",
        grammar: Grammar | None,
        num_draft_tokens: int | None,
        streamer: "BaseStreamer | None",
    ) -> "torch.Tensor | GenerateDecoderOnlyOutput":
        from omnidraft.models.hf.generation.lent_model import lent

        batch = _Batch(self._loaded, request)
        self.stats = batch.stats
        with lent(self._model):
            batch.run(grammar, num_draft_tokens, streamer)
        if streamer is not None:
            streamer.end()
        return request.output(batch.scores)


class _Batch:
    """The rows of one call, decoded together."""

    def __init__(self, loaded: "LoadedModel", request: "GenerateRequest") -> None:
        from omnidraft.models.hf.generation.torch_noise import TorchNoise

        self._loaded = loaded
        self._request = request
        _require_one_rotation(loaded.decoder.target, request.rows)
        self._decoder = _decoder(loaded, request)
        vocab_size, device = loaded.decoder.target.vocab_size, request.rows[0].ids.device
        self._noise = TorchNoise(len(request.rows), vocab_size, device)
        self.scores = [request.scores() for _ in request.rows]
        self.stats = DecodeStats()

    def run(self, grammar: Grammar | None, num_draft_tokens: int | None, streamer: "BaseStreamer | None") -> None:
        """Decode all rows to their ends. Raises RequestError, and what ended a row."""
        decoder = self._decoder
        try:
            sequences = [self._add(row, grammar, num_draft_tokens) for row in range(len(self._request.rows))]
            while not all(sequence.is_finished for sequence in sequences):
                for output in decoder.step():
                    if output.error is not None:
                        raise output.error
                    assert output.step is not None
                    self.stats.take(output.step)
                    _put(streamer, output.step.emitted)
        finally:
            decoder.close()  # no keys are kept: at the next call the model may have other weights
        if self._request.is_sampled:
            self._noise.finish(max(len(row.emitted) for row in self._request.rows))

    def _add(self, number: int, grammar: Grammar | None, num_draft_tokens: int | None) -> SequenceState:
        """Add a row to the decoder; return its sequence, which is remembered."""
        from omnidraft.models.hf.generation.rows import RowDistributions, RowStop

        decoder, request, row = self._decoder, self._request, self._request.rows[number]
        sampling = decoder.grammars.prepared(request.sampling(grammar))
        text = self._text(row.prompt, row.max_length - row.num_prompt_ids, sampling, num_draft_tokens)
        scores, matcher = self.scores[number], decoder.matcher(text)
        distributions = RowDistributions(
            row, request.processors_of(number), scores, matcher, is_sampled=request.is_sampled
        )
        stop = RowStop(row, request.criteria, scores)
        noise, memorizer = self._noise.row(number, len(row.prompt)), TextMemorizer(self._loaded.host.recent, text)
        sequence = SequenceState(text, noise, distributions, stop, _SCOPE, _SCOPE, (memorizer,))
        return decoder.add_sequence(sequence, self._loaded.proposer)

    def _text(
        self, prompt: tuple[int, ...], max_new_tokens: int, sampling: Sampling, num_draft_tokens: int | None
    ) -> Request:
        """Return what drafts know of a row."""
        settings = self._loaded.host.settings.decode
        drafter_ids, tail_ids = self._loaded.drafter_prompt(prompt)
        return Request(
            prompt,
            drafter_ids,
            max_new_tokens,
            sampling,
            stop_ids=self._request.stop_ids,
            mode=settings.mode,
            num_draft_tokens=settings.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
            num_memory_tokens=settings.num_memory_tokens if num_draft_tokens is None else 0,
            drafter_prompt_tail=tail_ids,
            cache_scope=_SCOPE,
        )


def _decoder(loaded: "LoadedModel", request: "GenerateRequest") -> Decoder:
    """Return the decoder of a call. Raises RequestError where its rows are a batch that has a time limit, so that none
    may wait, and there is no memory for all."""
    rows = request.rows
    if len(rows) == 1 or not request.has_time_limit:
        return loaded.decoder
    return loaded.batch_decoder([_max_ids(row) for row in rows])


def _max_ids(row: "GenerateRow") -> int:
    return len(row.prompt) + row.max_length - row.num_prompt_ids


def _require_one_rotation(target: Target, rows: Sequence["GenerateRow"]) -> None:
    """Raise RequestError where `generate` would rotate ids of these rows anew while it goes on."""
    first, longest = target.first_context, max(map(_max_ids, rows))
    if min(len(row.prompt) for row in rows) <= first < longest <= target.context_limit:
        raise RequestError(
            f"this model rotates texts of more than {first} tokens otherwise, and these may grow from fewer to "
            f"{longest}: ask for fewer new tokens, or draft for the long prompts of a batch alone"
        )


def _without_adapters(model: Any) -> Any:
    """Return the model whose `generate` runs: that of transformers inside one of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _put(streamer: "BaseStreamer | None", emitted: Sequence[int]) -> None:
    """Hand on the tokens one by one, as `generate` does."""
    if streamer is not None:
        import torch

        for token in emitted:
            streamer.put(torch.tensor([token]))
