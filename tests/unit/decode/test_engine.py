"""The engine: one snapshot per text, the same text for the same seed, clear refusals, traces, counts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest, GenerationStream
from omnidraft.decode.snapshot.slot import Canary
from omnidraft.errors import ConfigError, ContextExceeded, ModeRefused, RequestError
from omnidraft.ports import ControlState, Drift, Entry, Grammar, Sampling, Work
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.tiny_engine import Failing, Foretold, snapshot, tiny_settings, tiny_worker

PROMPT = "How many clips did Natalia sell"


@pytest.fixture(scope="module")
def metrics() -> CountingMetrics:
    return CountingMetrics()


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], omnidraft_home: Path, metrics: CountingMetrics) -> Engine:
    return tiny_worker(tiny_models, omnidraft_home, metrics).engine


@pytest.fixture
def worker(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[assembly.Worker]:
    """One that records into a log of its own, with short segments."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    made = assembly.worker(_recording(tiny_models, tmp_path), CountingMetrics())
    made.engine.segment_tokens = 8
    yield made
    assert made.producer is not None
    made.producer.close(5.0)


def _recording(models: tuple[Path, Path], root: Path):
    return tiny_settings(
        models,
        log={"url": f"sqlite:///{root}/log.db"},
        registry={"url": f"directory:///{root}/registry"},
        recorder={"opted_out": ["private"]},
    )


def make_request(**fields: object) -> GenerationRequest:
    values = {"prompt": PROMPT, "max_new_tokens": 12, "sampling": Sampling(1.0), "seed": 5} | fields
    return GenerationRequest(**values)  # type: ignore[arg-type]


def ids(answer: GenerationStream) -> list[int]:
    return [token for step in answer.steps for token in step.emitted]


@pytest.mark.drafting_fails
def test_a_text_keeps_its_snapshot_although_the_slot_is_swapped_in_the_middle(
    engine: Engine, metrics: CountingMetrics
) -> None:
    first = engine.slot.current
    plain = ids(engine.stream(make_request(num_draft_tokens=0)))
    answer = engine.stream(make_request())
    begun = list(next(answer.steps).emitted)
    engine.slot.swap(snapshot(1, Failing(RuntimeError("the swapped-in drafter was used"))))
    try:
        assert begun + ids(answer) == plain
        assert answer.snapshot is first
        after = engine.stream(make_request())
        assert after.snapshot.version == 1
        assert metrics.value("omnidraft_drafting_failures_total") == 0
        assert ids(after) == plain
        assert metrics.value("omnidraft_drafting_failures_total", target=engine.pair.target) == 1
    finally:
        engine.slot.swap(first)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_seed_gives_the_same_text_with_and_without_a_drafter(engine: Engine, temperature: float) -> None:
    sampling = Sampling(temperature)
    drafted = engine.stream(make_request(sampling=sampling))
    plain = engine.stream(make_request(sampling=sampling, num_draft_tokens=0))
    assert ids(drafted) == ids(plain)
    assert drafted.seed == plain.seed == 5


def test_without_a_seed_every_text_gets_one_that_reproduces_it(engine: Engine) -> None:
    one, other = engine.stream(make_request(seed=None)), engine.stream(make_request(seed=None))
    assert one.seed != other.seed
    assert ids(engine.stream(make_request(seed=one.seed))) == ids(one)


def test_seeds_change_the_text_and_negative_ones_are_seeds_too(engine: Engine) -> None:
    texts = [ids(engine.stream(make_request(seed=seed))) for seed in (5, 6, -5)]
    assert texts[0] != texts[1] != texts[2] != texts[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": None, "messages": []}, "prompt is empty"),
        ({"prompt": None}, "either a prompt or messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "either a prompt or messages"),
        ({"sampling": Sampling(-0.1)}, "temperature must be between 0 and 100, got -0.1"),
        ({"sampling": Sampling(float("nan"))}, "temperature .* got nan"),
        ({"sampling": Sampling(float("inf"))}, "temperature .* got inf"),
        ({"sampling": Sampling(1.0, top_p=-0.1)}, "top_p must be between 0 and 1, got -0.1"),
        ({"sampling": Sampling(1.0, top_p=float("nan"))}, "top_p .* got nan"),
        ({"sampling": Sampling(1.0, top_k=0)}, "top_k must be an integer between 1 and 2147483647, got 0"),
        ({"sampling": Sampling(1.0, top_k=2**31)}, "top_k .* got 2147483648"),
        ({"seed": 2**64}, "seed must be an integer between -9223372036854775808 and 18446744073709551615"),
        ({"seed": -(2**63) - 1}, "seed must be an integer between"),
        ({"seed": 1.5}, "seed must be an integer .* got 1.5"),
        ({"sampling": Sampling(1.0, top_k=2.5)}, "top_k must be an integer .* got 2.5"),
        ({"sampling": Sampling(logit_bias={2.5: 1.0})}, "logit_bias must be ids .* got 2.5"),
        ({"sampling": Sampling(repetition_penalty=5e-324)}, "repetition_penalty .* got 5e-324"),
        ({"sampling": Sampling(min_p=1.5)}, "min_p must be between 0 and 1, got 1.5"),
        ({"sampling": Sampling(presence_penalty=-2.1)}, "presence_penalty must be between -2 and 2, got -2.1"),
        ({"sampling": Sampling(frequency_penalty=float("nan"))}, "frequency_penalty .* got nan"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty must be between 0.01 and 100, got 0.0"),
        ({"sampling": Sampling(repetition_penalty=float("inf"))}, "repetition_penalty .* got inf"),
        ({"sampling": Sampling(logit_bias={-1: 1.0})}, "logit_bias must be ids from 0 to .*, got -1"),
        ({"sampling": Sampling(logit_bias={10**7: 1.0})}, "logit_bias must be ids from 0 to .*, got 10000000"),
        ({"sampling": Sampling(logit_bias={7: 101.0})}, "logit_bias of 7 must be between -100 and 100, got 101.0"),
        ({"sampling": Sampling("hot")}, "temperature must be between 0 and 100, got hot"),  # type: ignore[arg-type]
        ({"sampling": Sampling(top_p="x")}, "top_p must be between 0 and 1, got x"),  # type: ignore[arg-type]
        ({"sampling": Sampling(logit_bias={7: None})}, "logit_bias of 7 .* got None"),  # type: ignore[dict-item]
        ({"sampling": Sampling(logit_bias=[7])}, "logit_bias must be a bias for each"),  # type: ignore[arg-type]
        ({"stop_strings": (7,)}, "stop must be text, got 7"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer between 1 and 2147483647, got 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be an integer between 0 and 2147483647, got -1"),
        ({"prompt": "clips " * 2000}, "1024"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_first_token(engine: Engine, fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        next(engine.stream(make_request(**fields)).steps)
    assert "\n" not in str(refused.value)


def test_a_prompt_that_does_not_fit_the_context_is_refused_when_it_is_added(engine: Engine) -> None:
    with pytest.raises(ContextExceeded, match="1024"):
        engine.add_request(make_request(prompt="clips " * 2000))
    assert not engine.has_work


@pytest.mark.parametrize("max_new_tokens", [None, 5000])
def test_a_limit_is_a_ceiling_that_the_context_lowers(engine: Engine, max_new_tokens: int | None) -> None:
    request = make_request(max_new_tokens=max_new_tokens)
    made = engine.decode_request(request)
    assert len(made.prompt_ids) + made.max_new_tokens == engine.decoder.target.context_limit == 1024
    assert engine.decode_request(replace(request, max_new_tokens=7)).max_new_tokens == 7


def test_an_answer_of_no_given_length_stays_in_the_first_context_behind_a_prompt_that_leaves_half_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(max_new_tokens=None)
    num_prompt_ids = len(engine.decode_request(request).prompt_ids)
    for first_context, whole in ((2 * num_prompt_ids, 2 * num_prompt_ids), (2 * num_prompt_ids - 1, 1024)):
        monkeypatch.setattr(engine.decoder.target, "first_context", first_context)
        assert num_prompt_ids + engine.decode_request(request).max_new_tokens == whole
        assert engine.decode_request(replace(request, max_new_tokens=500)).max_new_tokens == 500


def test_drafted_and_accepted_tokens_are_counted_by_source(engine: Engine, metrics: CountingMetrics) -> None:
    before = engine.slot.current
    answer = ids(engine.stream(make_request(num_draft_tokens=0)))
    wrong_from_6 = [*answer[:6], *[token ^ 1 for token in answer[6:]]]
    engine.slot.swap(snapshot(7, Foretold(wrong_from_6)))
    try:
        steps = list(engine.stream(make_request(max_new_tokens=8)).steps)
    finally:
        engine.slot.swap(before)
    labels = {"drafter_version": "7", "target": engine.pair.target}
    prefix = "omnidraft_spec_decode_num_"
    assert [len(step.emitted) for step in steps] == [4, 3, 1]
    assert metrics.value("omnidraft_target_passes_total", **labels) == 3
    assert metrics.value("omnidraft_emitted_tokens_total", **labels) == 8
    assert metrics.value(prefix + "drafts_total", source="lookup", **labels) == 2
    assert metrics.value(prefix + "draft_tokens_total", source="lookup", **labels) == 6
    assert metrics.value(prefix + "accepted_tokens_total", source="lookup", **labels) == 5
    by_position = [
        metrics.value(prefix + "accepted_tokens_per_pos_total", source="lookup", position=str(depth), **labels)
        for depth in range(4)
    ]
    assert by_position == [2, 2, 1, 0]


def test_records_cover_the_answer_and_one_that_is_not_stored_or_whose_tenant_opted_out_leaves_none(
    worker: assembly.Worker, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    hidden = ids(worker.engine.stream(make_request(is_stored=False, request_id="hidden", max_new_tokens=20)))
    shown = ids(worker.engine.stream(make_request(request_id="shown", tenant="me", max_new_tokens=20)))
    private = ids(worker.engine.stream(make_request(tenant="private", max_new_tokens=20)))
    assert hidden == private == shown
    assert worker.producer is not None
    assert worker.producer.close(5.0) == 0
    records = _records(tiny_models, tmp_path)
    assert {record.request_id for record in records} == {"shown"}
    assert [token for record in records for token in record.emitted_ids.tolist()] == shown
    assert [record.segment for record in records] == [0, 1, 2]
    assert [record.finish_reason for record in records] == [None, None, "length"]
    assert {(record.seed, record.tenant, record.alignment) for record in records} == {
        (5, "me", worker.engine.pair.alignment)
    }


def test_a_long_text_moves_to_a_new_snapshot_between_two_records(
    worker: assembly.Worker, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = worker.engine
    request = make_request(request_id="long", max_new_tokens=30)
    alone = ids(engine.stream(replace(request, is_stored=False)))
    generation, emitted = engine.add_request(request), []
    while engine.has_work:
        emitted += [token for output in engine.step() for token in output.step.emitted]
        if len(emitted) >= 3 and engine.slot.current.version is None:
            engine.slot.swap(snapshot(4, Foretold(alone)))
    assert emitted == alone
    assert generation.snapshot.version == 4
    assert worker.producer is not None
    assert worker.producer.close(5.0) == 0
    records = _records(tiny_models, tmp_path)
    versions = [record.snapshot_version for record in records]
    assert versions[0] is None
    assert versions[-1] == 4
    assert versions == sorted(versions, key=lambda version: version or 0)
    assert [token for record in records for token in record.emitted_ids.tolist()] == alone


def _records(models: tuple[Path, Path], root: Path) -> list[TraceRecord]:
    settings = _recording(models, root)
    reader = assembly.log_reader(settings, settings.log.traces_topic)
    reader.seek({})
    messages = reader.poll(100, timeout_s=2.0).messages
    reader.close()
    return [codec.decode(message.value, message.headers) for message in messages]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_reproducible_mode_a_canary_never_changes_an_answer(engine: Engine, temperature: float) -> None:
    """A proposer that knows the text, one that is always wrong, and none give the same ids to the same requests."""
    requests = [
        make_request(seed=seed, sampling=Sampling(temperature), mode="reproducible", request_id=f"request-{seed}")
        for seed in range(8)
    ]
    alone = [ids(engine.stream(each)) for each in requests]
    versions = set()
    for canary in (Foretold(alone[0]), Foretold([1] * 12)):
        engine.slot.set_canary(Canary(snapshot(2, canary), 0.5))
        try:
            answers = [engine.stream(each) for each in requests]
            versions |= {answer.snapshot.version for answer in answers}
            assert [ids(answer) for answer in answers] == alone
        finally:
            engine.slot.set_canary(None)
    assert versions == {2, engine.slot.current.version}


def test_all_texts_of_one_request_id_have_the_same_snapshot(engine: Engine) -> None:
    engine.slot.set_canary(Canary(snapshot(2, Foretold([])), 0.5))
    try:
        versions_of = {
            number: {
                engine.stream(make_request(request_id=f"r{number}", seed=seed)).snapshot.version for seed in (1, 2)
            }
            for number in range(8)
        }
    finally:
        engine.slot.set_canary(None)
    assert all(len(versions) == 1 for versions in versions_of.values())
    assert len(set.union(*versions_of.values())) == 2


def test_choices_of_one_request_stay_with_their_snapshot_as_long_as_it_serves(worker: assembly.Worker) -> None:
    """Also on trial, where their own ids are not all of one side; then they move to the one that serves."""
    slot = worker.engine.slot
    canary, first, last = snapshot(2, Foretold([])), slot.current, snapshot(3, Foretold([]))
    slot.set_canary(Canary(canary, 0.5))
    choice_ids = [f"r#{number}" for number in range(4)]
    assert {slot.snapshot_for(each).version for each in choice_ids} == {None, 2}
    choices = [
        worker.engine.add_request(make_request(request_id=each, max_new_tokens=32, ignores_eos=True), its_snapshot)
        for its_snapshot in (first, canary)
        for each in choice_ids
    ]
    while min(each.num_emitted for each in choices) <= 8:
        worker.engine.step()
    assert [each.snapshot.version for each in choices] == [None] * 4 + [2] * 4
    slot.swap(canary)
    worker.engine.step()
    assert [each.snapshot.version for each in choices] == [2] * 8
    slot.swap(last)
    finish(worker.engine)
    assert [each.snapshot.version for each in choices] == [3] * 8


def test_choices_of_one_request_move_together_while_a_canary_serves(worker: assembly.Worker) -> None:
    """Their own ids are not all of one side of the trial."""
    slot = worker.engine.slot
    choices = [
        worker.engine.add_request(make_request(request_id=each, max_new_tokens=32, ignores_eos=True))
        for each in ("r", "r#1", "r#2", "r#3")
    ]
    slot.swap(snapshot(2, Foretold([])))
    slot.set_canary(Canary(snapshot(3, Foretold([])), 0.5))
    assert {slot.snapshot_for(each.request_id).version for each in choices} == {2, 3}
    finish(worker.engine)
    assert [each.snapshot.version for each in choices] == [slot.snapshot_for("r").version] * 4


def test_a_mode_that_the_target_refuses_is_the_requests_error_unless_it_is_the_deployments(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise ModeRefused("it does not hold")

    def error_of(request: GenerationRequest) -> Exception | None:
        engine.add_request(request)
        (output,) = engine.step()
        return output.error

    monkeypatch.setattr(engine.decoder.target, "open", refuse)
    own, other = make_request(num_prompt_log_probs=1), make_request(num_prompt_log_probs=1, mode="fast")
    message = "mode: not served here: it does not hold"
    refused = error_of(other)
    assert isinstance(refused, RequestError)
    assert str(refused) == message
    assert isinstance(error_of(own), ConfigError)
    with pytest.raises(RequestError, match=f"^{message}$"):
        next(engine.score_prompt(other, engine.decode_request(other)))
    with pytest.raises(ConfigError, match=r"^it does not hold: set decode\.mode = 'fast'$"):
        next(engine.score_prompt(own, engine.decode_request(own)))


def let_drift(engine: Engine, work: Work) -> None:
    key = ("drift", "drifting", work)
    engine.slot.rules.state = ControlState({key: Entry(key, Drift(level=0.7), 0, 0)})


def test_while_a_tenants_traffic_drifts_less_is_drafted_for_it_and_the_text_is_the_same(engine: Engine) -> None:
    def drafted(**fields: object) -> int:
        return engine.decode_request(make_request(**fields)).num_draft_tokens

    before = ids(engine.stream(make_request(tenant="drifting")))
    let_drift(engine, "text")
    try:
        assert (drafted(tenant="other"), drafted(tenant="drifting")) == (5, 3)
        assert drafted(tenant="drifting", num_draft_tokens=4) == 4  # the request decides
        assert ids(engine.stream(make_request(tenant="drifting"))) == before
    finally:
        engine.slot.rules.state = ControlState()
    assert drafted(tenant="drifting") == 5


def test_a_drift_of_constrained_text_throttles_calls_of_tools_and_no_free_text(engine: Engine) -> None:
    let_drift(engine, "constrained")
    try:
        for grammar, num_drafted in ((None, 5), (Grammar("regex", "[ab]*"), 3), (Grammar("tools", "{}"), 3)):
            request = make_request(tenant="drifting", sampling=Sampling(grammar=grammar))
            assert engine.decode_request(request).num_draft_tokens == num_drafted
    finally:
        engine.slot.rules.state = ControlState()


def test_a_text_after_an_order_to_forget_reuses_no_keys(engine: Engine) -> None:
    def num_cached() -> int:
        generation = engine.add_request(make_request(prompt=PROMPT * 12), cache_scope="tenant/")
        while engine.has_work:
            engine.step()
        return generation.num_reused

    num_cached()
    assert num_cached() > 0
    engine.forget_texts()
    assert num_cached() == 0


def test_a_text_that_runs_when_all_is_forgotten_leaves_nothing_behind(
    tiny_models: tuple[Path, Path], omnidraft_home: Path
) -> None:
    engine = tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine
    assert engine.recent is not None
    finish(engine, make_request(seed=1))
    memory = engine._drafter_memory
    assert (engine.recent.num_ids, len(engine.decoder.scheduler.prefixes), memory.num_ids) > (0, 0, 0)
    running = engine.add_request(make_request(seed=2), cache_scope="tenant/")
    for _ in range(3):
        engine.step()
    engine.forget_texts()
    finish(engine)
    assert running.request.is_forgotten
    assert (engine.recent.num_ids, len(engine.decoder.scheduler.prefixes), memory.num_ids) == (0, 0, 0)
    finish(engine, make_request(seed=3))
    assert (engine.recent.num_ids, len(engine.decoder.scheduler.prefixes), memory.num_ids) > (0, 0, 0)


def finish(engine: Engine, request: GenerationRequest | None = None) -> None:
    """Run rounds until nothing is left, of this request too."""
    if request is not None:
        engine.add_request(request, cache_scope="tenant/")
    while engine.has_work:
        engine.step()


def test_a_text_that_cannot_be_observed_is_not_begun(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no span")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_begin_span", broken)
        with pytest.raises(ValueError, match="no span"):
            engine.add_request(make_request())
    assert engine.step() == []
    assert engine.decoder.scheduler.sequences == []
