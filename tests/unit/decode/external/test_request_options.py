"""A request of another engine decides about its own drafts and records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions, read_options
from omnidraft.testing.toy_models import ToyTable
from tests.unit.decode.external.engines import BatchingEngine, ToyFactory, make_rounds, plain, prompts
from tests.unit.decode.toys import TARGET_PIECES

PRIVATE = RequestOptions(tenant="b", is_stored=False)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (None, NO_OPTIONS),
        ({"kv_transfer_params": {}}, NO_OPTIONS),
        ({"omnidraft_speculation": "off"}, RequestOptions(num_draft_tokens=0)),
        ({"omnidraft_speculation": "auto"}, NO_OPTIONS),
        ({"omnidraft_speculation": 3}, RequestOptions(num_draft_tokens=3)),
        ({"omnidraft_speculation": "3"}, RequestOptions(num_draft_tokens=3)),
        ({"omnidraft_speculation": -1}, NO_OPTIONS),
        ({"omnidraft_user": "b", "omnidraft_store": 0}, PRIVATE),
        ({"omnidraft_store": True}, NO_OPTIONS),
        ({"omnidraft_store": "false"}, RequestOptions(is_stored=False)),
        ({"omnidraft_store": "maybe"}, RequestOptions(is_stored=False)),
        ({"omnidraft_user": ""}, RequestOptions(is_stored=False)),
        ({"omnidraft_user": 7}, RequestOptions(is_stored=False)),
        ({"omnidraft_user": "memory group g"}, RequestOptions(is_stored=False)),
    ],
)
def test_arguments_have_the_names_of_our_http_api(arguments: dict | None, options: RequestOptions) -> None:
    assert read_options(arguments) == options


TEXTS = st.sampled_from(["", "off", "Auto", "7", "-7", "\u0663", "\u00b2", "a\n", 300 * "a"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.just([1, 2]))


@given(st.dictionaries(st.sampled_from(["omnidraft_speculation", "omnidraft_store", "omnidraft_user"]), VALUES))
def test_whatever_a_request_says_it_is_served(arguments: dict) -> None:
    options = read_options(arguments)
    assert options.num_draft_tokens is None or options.num_draft_tokens >= 0
    assert options.tenant is None or 0 < len(options.tenant) <= 256


def test_each_text_is_drafted_for_and_recorded_as_its_request_says() -> None:
    """Some of them begin with the same ids, so they can be told apart by their options only."""
    table, factory = ToyTable.random(len(TARGET_PIECES), seed=7), ToyFactory(is_traced=True)
    rounds, _, _ = make_rounds(factory=factory)
    engine = BatchingEngine(rounds, table, max_seqs=6)
    choices = (NO_OPTIONS, RequestOptions(num_draft_tokens=0), RequestOptions(num_draft_tokens=2), PRIVATE)
    requests = [engine.ask(prompt, 12, options) for prompt in prompts(6) for options in choices]
    engine.run()
    rounds.close()
    assert all(each.emitted == plain(table, each) for each in requests)
    assert max(each.num_drafted for each in requests if each.options.num_draft_tokens is None) > 2
    assert all(each.num_drafted <= each.options.num_draft_tokens for each in requests if each.options in choices[1:3])
    assert "b" not in {record.tenant for record in factory.records}
    assert {record.tenant for record in factory.records} == {"default"}


def test_texts_of_another_tenant_are_recorded_as_its() -> None:
    factory = ToyFactory(is_traced=True)
    rounds, _, _ = make_rounds(factory=factory)
    engine = BatchingEngine(rounds, ToyTable.random(len(TARGET_PIECES), seed=7))
    for tenant in ("a", "b"):
        engine.ask(prompts(1)[0], 12, RequestOptions(tenant=tenant))
    engine.run()
    rounds.close()
    assert {record.tenant for record in factory.records} == {"a", "b"}
