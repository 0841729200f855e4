"""Models that take chains only: whatever is drafted for them, rejected, preempted or reused, the text is their own."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omnidraft.config import SchedulerSettings
from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ContractError, ModelError
from omnidraft.models.hf.drafter import TorchDrafter
from omnidraft.models.hf.target import transformers_target
from omnidraft.models.hf.trainable_drafter import TransformersTrainable
from omnidraft.ports import DraftTree, Request, Sampling, Source, Target
from omnidraft.vocab.tokenizer import Vocabulary
from tests.models.families import make_model
from tests.unit.decode.toys import emitted
from tests.unit.models.native.families import VOCAB_SIZE
from tests.unit.models.random_trees import OracleProposer
from tests.unit.models.tiny import text

NAMES = ("Qwen3.5", "LFM2", "RecurrentGemma", "RWKV-4", "Mamba", "Llama 4")
"""One for each way in which states are kept; tests/models has all families."""
READ_ID_BY_ID = {"RecurrentGemma", "RWKV-4"}
VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())
PROMPT = text(90)
"""More than a chunk."""


@cache
def family_model(name: str) -> PreTrainedModel:
    return make_model(name, tie_word_embeddings=False)  # tied ones repeat one token


@cache
def target(name: str) -> Target:
    return transformers_target(family_model(name), name=name, precision="float32")


@cache
def generated(name: str) -> tuple[int, ...]:
    return own_text(family_model(name))


def own_text(model: PreTrainedModel) -> tuple[int, ...]:
    """transformers' own text, greedily."""
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist())


def request(seed: int = 0, **fields: Any) -> Request:
    defaults = {"max_new_tokens": 40, "sampling": Sampling(0.0), "mode": "fast", "seed": seed}
    return Request(tuple(PROMPT), (), **(defaults | fields))


def of_seed(seed: int, mode: str) -> Request:
    return request(seed, sampling=Sampling(1.0), mode=mode, max_new_tokens=20)


@pytest.mark.parametrize("name", NAMES)
def test_with_drafts_of_which_some_are_right_the_text_is_that_of_generate(name):
    decoder, limits = Decoder(target(name), VOCABULARY), target(name).limits("fast")
    steps = list(decoder.decode(request(), OracleProposer(generated(name), limits, VOCAB_SIZE, seed=3)))
    assert tuple(emitted(steps)) == generated(name)
    assert len(set(generated(name))) > 5
    assert (len(steps) == 40) == (name in READ_ID_BY_ID)


@pytest.mark.parametrize("name", NAMES)
def test_reproducible_mode_gives_that_text_too(name):
    assert not target(name).limits("reproducible").num_nodes  # what is read id by id gains nothing from drafts
    plain = Decoder(target(name), VOCABULARY).decode(request(mode="reproducible"), None)
    assert tuple(emitted(plain)) == generated(name)


def together(target: Target, mode: str, wanted: Mapping[int, list[int]], **scheduling: Any) -> dict[int, list[int]]:
    """Four texts together, of whose drafts some are right; one of the texts is given up."""
    decoder, limits = Decoder(target, VOCABULARY, scheduling=SchedulerSettings(**scheduling)), target.limits(mode)
    sequences = {
        decoder.add(of_seed(seed, mode), OracleProposer(text, limits, VOCAB_SIZE, seed), cache_scope="one"): seed
        for seed, text in wanted.items()
    }
    texts: dict[int, list[int]] = {seed: [] for seed in wanted}
    for number in range(400):
        for output in decoder.step():
            assert output.error is None, output.error
            texts[sequences[output.sequence]] += output.step.emitted
        if number == 4:
            decoder.abort(next(sequence for sequence, seed in sequences.items() if seed == 2))
        if not decoder.scheduler.sequences:
            return texts
    raise AssertionError("the texts do not end")


def check_texts(target: Target, mode: str) -> dict[int, list[int]]:
    """Require of texts that run, wait, or are preempted beside others that they are those of plain decoding."""
    decoder = Decoder(target, VOCABULARY)
    wanted = {seed: emitted(decoder.decode(of_seed(seed, mode), None)) for seed in range(4)}
    longest = len(PROMPT) + 20 + target.limits(mode).longest_chain
    room_for_two = 2.1 * target.kv_bytes(longest, mode) / 2**30
    for scheduling in ({}, {"max_num_seqs": 2}, {"kv_cache_gib": room_for_two}):
        assert together(target, mode, wanted, **scheduling) | {2: []} == wanted | {2: []}
    return wanted


@pytest.mark.parametrize(("name", "mode"), [("Qwen3.5", "fast"), ("RecurrentGemma", "fast"), ("LFM2", "reproducible")])
def test_texts_together_that_wait_and_go_on_are_those_of_plain_decoding(name, mode):
    texts = check_texts(target(name), mode)
    assert len({tuple(each) for each in texts.values()}) > 1


def chain(ids: list[int]) -> DraftTree:
    return DraftTree.chain(ids[0], ids[1:], [Source.DIRECT] * (len(ids) - 1), [0.0] * (len(ids) - 1))


def whole_pass(name: str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return family_model(name)(input_ids=torch.tensor([ids])).logits[0, -1].float()


def check_rejected_chains(target: Target) -> None:
    session, alone, kept = target.open(PROMPT, 60, "fast"), target.open(PROMPT, 60, "fast"), PROMPT[-1]
    for number in range(8):
        session.score(chain([kept, *text(3, seed=number)]))
        session.score(chain([kept, *text(3, seed=number + 20)]))  # as after a pass that failed
        session.keep((0, 1))
        for token in (kept, text(3, seed=number + 20)[0]):
            alone.score(chain([token]))
            alone.keep((0,))
        kept = number + 5
    torch.testing.assert_close(session.score(chain([3, 6]))[0], alone.score(chain([3]))[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in READ_ID_BY_ID])
def test_a_rejected_chain_leaves_nothing_behind(name):
    check_rejected_chains(target(name))


def test_trees_are_refused():
    with pytest.raises(ContractError, match="does not fit"):
        target("Qwen3.5").open(PROMPT, 9, "fast").score(DraftTree((1, 2, 3), (0, 0, 0), (None,) * 3, (0.0,) * 3))


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_prompt_begins_with_the_state_of_another_ones_whole_chunk(mode):
    first = target("Qwen3.5").open(PROMPT, 9, mode)
    first.score(chain([PROMPT[-1]]))
    prompt = [*PROMPT[:80], *text(9, seed=5)]
    session = target("Qwen3.5").open(prompt, 9, mode)
    assert target("Qwen3.5").reuse(session, first, 80) == 64
    alone = target("Qwen3.5").open(prompt, 9, mode).score(chain([3]))
    assert torch.equal(session.score(chain([3])), alone)


def test_a_conversation_goes_on_from_the_state_at_its_end():
    first = target("LFM2").open(PROMPT, 9, "fast")
    first.score(chain([PROMPT[-1], 7, 8]))
    first.keep((0, 1))
    session = target("LFM2").open([*PROMPT, 7, 9, 9], 9, "fast")
    assert target("LFM2").reuse(session, first, 91) == 91
    torch.testing.assert_close(
        session.score(chain([9]))[0], whole_pass("LFM2", [*PROMPT, 7, 9, 9]), atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize("name", ["Qwen3.5", "Falcon with ALiBi"])
def test_it_is_no_drafter(name):
    with pytest.raises(ModelError, match="cannot draft"):
        TorchDrafter(family_model(name))
    with pytest.raises(ModelError, match="cannot draft"):
        TransformersTrainable(family_model(name), "full")
