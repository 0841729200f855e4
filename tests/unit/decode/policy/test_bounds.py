"""What the policy may lose to plain decoding, and to the best chain in hindsight, by a virtual clock."""

import pytest

from tests.unit.decode.policy.machines import MACHINES, decode, tokens_per_s, virtual_clock

BAD = ("random", "sure and wrong", "nan")


def speed(machine_name: str, num_tokens: int, num_texts: int, **options) -> float:
    with virtual_clock(machine_name) as machine:
        return tokens_per_s(decode(machine, num_tokens, num_texts, **options))


def check_bad_drafter(machine_name: str, num_texts: int, kind: str) -> None:
    plain = speed(machine_name, 1000, num_texts, chain=0)
    assert speed(machine_name, 1000, num_texts, drafter_kind=kind) >= 0.98 * plain


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", ["sure and wrong", "nan"])
def test_a_bad_drafter_loses_two_in_a_hundred_at_most(kind):
    check_bad_drafter("AVX-512", 1, kind)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("num_texts", [1, 4])
@pytest.mark.parametrize("machine_name", MACHINES)
def test_no_bad_drafter_loses_more_on_any_machine(machine_name, num_texts, kind):
    check_bad_drafter(machine_name, num_texts, kind)


def check_many_texts(num_tokens: int, chains: tuple[int, ...]) -> None:
    """Sixteen texts on a device whose rows are free up to 64, which it does not know."""
    best = max(speed("free rows", num_tokens, 16, chain=chain) for chain in chains)
    assert speed("free rows", num_tokens, 16) >= best


def test_many_texts_are_no_slower_than_with_the_best_chain():
    check_many_texts(130, (2,))


@pytest.mark.long
def test_many_texts_are_no_slower_than_with_any_chain():
    check_many_texts(400, (1, 2, 3, 4, 6))
