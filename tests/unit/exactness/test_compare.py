"""The comparison reports equal texts as equal, explains rounding, and does not explain any planted bug."""

from dataclasses import replace

import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.errors import ContractError
from omnidraft.exactness.compare import TextComparer, TextComparison
from omnidraft.exactness.rounding import measure
from omnidraft.ports import Proposer, Request, Sampling
from omnidraft.testing.toy_models import ToyTable
from tests.unit.decode.planted_bugs import Keeps, LeftoverNoise, RootRowForAll, StreamNoise
from tests.unit.decode.toys import (
    DRAFT_TOKENIZER,
    PROPOSERS,
    TABLE,
    TARGET_TOKENIZER,
    TableProposer,
    emitted,
    make_request,
    toy_decoder,
)
from tests.unit.exactness.rounded import rounded_decoder

GOOD = PROPOSERS["good tree"]
BAD_BUT_COUPLED = TableProposer(ToyTable.random(len(TABLE.logits_SV[0]), seed=99), noise_weight=1.0)


def compared(
    request: Request, *, decoder: Decoder | None = None, proposer: Proposer = GOOD, rounding: float = 0.0
) -> TextComparison:
    comparer = TextComparer(
        decoder or toy_decoder(), proposer, TARGET_TOKENIZER.vocabulary, DRAFT_TOKENIZER, rounding=rounding
    )
    return comparer.compare(request)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_every_honest_proposer_drafts_is_identical(any_proposer: Proposer, temperature: float) -> None:
    request = make_request(Sampling(temperature), max_new_tokens=40)
    comparison = compared(request, proposer=any_proposer)
    assert comparison.verdict == "identical"
    assert list(comparison.answer) == emitted(toy_decoder().decode(request, None))
    assert comparison.stats.num_tokens == len(comparison.answer)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.8, top_k=4), Sampling(1.0, top_p=0.7)])
def test_differences_by_rounding_are_explained_and_the_comparison_goes_on_from_plains_text(sampling: Sampling) -> None:
    """Rounding of 0.3 in a logit, about what bf16 gives, and many seeds: some texts part, some more than once."""
    decoder = rounded_decoder(0.3)
    request = make_request(sampling, max_new_tokens=48)
    limit = measure(decoder, make_request(Sampling(1.0), max_new_tokens=48)).limit
    comparison = [compared(replace(request, seed=seed), decoder=decoder, rounding=limit) for seed in range(4)]
    assert {each.verdict for each in comparison} <= {"identical", "explained"}
    assert sum(len(each.differences) for each in comparison) >= 3
    for seed, each in enumerate(comparison):
        asked = replace(request, seed=seed)
        assert list(each.answer) == emitted(decoder.decode(asked, None))
        assert all(each.answer[one.index] == one.plain_token != one.drafted_token for one in each.differences)


def test_rounding_is_no_excuse_in_reproducible_mode() -> None:
    """With no rounding allowed, the first differing token ends the comparison."""
    decoder = rounded_decoder(0.3)
    comparison = [compared(make_request(Sampling(1.0), seed=seed), decoder=decoder) for seed in range(20)]
    parted = [each for each in comparison if each.differences]
    assert parted
    for each in parted:
        assert each.verdict == "unexplained"
        assert len(each.differences) == 1
        assert "rounding explains 0" in (each.differences[0].problem or "")


class PrefersTheDraft(SeededNoise):
    """Planted: a token that the proposer looked at gets a second chance in the race."""

    def __init__(self, seed: int, choice: int, vocab_size: int) -> None:
        super().__init__(seed, choice, vocab_size)
        self._looked: set[int] = set()

    def exponentials(self, position, ids):
        self._looked.add(position)
        return super().exponentials(position, ids)

    def draw(self, ids_M, p_M, position):
        return super().draw(ids_M, p_M**2 if position in self._looked else p_M, position)


BUGS: dict[str, tuple[Decoder, Proposer]] = {
    "noise by order of asking": (toy_decoder(noise=StreamNoise), PROPOSERS["coupled"]),
    "noise of a dropped branch": (toy_decoder(noise=LeftoverNoise), BAD_BUT_COUPLED),
    "a draw that depends on the draft": (toy_decoder(noise=PrefersTheDraft), PROPOSERS["coupled"]),
    "rows of the wrong node": (toy_decoder().with_target(RootRowForAll(TABLE)), GOOD),
    "first nodes instead of the path": (toy_decoder().with_target(Keeps("first nodes instead of the path")), GOOD),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("rounding", [0.0, 0.5], ids=["reproducible", "fast"])
def test_a_planted_bug_is_not_explained_by_rounding(name: str, rounding: float) -> None:
    """Rounding of 0.5 in a logit is allowed; the bugs change what is drawn, or logits by more than that."""
    decoder, proposer = BUGS[name]
    comparison = [
        compared(make_request(Sampling(1.0), seed=seed), decoder=decoder, proposer=proposer, rounding=rounding)
        for seed in range(6)
    ]
    worst = [each for each in comparison if each.verdict == "unexplained"]
    assert worst
    for each in worst:
        assert each.differences[-1].problem
        assert each.differences[-1].plain_token != each.differences[-1].drafted_token


def test_a_target_that_keeps_a_rejected_branch_is_found_out_at_once() -> None:
    decoder = toy_decoder().with_target(Keeps("rejected branch left"))
    with pytest.raises(ContractError, match="the target keeps the keys of"):
        compared(make_request(Sampling(1.0)), decoder=decoder, proposer=GOOD, rounding=0.0)


class Ending(Decoder):
    """Planted: the speculating side does not look for stop tokens."""

    def add(self, request, proposer, **options):
        looks = request if proposer is None else replace(request, stop_ids=frozenset())
        return super().add(looks, proposer, **options)


def test_a_text_that_runs_past_its_end_is_found() -> None:
    decoder = Ending(toy_decoder().target, TARGET_TOKENIZER.vocabulary)
    stops = frozenset({1, 5, 9})
    comparison = [
        compared(make_request(Sampling(1.0), seed=seed, stop_ids=stops), decoder=decoder) for seed in range(20)
    ]
    ended = [each.differences[0] for each in comparison if each.differences]
    assert ended
    assert all(each.plain_token is None and "plain decoding ended" in (each.problem or "") for each in ended)
