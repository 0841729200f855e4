"""The queue promises order, a bound, one text at a time, and a thread that outlives every failure."""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from math import ceil

import pytest

from omnidraft.config import WorkerSettings
from omnidraft.decode.decoder import SequenceOutput
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.sequence import SequenceState
from omnidraft.errors import ContractError, RequestError
from omnidraft.ports import Request, Sampling
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.queued_request import Abandoned, QueuedRequest, QueueFull, Stopping
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.attack.raw_http import post, status_of
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, Gated, Slow, broken_target, snapshot, steps_of, wait_until

GENERATION = GenerationRequest(prompt="How many clips", max_new_tokens=4, seed=1)


def gated(engine: Engine) -> Gated:
    proposer = Gated()
    engine.slot.swap(snapshot(1, proposer))
    return proposer


def queued(engine: Engine, client: str = "default") -> QueuedRequest:
    return QueuedRequest(engine, [GENERATION], client=client)


def num_tokens(queued: QueuedRequest) -> int:
    return sum(len(step.emitted) for _, step in steps_of(queued))


def wait_for(metrics: CountingMetrics, status: str) -> None:
    wait_until(lambda: metrics.value("omnidraft_requests_total", status=status))


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics
) -> None:
    proposer = gated(engine)
    running = requests.submit(queued(engine))
    assert proposer.is_reached.wait(PATIENCE_S)
    waiting = [requests.submit(queued(engine)), requests.submit(queued(engine))]
    with pytest.raises(QueueFull, match="2 requests are waiting already; try again later"):
        requests.submit(queued(engine))
    assert metrics.value("omnidraft_requests_total", status="QueueFull") == 1
    proposer.gate.set()
    assert [num_tokens(each) for each in (running, *waiting)] == [4, 4, 4]
    assert num_tokens(requests.submit(queued(engine))) == 4


def test_a_client_that_goes_away_frees_the_queue(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics
) -> None:
    proposer = gated(engine)
    running, waiting = requests.submit(queued(engine)), None
    assert proposer.is_reached.wait(PATIENCE_S)
    waiting, last = requests.submit(queued(engine)), requests.submit(queued(engine))
    requests.abandon(running)
    requests.abandon(waiting)
    proposer.gate.set()
    assert num_tokens(last) == 4
    assert running.stats.num_passes == 1
    assert waiting.stats.num_passes == 0
    wait_for(metrics, "ok")
    assert metrics.value("omnidraft_requests_total", status="abandoned") == 2
    for each in (running, waiting):
        with pytest.raises(Abandoned, match="went away"):
            list(steps_of(each))


@pytest.mark.parametrize("error", [ContractError("broken"), TypeError("a bug")], ids=["ours", "a bug"])
def test_the_thread_survives_what_decoding_raises(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics, error: Exception
) -> None:
    with broken_target(engine, error, num_good=2), pytest.raises(type(error), match=str(error)):
        list(steps_of(requests.submit(queued(engine))))
    with pytest.raises(RequestError, match="prompt is empty"):
        list(steps_of(requests.submit(QueuedRequest(engine, [GenerationRequest(prompt="")]))))
    assert num_tokens(requests.submit(queued(engine))) == 4
    wait_for(metrics, "ok")
    assert metrics.value("omnidraft_requests_total", status=type(error).__name__) == 1
    assert metrics.value("omnidraft_requests_total", status="RequestError") == 1
    assert len(metrics.observed("omnidraft_time_to_first_token_seconds", target=engine.pair.target)) == 2


def test_what_ends_the_thread_ends_every_request(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = gated(engine)
    asked = [requests.submit(queued(engine)) for _ in range(2)]
    assert proposer.is_reached.wait(PATIENCE_S)
    monkeypatch.setattr(engine, "step", lambda: {}["lost"])
    proposer.gate.set()
    for each in asked:
        with pytest.raises(KeyError, match="lost"):
            num_tokens(each)
    wait_for(metrics, "KeyError")
    for text in (each.texts[0] for each in asked):
        if text.sequence is not None:
            engine.abort(text.sequence)  # other tests have this engine too
    with pytest.raises(Stopping):
        requests.submit(queued(engine))
    wait_until(lambda: requests.problem)
    assert requests.problem is not None


def test_closing_finishes_what_was_accepted_and_refuses_the_rest(engine: Engine, metrics: CountingMetrics) -> None:
    proposer = gated(engine)
    requests = RequestQueue(metrics, max_waiting=4)
    submitted = [requests.submit(queued(engine)) for _ in range(3)]
    assert proposer.is_reached.wait(PATIENCE_S)
    closing = threading.Thread(target=requests.close, args=(PATIENCE_S,))
    closing.start()
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(Stopping):  # noqa: PT012 -- the one line that may raise stands in a loop
        while time.monotonic() < deadline:
            submitted.append(requests.submit(queued(engine)))
            time.sleep(0.001)
    proposer.gate.set()
    closing.join(PATIENCE_S)
    assert [num_tokens(each) for each in submitted] == [4] * len(submitted)


def test_a_full_queue_evicts_the_newest_request_of_the_client_with_most_for_another_client(
    engine: Engine, requests: RequestQueue
) -> None:
    proposer = gated(engine)
    running = requests.submit(queued(engine, "many"))
    assert proposer.is_reached.wait(PATIENCE_S)
    first, newest = requests.submit(queued(engine, "many")), requests.submit(queued(engine, "many"))
    other = requests.submit(queued(engine, "other"))
    with pytest.raises(QueueFull, match="try again later"):
        list(steps_of(newest))
    with pytest.raises(QueueFull):
        requests.submit(queued(engine, "other"))
    proposer.gate.set()
    assert [num_tokens(each) for each in (running, first, other)] == [4, 4, 4]


def test_retry_after_is_estimated_from_the_durations_of_requests(engine: Engine, metrics: CountingMetrics) -> None:
    """With 7 waiting, half are served when four have been."""
    engine.slot.swap(snapshot(1, Slow(0.25)))
    requests = RequestQueue(metrics, max_waiting=7)
    assert num_tokens(requests.submit(queued(engine))) == 4
    submitted = [requests.submit(QueuedRequest(engine, [replace(GENERATION, max_new_tokens=40)]))]
    wait_until(lambda: not metrics.value("omnidraft_requests_waiting"))
    submitted += [requests.submit(queued(engine)) for _ in range(7)]
    with pytest.raises(QueueFull) as refused:
        requests.submit(queued(engine))
    (duration_s,) = requests._queues[engine].durations_s
    assert refused.value.retry_after_s == ceil(4 * duration_s) >= 4
    for each in submitted:
        requests.abandon(each)
    requests.close(PATIENCE_S)


def test_texts_of_one_request_keep_its_snapshot(engine: Engine, requests: RequestQueue) -> None:
    base = engine.slot.current
    engine.slot.swap(snapshot(1, base.proposer))
    sequences = [replace(GENERATION, seed=seed, max_new_tokens=12) for seed in (1, 2, 3)]
    three_texts = QueuedRequest(engine, sequences)
    steps = steps_of(requests.submit(three_texts))
    indices = [next(steps)[0]]
    engine.slot.swap(snapshot(2, base.proposer))
    indices += [index for index, _ in steps]
    assert set(indices) == {0, 1, 2}
    assert {text.sequence.snapshot.version for text in three_texts.texts if text.sequence} == {1}
    assert three_texts.stats.num_tokens == sum(text.stats.num_tokens for text in three_texts.texts)
    later = requests.submit(queued(engine))
    assert num_tokens(later) == 4
    assert later.texts[0].sequence is not None
    assert later.texts[0].sequence.snapshot.version == 2


def test_a_prompt_is_tokenised_once_for_all_its_choices(
    many_engine: Engine, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = replace(GENERATION, sampling=Sampling(1.0), max_new_tokens=12)
    sequences = [replace(drawn, seed=seed, request_id=f"r{seed}") for seed in (1, 2, 3)]
    sequences += [replace(drawn, prompt="A robe takes"), replace(drawn, stop_strings=("x",))]
    alone = ["".join(step.text for step in many_engine.stream(each).steps) for each in sequences]
    decode_request, asked = many_engine.decode_request, list[GenerationRequest]()

    def counted(request: GenerationRequest) -> Request:
        asked.append(request)
        return decode_request(request)

    queued = QueuedRequest(many_engine, sequences)
    monkeypatch.setattr(many_engine, "decode_request", counted)
    requests = RequestQueue(metrics, max_waiting=8)
    texts = [""] * len(sequences)
    for index, step in steps_of(requests.submit(queued)):
        texts[index] += step.text
    requests.close(PATIENCE_S)
    assert texts == alone
    assert [(each.prompt, each.stop_strings) for each in asked] == [
        (GENERATION.prompt, ()),
        ("A robe takes", ()),
        (GENERATION.prompt, ("x",)),
    ]


def test_requests_are_decoded_side_by_side(
    many_engine: Engine, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the text that it is alone; the short ones do not wait for the long one."""
    sequences = [replace(GENERATION, seed=seed, max_new_tokens=40 if seed == 1 else 5) for seed in range(1, 5)]
    alone = ["".join(step.text for step in many_engine.stream(each).steps) for each in sequences]
    step, rounds, are_submitted = many_engine.step, list[list[SequenceState]](), threading.Event()

    def noted() -> list[SequenceOutput]:
        are_submitted.wait(PATIENCE_S)
        outputs = step()
        rounds.append([output.sequence for output in outputs])
        return outputs

    monkeypatch.setattr(many_engine, "step", noted)
    requests = RequestQueue(metrics, max_waiting=8)
    submitted = [requests.submit(QueuedRequest(many_engine, [each], client=f"c{each.seed}")) for each in sequences]
    are_submitted.set()
    assert ["".join(step.text for _, step in steps_of(each)) for each in submitted] == alone
    requests.close(PATIENCE_S)
    long, *short = [each.texts[0].sequence for each in submitted]
    assert rounds[-1] == [long]
    assert all(any(long in each and other in each for each in rounds) for other in short)


class MostRunning(CountingMetrics):
    """Remembers the most requests that ran together."""

    most = 0.0

    def set(self, name: str, value: float, **labels: str) -> None:
        super().set(name, value, **labels)
        if name == "omnidraft_requests_running":
            self.most = max(self.most, value)


def test_requests_whose_prompts_are_scored_wait_like_all_others(engine: Engine) -> None:
    metrics, proposer = MostRunning(), gated(engine)
    requests = RequestQueue(metrics, max_waiting=3)
    submitted = [requests.submit(queued(engine))]
    assert proposer.is_reached.wait(PATIENCE_S)
    scored = replace(GENERATION, num_prompt_log_probs=1)
    submitted += [requests.submit(QueuedRequest(engine, [scored])) for _ in range(3)]
    with pytest.raises(QueueFull):
        requests.submit(QueuedRequest(engine, [scored]))
    proposer.gate.set()
    assert [num_tokens(each) for each in submitted] == [4] * 4
    requests.close(PATIENCE_S)
    assert metrics.most == 1


def test_a_text_that_fails_ends_no_other_one(many_engine: Engine, metrics: CountingMetrics) -> None:
    requests = RequestQueue(metrics, max_waiting=8)
    good = QueuedRequest(many_engine, [replace(GENERATION, max_new_tokens=20)])
    bad = QueuedRequest(many_engine, [GENERATION, replace(GENERATION, prompt="clips " * 2000)])
    for each in (good, bad):
        requests.submit(each)
    with pytest.raises(RequestError, match="context"):
        list(steps_of(bad))
    assert num_tokens(good) == 20
    requests.close(PATIENCE_S)
    assert not many_engine.has_work


def test_what_is_not_finished_by_the_deadline_ends_with_an_error(engine: Engine, metrics: CountingMetrics) -> None:
    engine.slot.swap(snapshot(1, Slow(0.05)))
    requests = RequestQueue(metrics, max_waiting=4)
    running = requests.submit(QueuedRequest(engine, [replace(GENERATION, max_new_tokens=400)]))
    waiting = requests.submit(queued(engine))
    steps = steps_of(running)
    next(steps)
    began_s = time.monotonic()
    requests.close(0.3)
    assert time.monotonic() - began_s < PATIENCE_S / 4
    assert requests.problem
    for unfinished in (steps, steps_of(waiting)):
        with pytest.raises(Stopping, match="ask another one"):
            list(unfinished)
    assert metrics.value("omnidraft_requests_total", status="Stopping") == 2


def test_requests_that_are_refused_after_work_hold_up_no_running_text(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are too long are tokenised before they are refused: in turns with the others' rounds."""
    add, rounds, refused = engine.add_request, [], []

    def refuse_the_long(request: GenerationRequest, *args, **options):
        if request.prompt == "long":
            time.sleep(0.1)
            refused.append(len(rounds))
            raise RequestError("the prompt is too long")
        return add(request, *args, **options)

    def slow_step():
        rounds.append(None)
        time.sleep(0.01)
        return step()

    step = engine.step
    monkeypatch.setattr(engine, "step", slow_step)
    monkeypatch.setattr(engine, "has_room", lambda *clients: True)
    monkeypatch.setattr(engine, "add_request", refuse_the_long)
    good = QueuedRequest(engine, [replace(GENERATION, max_new_tokens=40, num_draft_tokens=0)], client="good")
    requests.submit(good)
    while not rounds:
        time.sleep(0.001)
    long = [QueuedRequest(engine, [replace(GENERATION, prompt="long")], client="bad") for _ in range(2)]
    for each in long:
        requests.submit(each)
    assert num_tokens(good) == 40
    for each in long:
        with pytest.raises(RequestError, match="too long"):
            list(steps_of(each))
    assert refused[1] > refused[0]  # a round of the other text came between them


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_burst_of_100_requests_is_answered(many_engine: Engine, is_streamed: bool) -> None:
    """As a load test sends it, to a worker of default settings."""
    settings, metrics = WorkerSettings(), CountingMetrics()
    requests = RequestQueue(metrics, max_waiting=settings.max_queue)
    app = application(requests, [ServedModel(many_engine, "print")], settings, lambda: b"")
    body = json.dumps({"prompt": "clips", "max_tokens": 2, "stream": is_streamed}).encode()

    async def ask_at_once(port: int) -> list[bytes]:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in connections:
            writer.write(post(body, b"Connection: close"))
        answers = await asyncio.gather(*[reader.read() for reader, _ in connections])
        for _, writer in connections:
            writer.close()
        return answers

    with served(app, settings) as url:
        answers = asyncio.run(ask_at_once(int(url.rpartition(":")[2])))
    requests.close(PATIENCE_S)
    assert Counter(map(status_of, answers)) == {200: 100}
    end = b"[DONE]" if is_streamed else b'"finish_reason"'
    assert all(end in answer for answer in answers)
    assert metrics.value("omnidraft_requests_total", status="ok") == 100
