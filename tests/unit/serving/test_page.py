"""The page's stream tells every pass as it was, and its files come from here and run nothing else."""

import re
import threading

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.ports import DraftTree, Step, Timings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.page.pass_events import PassEvents
from omnidraft.serving.page.pass_stream import FILES_PATH, FOLDER, StepClock
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.page_recordings import LANES, PASSES, body, end, passes, told
from tests.tiny_engine import PATIENCE_S, wait_until

KEY = "sk-of-the-page-0123456789"
QUESTION = "How many clips did Natalia sell?"
MAX_PAGE_BYTES = 200_000


def application_with(requests: RequestQueue, engine: Engine, settings: WorkerSettings) -> FastAPI:
    return application(requests, [ServedModel(engine, "print")], settings, lambda: b"")


def test_both_lanes_tell_the_text_of_the_api_token_by_token(client: TestClient) -> None:
    asked = body(QUESTION)
    answer = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    ids = []
    for speculation in LANES.values():
        events = told(client.post(PASSES, json=asked | {"speculation": speculation}))
        tokens = [token for each in passes(events) for token in each["tokens"]]
        assert "".join(token["text"] for token in tokens).startswith(answer["message"]["content"])
        assert [token["id"] for token in tokens] == end(events)["ids"]
        assert [token["spelled"] for token in tokens[: len(answer["logprobs"]["content"])]] == [
            bytes(entry["bytes"]).decode("utf-8", "backslashreplace") for entry in answer["logprobs"]["content"]
        ]
        ids.append(end(events)["ids"])
    assert ids[0] == ids[1] != []


def test_plain_decoding_drafts_nothing_and_gives_one_token_a_pass(client: TestClient) -> None:
    events = told(client.post(PASSES, json=body(QUESTION, speculation="off")))
    assert all(each["nodes"] == [] and len(each["tokens"]) == 1 for each in passes(events))


def test_every_pass_tells_who_drafted_what_was_expected_and_what_the_target_thought(client: TestClient) -> None:
    events = told(client.post(PASSES, json=body(QUESTION)))
    nodes = [node for each in passes(events) for node in each["nodes"]]
    assert nodes
    for node in nodes:
        assert node["source"] in {"direct", "split", "merge", "lookup", "suffix", "forced"}
        assert 0 <= node["expected"] <= 1
        assert (node["q"] is None) == (node["source"] not in {"direct", "split", "merge"})
    num_accepted = sum(node["is_accepted"] for node in nodes)
    assert num_accepted == sum(end(events)["stats"]["accepted_by_source"].values())
    for each in passes(events):
        for token in each["tokens"]:
            assert 0 <= token["p"] <= 1
            assert token["likeliest"] == sorted(token["likeliest"], key=lambda other: -other["p"])
            if token["node"]:
                node = each["nodes"][token["node"] - 1]
                assert (node["p"], node["spelled"], node["is_accepted"]) == (token["p"], token["spelled"], True)
                num_accepted -= 1
    assert num_accepted == 0
    drafter_tokens = end(events)["drafter_tokens"]
    num_bytes = sum(token["num_bytes"] for each in passes(events) for token in each["tokens"])
    assert drafter_tokens is None or sum(token["num_bytes"] for token in drafter_tokens) == num_bytes
    times = [one["at_ms"] for one in passes(events)]
    assert times == sorted(times)
    spent = sum(one["draft_ms"] + one["target_ms"] + one["other_ms"] for one in passes(events))
    assert 0 < spent <= times[-1] + 1
    assert not any(one["is_shared"] for one in passes(events))


@given(data=st.data())
def test_the_texts_of_all_tokens_add_up_to_the_text(tiny_engine: Engine, data: st.DataObject) -> None:
    vocabulary = tiny_engine.pair.target_tokenizer.vocabulary
    ids = data.draw(st.lists(st.lists(st.integers(0, len(vocabulary) - 1), min_size=1, max_size=4), max_size=6))
    events = PassEvents(tiny_engine.pair)
    told_passes = [
        events.of_pass(Step(DraftTree.empty(0), tuple(emitted), (), "", None, Timings(), None)) for emitted in ids
    ]
    flat = [token for emitted in ids for token in emitted]
    texts = "".join(token["text"] for each in told_passes for token in each["tokens"])
    assert vocabulary.spell(flat).decode("utf-8", "replace").startswith(texts)
    assert sum(token["num_bytes"] for each in told_passes for token in each["tokens"]) == len(vocabulary.spell(flat))
    assert events.of_end()["ids"] == flat


def test_a_reader_that_goes_away_ends_its_text(url: str, metrics: CountingMetrics) -> None:
    asked = body(QUESTION, max_tokens=64, temperature=1.0)
    with httpx.stream("POST", f"{url}{PASSES}", json=asked, timeout=PATIENCE_S) as response:
        assert next(response.iter_lines()) == "event: queued"
    wait_until(lambda: metrics.value("omnidraft_requests_total"))
    assert metrics.value("omnidraft_requests_total", status="abandoned") == 1


class SlowCount(RequestQueue):
    """Counts its texts for as long as the gate is closed, from the second time on."""

    def __init__(self) -> None:
        self.num_counts = 0
        self.is_reached, self.gate = threading.Event(), threading.Event()

    @property
    def num_texts(self) -> int:
        self.num_counts += 1
        if self.num_counts > 1:
            self.is_reached.set()
            assert self.gate.wait(PATIENCE_S)
        return 1


def test_a_pass_that_can_be_read_has_its_time_although_the_decoding_thread_is_still_at_it(engine: Engine) -> None:
    requests, step = SlowCount(), Step(DraftTree.empty(0), (1,), (), "", None, Timings(), None)
    clock = StepClock(requests)
    queued = QueuedRequest(engine, [GenerationRequest(prompt=QUESTION)], note=clock.note)
    decoding = threading.Thread(target=lambda: [queued.put((0, step)) for _ in range(3)])
    decoding.start()
    assert requests.is_reached.wait(PATIENCE_S)
    early = [clock.next() for _ in queued.ready_steps()]
    requests.gate.set()
    decoding.join(PATIENCE_S)
    late = [clock.next() for _ in queued.ready_steps()]
    assert (len(early), len(late)) == (1, 2)


def test_the_page_is_open_and_asks_for_the_key_that_its_stream_needs(requests: RequestQueue, engine: Engine) -> None:
    app = application_with(requests, engine, WorkerSettings(api_keys=(ApiKey(key=KEY),)))
    with TestClient(app) as client:
        assert client.get("/").status_code == client.get(f"{FILES_PATH}main.js").status_code == 200
        assert client.get(f"{FILES_PATH}../passes").status_code in (401, 404)
        assert client.post(PASSES, json=body(QUESTION)).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert end(told(client.post(PASSES, json=body(QUESTION), headers=headers)))["ids"]


def test_the_page_can_be_left_out(requests: RequestQueue, engine: Engine) -> None:
    with TestClient(application_with(requests, engine, WorkerSettings(page=False))) as client:
        for path in ("/", f"{FILES_PATH}main.js"):
            assert client.get(path).status_code == 404
        assert client.post(PASSES, json=body(QUESTION)).status_code == 404


def test_a_browser_may_run_the_pages_own_files_only(client: TestClient) -> None:
    for path in ("/", *(FILES_PATH + file.name for file in FOLDER.iterdir() if file.name != "index.html")):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_whole_page_is_small_and_names_no_other_host() -> None:
    files = [path for path in FOLDER.iterdir() if not path.name.endswith("LICENSE.txt")]
    assert sum(path.stat().st_size for path in files) < MAX_PAGE_BYTES
    for path in files:
        if not path.name.startswith("uPlot"):  # its first line names its home page
            addresses = set(re.findall(r"https?://[^\s\"']+", path.read_text()))
            assert addresses <= {"http://www.w3.org/2000/svg"}


def test_every_text_is_inserted_as_text() -> None:
    for path in FOLDER.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text())
