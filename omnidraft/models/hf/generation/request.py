"""One call of transformers' `generate`, checked: what cannot be decoded with the same result is refused, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, logits_process, stopping_criteria

from omnidraft.errors import RequestError
from omnidraft.models.hf.generation.rows import GenerateRow, RowScores, by_step, sequences
from omnidraft.params import Grammar, Sampling, sampling_of

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_MODEL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache", "cache_position"}
_ROW_BY_ROW = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.TopPLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.EosTokenCriteria,
)
"""Processors and criteria that give a row the same result alone as in a batch."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The arguments of a call that can be decoded."""

    rows: tuple[GenerateRow, ...]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def is_sampled(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def has_time_limit(self) -> bool:
        return any(isinstance(each, stopping_criteria.MaxTimeCriteria) for each in self.criteria)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a row; none where the call has none."""
        ids = getattr(self.config, "_eos_token_tensor", None)
        return frozenset() if ids is None else frozenset(ids.reshape(-1).tolist())

    def processors_of(self, number: int) -> LogitsProcessorList:
        """Return the processors of one row, which is a batch of its own to them."""
        return LogitsProcessorList([_of_row(each, number) for each in self.processors])

    def sampling(self, grammar: Grammar | None) -> Sampling:
        """Return what drafts know of the processors; rows are drawn by the processors themselves."""
        config = self.config
        bias = dict.fromkeys(config.suppress_tokens or (), -100.0)
        if not self.is_sampled:
            penalty = config.repetition_penalty or 1.0
            return Sampling(0.0, repetition_penalty=penalty, logit_bias=bias, grammar=grammar)
        return sampling_of(config, logit_bias=bias, grammar=grammar)

    def scores(self) -> RowScores:
        """Return what keeps a row's scores and logits, if the call returns them."""
        config = self.config
        is_returned = bool(config.return_dict_in_generate)
        return RowScores(
            has_scores=is_returned and bool(config.output_scores), has_logits=is_returned and bool(config.output_logits)
        )

    def output(self, scores: Sequence[RowScores]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what `generate` returns, without the keys and values."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        ids = sequences(self.rows, 0 if pad is None else int(pad))
        if not self.config.return_dict_in_generate:
            return ids
        scores_SBV, logits_SBV = by_step([each.scores for each in scores]), by_step([each.logits for each in scores])
        return GenerateDecoderOnlyOutput(sequences=ids, scores=scores_SBV, logits=logits_SBV)  # type: ignore[arg-type]


def checked_request(
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_inputs: Mapping[str, Any],
    *,
    has_streamer: bool,
) -> GenerateRequest:
    """Return the call. Raises RequestError, which names what cannot be decoded with drafts."""
    _check_config(config)
    _check_model_inputs(model_inputs)
    if len(input_ids) > 1:
        _check_batch(processors, criteria, has_streamer=has_streamer)
    paddings = _num_padding(input_ids, model_inputs)
    max_length = criteria.max_length
    if max_length is None or max_length <= input_ids.shape[1]:
        raise RequestError(f"max_length is {max_length}, and the prompt has {input_ids.shape[1]} tokens")
    rows = tuple(GenerateRow(ids, num, max_length) for ids, num in zip(input_ids, paddings, strict=True))
    return GenerateRequest(rows, processors, criteria, config)


def with_stop_strings(options: Mapping[str, Any], stop_strings: str | Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return the options of `generate` with a criterion for these strings, since it does not hand the tokenizer on."""
    strings = stop_strings if isinstance(stop_strings, str) else list(stop_strings)
    criterion = stopping_criteria.StopStringCriteria(tokenizer, strings)
    given = options.get("stopping_criteria") or ()
    return {**options, "stopping_criteria": StoppingCriteriaList([*given, criterion])}


def _of_row(processor: Any, number: int) -> Any:
    """Return the processor for one row, where it knows the padding of every row."""
    if type(processor) is not logits_process.RepetitionPenaltyLogitsProcessor:
        return processor
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, torch.Tensor):
        return processor
    return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[number : number + 1])


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise RequestError(f"{mode.value.replace('_', ' ')} cannot be drafted for: only greedy search and sampling can")
    if config.cache_implementation == "quantized":
        raise RequestError("cache_implementation='quantized': keys are kept as the model computes them")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise RequestError(f"{name}: passes over drafts have others than passes over one token; leave it out")


def _check_model_inputs(model_inputs: Mapping[str, Any]) -> None:
    of_images = model_inputs.get("mm_encoder_outputs") or None  # an empty dict where there are none
    given = {**model_inputs, "mm_encoder_outputs": of_images}
    unknown = sorted(name for name, value in given.items() if value is not None and name not in _MODEL_INPUTS)
    if unknown:
        raise RequestError(f"{', '.join(unknown)}: only prompts of input_ids can be drafted for")
    if getattr(model_inputs.get("past_key_values"), "_is_user_defined", False):
        raise RequestError("past_key_values: drafting keeps keys of its own; leave it out")


def _check_batch(processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, has_streamer: bool) -> None:
    if has_streamer:
        raise RequestError("a streamer takes one row; generate one prompt at a time")
    for each in (*processors, *criteria):
        if type(each) not in _ROW_BY_ROW:
            raise RequestError(
                f"{type(each).__name__} may treat a row by its place in the batch; generate one prompt at a time"
            )
    kinds = {type(each) for each in criteria}
    if stopping_criteria.StopStringCriteria in kinds and stopping_criteria.EosTokenCriteria not in kinds:
        raise RequestError("stop strings of a batch need an eos_token_id, after which ended rows are padded")


def _num_padding(input_ids: torch.Tensor, model_inputs: Mapping[str, Any]) -> list[int]:
    """Return the padding before each row's text. Raises RequestError for padding elsewhere."""
    mask, positions = model_inputs.get("attention_mask"), model_inputs.get("position_ids")
    length = input_ids.shape[1]
    is_text = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    has_gaps = is_text.shape != input_ids.shape or bool((is_text.long().diff(dim=1) < 0).any())
    if has_gaps or not bool(is_text[:, -1].all()):
        raise RequestError("attention_mask: prompts are padded on the left (padding_side='left'), and have no gaps")
    num_text = is_text.sum(dim=1)
    if positions is not None:
        expected = (torch.arange(length, device=num_text.device) - (length - num_text)[:, None]).clamp(min=0)
        if not bool((positions.expand_as(expected).to(expected.device).where(is_text, 0) == expected).all()):
            raise RequestError("position_ids: positions are counted from the first token of each prompt; leave it out")
    return (length - num_text).tolist()  # type: ignore[no-any-return]
