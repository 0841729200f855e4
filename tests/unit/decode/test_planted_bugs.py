"""Bugs of naive speculative decoding that stay silent: the check that healthy code passes fails for each planted bug.

Bugs 9 and 11 are planted in a real model: the last two tests.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.errors import ContractError, RequestError
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.ports import DraftTree, Proposer, ProposerSession, Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyTable, ToyTarget, ToyTargetSession
from omnidraft.vocab.alignment import PackedLists
from tests.unit.decode.checks import check_text, spied, tail_wins
from tests.unit.decode.planted_bugs import Keeps, LeftoverNoise, RootRowForAll, StreamNoise
from tests.unit.decode.toys import (
    ALIGNMENT,
    DRAFT_EOS,
    DRAFT_PIECES,
    DRAFT_UNK,
    PROPOSERS,
    TABLE,
    TARGET_EOS,
    TARGET_TOKENIZER,
    RandomTrees,
    TableProposer,
    make_drafter,
    make_request,
    table_of,
    toy_decoder,
    with_unmeasured_acceptance,
)
from tests.unit.models.drafted_trees import BUSHY, assert_tree_scores_are_those_of_its_paths, drafted
from tests.unit.models.tiny import text, tiny_model

GOOD = TableProposer(TABLE, width=2)


def fails(check, *args, **kwargs) -> bool:
    """Whether a check catches what it is given."""
    try:
        check(*args, **kwargs)
    except (AssertionError, ContractError):
        return True
    return False


# ---------------------------------------------------------------- 1


def check_unmapped_tokens_stay_at_home(alignment) -> None:
    """A drafter that is sure of a token the target cannot spell."""
    table = table_of(len(DRAFT_PIECES), {}, DRAFT_PIECES.index(b"x"))
    proposer, spy = spied(make_drafter(table, alignment=alignment))
    for step in toy_decoder().decode(make_request(Sampling(0.0), stop_ids=frozenset({TARGET_EOS})), proposer):
        assert not {0, TARGET_EOS} & set(step.tree.tokens[1:])
    assert not {DRAFT_PIECES.index(b"x"), DRAFT_UNK, DRAFT_EOS} & set(spy.sent)


@pytest.mark.parametrize("stand_in", [0, TARGET_EOS], ids=["unk", "eos"])
def test_bug_1_an_unmapped_draft_token_sent_as_unk_or_eos(stand_in):
    lists = [ALIGNMENT.pieces(token) or (stand_in,) for token in range(ALIGNMENT.num_draft)]
    check_unmapped_tokens_stay_at_home(ALIGNMENT)
    assert fails(check_unmapped_tokens_stay_at_home, replace(ALIGNMENT, targets_of_draft=PackedLists.of(lists)))


# ---------------------------------------------------------------- 2


def test_bug_2_a_nodes_distribution_from_the_wrong_history():
    """Top-p of a node is taken from that node's row."""
    request = make_request(Sampling(1.0, top_p=0.8))
    check_text(GOOD, request)
    assert fails(check_text, GOOD, request, target=RootRowForAll(TABLE))


class RootHistoryForAll:
    """Tokens of a pass join the history only after it."""

    def __init__(self, pipeline, tree):
        self._pipeline, self._drawn = pipeline, []
        self.distribution = pipeline.distribution

    def take(self, token):
        self._drawn.append(token)

    def end(self):
        for token in self._drawn:
            self._pipeline.take(token)


class AllDraftedIsHistory:
    """The whole tree counts as said."""

    def __init__(self, pipeline, tree):
        self.distribution, self.take = pipeline.distribution, pipeline.take
        for token in tree.tokens[1:]:
            pipeline.take(token)

    def end(self):
        pass


class Misremembering(Decoder):
    """Every pass shapes its draws with a wrong history."""

    def __init__(self, wrong):
        super().__init__(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary)
        self._wrong = wrong

    def _draw_all(self, drafts, result):
        histories = [self._wrong(sequence.pipeline, tree) for sequence, tree in drafts]
        right = [sequence.pipeline for sequence, _ in drafts]
        for (sequence, _), history in zip(drafts, histories, strict=True):
            sequence.pipeline = history
        outputs = super()._draw_all(drafts, result)
        for (sequence, _), history, pipeline in zip(drafts, histories, right, strict=True):
            history.end()
            sequence.pipeline = pipeline
        return outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [RootHistoryForAll, AllDraftedIsHistory])
def test_bug_2_penalties_with_the_wrong_history_of_a_node(wrong, temperature):
    """Plain decoding has one node a pass, so only speculation shows it."""
    request = make_request(Sampling(temperature, frequency_penalty=1.5), max_new_tokens=60)
    check_text(GOOD, request)
    check_text(None, request, decoder=Misremembering(wrong))
    assert fails(check_text, GOOD, request, decoder=Misremembering(wrong))


# ---------------------------------------------------------------- 3, 4 and the float32 race


def test_bug_3_noise_by_order_of_asking_instead_of_position():
    request = make_request(Sampling(1.0))
    for proposer in (PROPOSERS["coupled"], None):
        check_text(proposer, request)
        assert fails(check_text, proposer, request, decoder=toy_decoder(noise=StreamNoise))


def test_bug_4_the_noise_of_a_dropped_branch_used_for_another_position():
    """Plain decoding drops nothing, so only speculation shows it."""
    request = make_request(Sampling(1.0))
    bad_but_coupled = TableProposer(ToyTable.random(len(TABLE.logits_SV[0]), seed=99), noise_weight=1.0)
    check_text(bad_but_coupled, request)
    check_text(None, request, decoder=toy_decoder(noise=LeftoverNoise))
    assert fails(check_text, bad_but_coupled, request, decoder=toy_decoder(noise=LeftoverNoise))


class Float32Noise(SeededNoise):
    """Exponentials from float32 uniforms, which are exactly zero once in 16 million."""

    def draw(self, ids_M, p_M, position):
        u_M = np.round(self._uniforms_at(position)[ids_M] * 2**24) / 2**24
        return int(ids_M[np.argmin(-np.log1p(-u_M) / p_M)])


def test_a_float32_race_lets_the_tail_win_at_full_vocabulary_size():
    """The trap that the noise avoids: a uniform of zero wins every race, and half of 152,000 in 2^24 are rounded to it.

    About 0.5 % of draws; the seeds are fixed, and one of the first 300 shows it.
    """
    assert tail_wins(Float32Noise, 300) > 0


# ---------------------------------------------------------------- 5


class FromSlot(Proposer, ProposerSession):
    """Planted: asks the slot at every step instead of once a request."""

    def __init__(self, slot):
        self._slot = slot

    def open(self, request):
        self._sessions, self._request = {}, request
        return self

    def propose(self, position, limits, noise):
        current = self._slot.current
        if current.version not in self._sessions:
            self._sessions[current.version] = current.proposer.open(self._request)
        return self._sessions[current.version].propose(position, limits, noise)

    def observe(self, emitted):
        for session in self._sessions.values():
            session.observe(emitted)


def check_one_snapshot_drafts_a_request(proposer_of) -> None:
    """A swap after the first step: the trees stay those of the first snapshot."""
    first, second = make_drafter(), make_drafter(ToyTable.random(len(DRAFT_PIECES), seed=77))
    request = make_request(Sampling(0.0))
    expected = [step.tree for step in toy_decoder().decode(request, make_drafter())]
    slot = SnapshotSlot(LoadedSnapshot(1, "one", first, None, None, 1))
    trees = []
    for step in toy_decoder().decode(request, proposer_of(slot)):
        trees.append(step.tree)
        slot.swap(LoadedSnapshot(2, "two", second, None, None, 2))
    assert trees == expected


def test_bug_5_weights_swapped_inside_a_request():
    check_one_snapshot_drafts_a_request(lambda slot: slot.current.proposer)
    assert fails(check_one_snapshot_drafts_a_request, FromSlot)


# ---------------------------------------------------------------- 6 and 7


class Masked(ToyTarget):
    """Tokens that the drafter cannot say in one piece are forbidden to the target."""

    def open(self, prompt_ids, max_new_tokens, mode):
        shared = [token for token in range(ALIGNMENT.num_target) if len(ALIGNMENT.draft_pieces(token)) == 1]
        mask_V = torch.full((self.vocab_size,), -torch.inf)
        mask_V[shared] = 0.0
        masked = ToyTarget(ToyTable(self.table.logits_SV + mask_V, self.table.order))
        return masked.open(prompt_ids, max_new_tokens, mode)


def test_bug_6_the_targets_logits_masked_to_the_shared_vocabulary():
    request = make_request(Sampling(1.0))
    check_text(GOOD, request)
    assert fails(check_text, GOOD, request, target=Masked(TABLE))


class ReEncoded(ToyTarget):
    """The kept text is decoded and tokenised again after every pass."""

    def open(self, prompt_ids, max_new_tokens, mode):
        class Session(ToyTargetSession):
            def keep(self, nodes):
                super().keep(nodes)
                self.kept = TARGET_TOKENIZER.vocabulary.byte_table.longest_match(
                    TARGET_TOKENIZER.vocabulary.spell(self.kept)
                )
                self.num_kept = len(self.kept)

        return Session(self, prompt_ids[:-1], 10**6)


def test_bug_7_the_targets_own_context_tokenised_again():
    """A target that spells a word in small tokens, which the tokenizer would join."""
    request = make_request(Sampling(1.0), max_new_tokens=40)
    check_text(GOOD, request)
    assert fails(check_text, GOOD, request, target=ReEncoded(TABLE))


# ---------------------------------------------------------------- 8 and 10


class Stopping(Decoder):
    """Stops are found by the reader of the steps, with `ended`."""

    def __init__(self, ended):
        super().__init__(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary)
        self._ended = ended

    def decode(self, request, proposer):
        without_stops = replace(request, stop_ids=frozenset())
        for step in super().decode(without_stops, proposer):
            shown, is_over = self._ended(step.emitted, request.stop_ids)
            yield replace(step, emitted=shown)
            if is_over:
                return


def drops_the_stop_token(ids, stop_ids):
    before = [index for index, token in enumerate(ids) if token in stop_ids]
    return (ids[: before[0]], True) if before else (ids, False)


def looks_at_the_last_token_only(ids, stop_ids):
    return ids, ids[-1] in stop_ids


def check_stops(decoder) -> None:
    """Many seeds: a stop token falls on every position of a step."""
    for seed in range(8):
        request = make_request(Sampling(1.0), seed=seed, stop_ids=frozenset({TARGET_EOS, 5, 9}), max_new_tokens=60)
        check_text(PROPOSERS["coupled"], request, decoder=decoder)


def test_bug_8_the_token_that_ended_the_text_is_dropped():
    check_stops(toy_decoder())
    assert fails(check_stops, Stopping(drops_the_stop_token))


class DropsLast(Proposer, ProposerSession):
    """Planted: drafting stops at an unlikely token and leaves it out, although the drafter was fed on it."""

    def __init__(self, proposer, floor):
        self._proposer, self._floor = proposer, floor

    def open(self, request):
        self._session = self._proposer.open(request)
        return self

    def propose(self, position, limits, noise):
        tree = self._session.propose(position, limits, noise)
        num_nodes = len(tree) - (sum(tree.log_q) < np.log(self._floor))
        return DraftTree(*(part[:num_nodes] for part in (tree.tokens, tree.parents, tree.sources, tree.log_q)))

    def observe(self, emitted):
        self._session.observe(emitted)


def check_an_early_stop_keeps_its_token(proposer, floor) -> None:
    """A chain that ended before its budget ends on the token that made it too unlikely."""
    trees = [step.tree for step in toy_decoder().decode(make_request(Sampling(0.0)), proposer)]
    early = [tree for tree in trees[:-6] if 0 < len(tree) - 1 < 5]
    assert early
    assert all(sum(tree.log_q) < np.log(floor) for tree in early)


def test_bug_8_the_token_that_ended_the_drafting_is_dropped():
    proposer = with_unmeasured_acceptance(make_drafter(min_path_probability=0.4))
    check_an_early_stop_keeps_its_token(proposer, 0.4)
    assert fails(check_an_early_stop_keeps_its_token, DropsLast(proposer, 0.4), 0.4)


def test_bug_10_a_stop_inside_an_accepted_path_is_run_past():
    check_stops(toy_decoder())
    assert fails(check_stops, Stopping(looks_at_the_last_token_only))


# ---------------------------------------------------------------- 9


@pytest.mark.parametrize("name", Keeps.wrong)
def test_bug_9_keys_of_the_wrong_nodes_are_kept(name):
    request = make_request(Sampling(1.0))
    check_text(RandomTrees(3), request)
    check_text(GOOD, request)
    assert fails(check_text, GOOD, request, target=Keeps(name))


# ---------------------------------------------------------------- 12


class Boundless(ToyTarget):
    """Forgets the answer's length when it looks at the context."""

    def open(self, prompt_ids, max_new_tokens, mode):
        return ToyTargetSession(self, prompt_ids[:-1], 10**6)


class OverBudget(TableProposer):
    """Drafts as if there were no end."""

    def open(self, request):
        session = super().open(request)
        propose = session.propose
        session.propose = lambda position, limits, noise: propose(position, TreeLimits(5), noise)
        return session


def check_the_end_of_the_context(make_target, proposer) -> None:
    """A request that just fits gets all its tokens; one more is refused before the first."""
    request = make_request(Sampling(0.0), max_new_tokens=22)
    target = make_target(TABLE, context_limit=len(request.prompt_ids) + request.max_new_tokens)
    check_text(proposer, request, target=target)
    refused = False
    try:
        check_text(proposer, replace(request, max_new_tokens=23), target=target)
    except RequestError:
        refused = True
    assert refused


def test_bug_12_the_end_of_the_context_is_run_over():
    check_the_end_of_the_context(ToyTarget, PROPOSERS["good"])
    assert fails(check_the_end_of_the_context, Boundless, PROPOSERS["good"])
    assert fails(check_the_end_of_the_context, ToyTarget, OverBudget(TABLE))


# ---------------------------------------------------------------- 9 and 11 over real attention


class SlotsAsPositions(TransformersTarget):
    """Rows are placed where their slot is, so that siblings stand one behind the other."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        placed = self._slots._placed

        def planted(segment):
            return segment.length + torch.arange(len(segment.ids)), placed(segment)[1]

        self._slots._placed = planted


class OneMaskForAll(TransformersTarget):
    """Layers with a window get the tree's mask as it is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._slots.attention._window = None


@pytest.mark.parametrize(
    ("name", "buggy"), [("llama", SlotsAsPositions), ("gemma3", OneMaskForAll), ("mistral", OneMaskForAll)]
)
def test_bugs_9_and_11_wrong_positions_and_windows_under_a_tree(name, buggy):
    model, prompt = tiny_model(name), text(13)
    tree = drafted([prompt[-1], *text(10, seed=2)], BUSHY)
    for kind, is_healthy in ((TransformersTarget, True), (buggy, False)):
        target = kind(model, name=name, precision="float32")
        assert fails(assert_tree_scores_are_those_of_its_paths, target, model, prompt, tree) is not is_healthy
