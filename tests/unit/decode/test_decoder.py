"""The promise of the decoding loop: the text is the target's own, whoever drafts."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ContractError
from omnidraft.ports import DraftTree, FinishReason, Request, Sampling
from omnidraft.testing.toy_models import ToyTable, ToyTarget, ToyTokenizer
from tests.unit.decode.toys import (
    PROPOSERS,
    TABLE,
    TARGET_EOS,
    TARGET_TOKENIZER,
    RandomTrees,
    TableProposer,
    emitted,
    make_drafter,
    make_request,
    slow_decode,
    toy_decoder,
)

SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.7),
    Sampling(1.0),
    Sampling(1.0, top_k=4),
    Sampling(0.7, top_p=0.8),
    Sampling(1.0, top_k=6, top_p=0.7),
    Sampling(1.0, min_p=0.2),
    Sampling(0.0, repetition_penalty=1.8),
    Sampling(1.0, presence_penalty=1.5),
    Sampling(0.0, frequency_penalty=2.0),
    Sampling(1.0, logit_bias={2: 4.0, TARGET_EOS: -100.0}),
    Sampling(
        0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={3: 1.5},
    ),
]


SEEDS = [0, 1, 2**64 - 1]


@pytest.mark.parametrize("number", range(len(SAMPLINGS)), ids=lambda number: str(SAMPLINGS[number]))
def test_the_drafter_never_shows_in_the_text(any_proposer, number):
    """Same seed, same text as drawing one token at a time by definition."""
    request = make_request(SAMPLINGS[number], seed=SEEDS[number % 3], choice=number % 2)
    assert emitted(toy_decoder().decode(request, any_proposer)) == slow_decode(TABLE, request)


def test_every_round_is_noted_for_those_who_give_way_to_decoding(any_proposer, monkeypatch):
    noted = []
    monkeypatch.setattr("omnidraft.throttle.note_round", lambda: noted.append(1))
    steps = list(toy_decoder().decode(make_request(Sampling(0.0)), any_proposer))
    assert len(noted) >= len(steps) > 1


@settings(max_examples=40)
@given(
    trees=st.integers(0, 2**32),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
    top_k=st.none() | st.integers(1, 30),
    top_p=st.none() | st.floats(0.01, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
    repetition=st.sampled_from([1.0, 0.7, 1.3, 3.0]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.5, 0.8]),
    bias=st.dictionaries(st.integers(0, len(TABLE.logits_SV[0]) - 1), st.floats(-10, 10), max_size=3),
    budget=st.integers(0, 9),
    max_new_tokens=st.integers(1, 20),
    has_stops=st.booleans(),
)
def test_any_tree_and_any_setting_gives_the_targets_own_text(
    trees,
    seed,
    choice,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    bias,
    budget,
    max_new_tokens,
    has_stops,
):
    request = make_request(
        Sampling(
            temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
        ),
        seed=seed,
        choice=choice,
        num_draft_tokens=budget,
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset({TARGET_EOS}) if has_stops else frozenset(),
        stop_strings=(b"abc", b".\n", b"hh") if has_stops else (),
    )
    steps = list(toy_decoder().decode(request, RandomTrees(trees)))
    assert emitted(steps) == slow_decode(TABLE, request)
    plain = list(toy_decoder().decode(request, None))
    assert "".join(step.text for step in steps) == "".join(step.text for step in plain)
    assert steps[-1].finish_reason == plain[-1].finish_reason


def test_a_good_proposer_saves_passes_of_the_target():
    request = make_request(Sampling(0.0))
    steps = list(toy_decoder().decode(request, PROPOSERS["good"]))
    assert [len(step.emitted) for step in steps] == [6, 6, 6, 6]
    assert len(list(toy_decoder().decode(request, None))) == 24


def test_the_last_pass_drafts_no_more_than_can_be_emitted():
    request = make_request(Sampling(0.0), max_new_tokens=8)
    steps = list(toy_decoder().decode(request, PROPOSERS["good"]))
    assert [len(step.tree) - 1 for step in steps] == [5, 1]
    assert steps[-1].finish_reason is FinishReason.LENGTH


def four_tokens(p_4: list[float], p_after_44: list[list[float]]) -> ToyTable:
    """A table of the tokens that follow the prompt (4,) and each of four tokens."""
    rows = torch.log(torch.tensor([p_4, *p_after_44], dtype=torch.float64)).float()
    table = ToyTable(torch.zeros(6, 5), order=1)
    table.logits_SV[:] = -30.0
    table.logits_SV[(4 + 1) % 6, :4] = rows[0]
    for token in range(4):
        table.logits_SV[token + 1, :4] = rows[token + 1]
    return table


P_FIRST = [0.55, 0.25, 0.15, 0.05]
P_SECOND = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.01, 0.01, 0.01, 0.97]]


@pytest.mark.parametrize("noise_weight", [0.0, 1.0], ids=["drafts the likeliest", "drafts with the noise"])
def test_first_and_second_token_keep_the_targets_distribution(noise_weight):
    """2,000 seeds, 4 x 4 outcomes: the pair of tokens must follow p.

    Total variation of an honest sample of this size over 16 outcomes exceeds 0.08 with probability below 1e-4 (and
    the seeds are fixed); a drafter that leaks through would show as 0.3 and more.
    """
    table = four_tokens(P_FIRST, P_SECOND)
    drafts = TableProposer(table, width=1, noise_weight=noise_weight)
    decoder = Decoder(ToyTarget(table), ToyTokenizer([b"a", b"b", b"c", b"d", b"e"]).vocabulary)
    counts = np.zeros((4, 4))
    for seed in range(2000):
        request = Request((4,), (), 2, Sampling(1.0), seed=seed, mode="fast", num_draft_tokens=1)
        first, second = emitted(decoder.decode(request, drafts))
        counts[first, second] += 1
    expected = np.array(P_FIRST)[:, None] * np.array(P_SECOND)
    assert np.abs(counts / counts.sum() - expected).sum() / 2 < 0.08


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_text_that_is_to_be_forgotten_leaves_no_keys_with_the_next_snapshot_either(is_forgotten):
    decoder, old, new = toy_decoder(), make_drafter(), make_drafter()
    sequence = decoder.add(make_request(), old)
    for _ in range(3):
        decoder.step()
    if is_forgotten:
        sequence.forget()
    decoder.move(sequence, new)
    while not sequence.is_finished:
        decoder.step()
    assert bool(new.sources[-1].pool.ended) is not is_forgotten


class Follower:
    """Implements step_telemetry.StepObserver."""

    def __init__(self):
        self.steps, self.ends = [], []

    def take(self, step):
        self.steps.append(step)

    def end(self, error):
        self.ends.append(error)


@pytest.mark.parametrize("ended_by", ["its last token", "its client", "closing", "its prompt", "its pass"])
def test_who_follows_a_text_sees_every_step_and_learns_once_what_ended_it(ended_by, monkeypatch):
    decoder, follower = toy_decoder(), Follower()
    sequence = decoder.add(make_request(Sampling(0.0), max_new_tokens=5), None)
    sequence.observers = (follower,)
    failing = {"its prompt": "open", "its pass": "forward"}.get(ended_by)
    if failing is not None:
        monkeypatch.setattr(ToyTarget, failing, lambda *args: (_ for _ in ()).throw(RuntimeError(ended_by)))
    outputs = decoder.step()
    outputs += decoder.step()
    if ended_by == "its client":
        decoder.abort(sequence)
    if ended_by == "closing":
        decoder.close()
    for _ in range(4):
        outputs += decoder.step()
    decoder.close()
    assert follower.steps == [output.step for output in outputs if output.step is not None]
    assert [str(error or "") for error in follower.ends] == [ended_by if failing else ""]


class DeviceRows(torch.Tensor):
    """Logits of another device, which know the sizes of those that were converted."""

    is_cpu = False
    sizes: ClassVar[list[torch.Size]] = []

    def float(self, *args, **options):
        self.sizes.append(self.shape)
        return super().float(*args, **options)


class DeviceTarget(ToyTarget):
    def forward(self, trees, prompts=()):
        return [each.as_subclass(DeviceRows) for each in super().forward(trees, prompts)]


def test_only_those_rows_are_copied_from_the_device_that_are_drawn_from():
    decoder, request = Decoder(DeviceTarget(TABLE), TARGET_TOKENIZER.vocabulary), make_request()
    text = emitted(decoder.decode(request, RandomTrees(3)))
    assert text == slow_decode(TABLE, request)
    assert [tuple(size) for size in DeviceRows.sizes] == [(len(TARGET_TOKENIZER.vocabulary),)] * len(text)


class Watched(ToyTarget):
    """Remembers its sessions."""

    def open(self, prompt_ids, max_new_tokens, mode):
        self.session = super().open(prompt_ids, max_new_tokens, mode)
        return self.session


def test_a_reader_who_leaves_early_frees_the_targets_memory():
    target = Watched(TABLE)
    steps = Decoder(target, TARGET_TOKENIZER.vocabulary).decode(make_request(), None)
    next(steps)
    steps.close()
    with pytest.raises(ContractError, match="closed"):
        target.session.score(DraftTree.empty(2))


def test_beliefs_are_raw_and_those_of_the_emitted_positions():
    request = make_request(Sampling(0.5, top_k=3), seed=9)
    text = list(request.prompt_ids)
    for step in toy_decoder(trace_top_k=4).decode(request, PROPOSERS["good tree"]):
        for index, token in enumerate(step.emitted):
            log_p = torch.log_softmax(TABLE.logits(text), dim=-1)
            assert step.target_logprobs.emitted_log_p_E[index] == pytest.approx(float(log_p[token]), abs=5e-3)
            assert step.target_logprobs.top_ids_EK[index, 0] == int(log_p.argmax())
            text.append(token)


@pytest.mark.parametrize("name", ["good tree", "hostile"])
def test_log_probs_are_the_targets_own_whoever_drafts_and_however_it_is_sampled(name):
    request = make_request(Sampling(0.8, top_k=5, top_p=0.9, logit_bias={3: 2.0}), seed=4, num_log_probs=2)
    text = list(request.prompt_ids)
    for step in toy_decoder().decode(request, PROPOSERS[name]):
        assert step.log_probs is not None
        for token, log_p, likeliest in zip(step.emitted, step.log_probs.emitted, step.log_probs.likeliest, strict=True):
            expected_V = torch.log_softmax(TABLE.logits(text), dim=-1)
            assert log_p == pytest.approx(float(expected_V[token]), abs=1e-5)
            assert [each for _, each in likeliest] == pytest.approx(expected_V.topk(2).values.tolist(), abs=1e-5)
            text.append(token)
    assert len(text) > len(request.prompt_ids)
