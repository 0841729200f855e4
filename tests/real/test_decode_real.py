"""The reference drafter under a real target: reproducible text with and without it, and guesses worth making."""

import json

import pytest

from omnidraft import assembly
from omnidraft.config import DecodeSettings
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.models.catalog.store import resolve
from omnidraft.models.hf.drafter import load_drafter
from omnidraft.models.hf.target import load_target
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.models.precision import automatic
from omnidraft.ports import Grammar, Request, Sampling
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = ("Write a Python function that adds two numbers.", "What is 12 times 12? Think step by step.")


@pytest.fixture(scope="module")
def pair():
    """Decoder, proposer and both tokenizers."""
    target_folder, draft_folder = resolve("qwen2.5-coder-0.5b"), resolve("smollm2-135m")
    target = load_target(target_folder, name="qwen2.5-coder-0.5b", precision=automatic())
    model = load_drafter(draft_folder, "int8", None, "full")
    target_tokenizer = HfTokenizer(target_folder, target.vocab_size)
    draft_tokenizer = HfTokenizer(draft_folder, model.vocab_size)
    alignment = align(draft_tokenizer, target_tokenizer)
    cache = NgramCache(alignment.fingerprint, draft_tokenizer.vocabulary, target_tokenizer.vocabulary, 10_000)
    words = assembly.Vocabularies(
        target_folder,
        target_tokenizer,
        drafter_folder=draft_folder,
        drafter=draft_tokenizer,
        alignment=alignment,
    )
    always = DecodeSettings(policy="fixed", num_draft_tokens=5)  # costs measured on a busy machine decide nothing here
    proposer = assembly.proposer(always, words, assembly.shared_drafting(always, MeasuredCosts(target)), model, cache)
    return Decoder(target, target_tokenizer.vocabulary), proposer, target_tokenizer, draft_tokenizer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_never_shows_in_a_real_text_and_is_often_right(pair, temperature):
    decoder, proposer, target_tokenizer, draft_tokenizer = pair
    hits = firsts = 0
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        request = Request(
            tuple(target_tokenizer.chat_prompt_ids(messages)),
            tuple(draft_tokenizer.chat_prompt_ids(messages)),
            24,
            Sampling(temperature),
            seed=5,
            stop_ids=target_tokenizer.stop_ids,
        )
        plain = [step.emitted[0] for step in decoder.decode(request, None)]
        steps = list(decoder.decode(request, proposer))
        assert [token for step in steps for token in step.emitted] == plain
        assert len(steps) < len(plain)
        scored = [len(step.path) + 1 for step in steps if len(step.tree) > 1]
        firsts += sum(min(num, len(step.tree) - 1) for num, step in zip(scored, _drafted(steps), strict=True))
        hits += sum(len(step.path) for step in steps)
    assert hits / firsts > 0.3
    print(f"temperature {temperature}: agreement {hits / firsts:.2f} of {firsts} scored guesses")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_under_a_schema_parses_whoever_drafts(pair, temperature):
    decoder, proposer, target_tokenizer, draft_tokenizer = pair
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    messages = [{"role": "user", "content": "Invent a person. Answer in JSON with name and age."}]
    request = Request(
        tuple(target_tokenizer.chat_prompt_ids(messages)),
        tuple(draft_tokenizer.chat_prompt_ids(messages)),
        64,
        Sampling(temperature, repetition_penalty=1.05, grammar=Grammar("json_schema", json.dumps(schema))),
        seed=3,
        stop_ids=target_tokenizer.stop_ids,
    )
    plain, drafted = list(decoder.decode(request, None)), list(decoder.decode(request, proposer))
    text = "".join(step.text for step in drafted)
    assert text == "".join(step.text for step in plain)
    answer = json.loads(text)
    assert isinstance(answer["name"], str)
    assert isinstance(answer["age"], int)
    print(f"temperature {temperature}: {text!r}, {len(plain)} tokens in {len(drafted)} passes")


def _drafted(steps):
    return [step for step in steps if len(step.tree) > 1]
