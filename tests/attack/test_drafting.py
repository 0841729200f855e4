"""Drafting can lose no request: texts far longer than the drafter's context, broken drafters, special tokens inside."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.models.kv_session import BranchingSession
from omnidraft.ports import Sampling, Step
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_target
from tests.tiny_engine import tiny_settings

CONTEXT = 96
PROMPT = "How many clips did Natalia sell"
METRICS = CountingMetrics()
FAILURES = "omnidraft_drafting_failures_total"
NUM_TOKENS = 4
TEXT = Path(__file__).parents[2] / "LICENSE"  # it does not change, and the models learn it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that learned to write our licence, badly, and a drafter that learned less of it and has a
    short context."""
    root = tmp_path_factory.mktemp("short-context")
    drafter = make_target(root / "drafter", spread=0.05)
    _teach(drafter, TEXT.read_text(), num_steps=40)
    target = Path(shutil.copytree(drafter, root / "target"))
    _teach(target, TEXT.read_text(), num_steps=25)
    return target, _with_context(drafter, CONTEXT)


def _with_context(folder: Path, num_ids: int) -> Path:
    """The same model with another context."""
    other = Path(shutil.copytree(folder, folder.parent / f"{folder.name}-{num_ids}"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_ids}))
    return other


def _teach(folder: Path, text: str, num_steps: int, length: int = 320) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    optimizer, draws = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        starts = torch.randint(len(ids) - length, (1,), generator=draws).tolist()
        batch = torch.stack([ids[start : start + length] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(params=["native", "torch"])
def engine(
    request: pytest.FixtureRequest, models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine for each way in which a drafter computes."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    if request.param == "torch":
        monkeypatch.setattr("omnidraft.models.hf.drafter.unsupported_reason", lambda model: "planted")
    return assembly.engine(without_lookup(models), METRICS).engine


def without_lookup(models: tuple[Path, Path], **sections: Any) -> Settings:
    """Return settings without prompt lookup, whose drafts would hide the drafter's."""
    settings = tiny_settings(models, **sections)
    decode = settings.decode.model_copy(update={"lookup": False})
    return settings.model_copy(update={"decode": decode})


def steps_of(engine: Engine, **fields: object) -> list[Step]:
    fields = {"prompt": PROMPT, "max_new_tokens": 3 * CONTEXT, "seed": 5, "sampling": Sampling(0.0)} | fields
    return list(engine.stream(GenerationRequest(**fields)).steps)  # type: ignore[arg-type]


def ids_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.emitted]


def acceptance(steps: Sequence[Step]) -> float:
    """Return the accepted share of the drafted tokens."""
    return sum(len(step.path) for step in steps) / sum(len(step.tree) - 1 for step in steps)


def halves(engine: Engine, steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Steps until the text fills the drafter's context, and the steps after that."""
    length, before, behind = len(engine.pair.drafter_tokenizer.prompt_ids(PROMPT)), [], []
    for step in steps:
        (before if length < CONTEXT else behind).append(step)
        length += len(step.emitted)
    return before, behind


def endless(engine: Engine, temperature: float) -> Sampling:
    return Sampling(temperature, logit_bias=dict.fromkeys(engine.pair.target_tokenizer.stop_ids, -100.0))


def test_a_text_of_three_times_the_drafters_context_is_drafted_to_its_end(engine: Engine) -> None:
    sampling = endless(engine, 1.0)
    steps = steps_of(engine, sampling=sampling)
    assert len(ids_of(steps)) == 3 * CONTEXT
    assert ids_of(steps) == ids_of(steps_of(engine, sampling=sampling, num_draft_tokens=0))
    _, behind = halves(engine, steps)
    assert sum(len(step.tree) > 1 for step in behind) > 0.9 * len(behind)


@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_acceptance_behind_the_drafters_limit_stays_what_it_was(engine: Engine, models: tuple[Path, Path]) -> None:
    """Also beside the same drafter with a context that holds all."""
    target, drafter = models
    whole = assembly.engine(without_lookup((target, _with_context(drafter, 8 * CONTEXT))), METRICS).engine
    texts = {"sampling": endless(engine, 1.0)}
    before, behind, control = [], [], []
    for seed in range(6):
        first, rest = halves(engine, steps_of(engine, seed=seed, **texts))
        before += first
        behind += rest
        control += halves(engine, steps_of(whole, seed=seed, **texts))[1]
    shares = [acceptance(steps) for steps in (before, behind, control)]
    print("acceptance {:.3f} before the limit, {:.3f} behind it, {:.3f} there with a long context".format(*shares))
    assert sum(len(step.tree) > 1 for step in behind) > 0.9 * len(behind)
    assert shares[0] > 0.25
    assert shares[1] > 0.7 * max(shares[0], shares[2])


@pytest.fixture
def bushy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extends all prefixes at once, with four candidates each."""
    monkeypatch.setattr(FixedPolicy, "num_candidates", 4)
    monkeypatch.setattr(FixedPolicy, "select_expansions", lambda self, values, num_nodes: len(values))


@pytest.mark.usefixtures("bushy")
@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_no_prompt_near_the_drafters_limit_kills_its_request(engine: Engine) -> None:
    """Trees branch more ids than they are deep; six prompts that fill the context to its last ids, and beyond."""
    failed, num_trees = METRICS.value(FAILURES), 0
    for length in (CONTEXT - 12, CONTEXT - 5, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1):
        fields = {"prompt": PROMPT[:1] * length, "max_new_tokens": 24, "sampling": endless(engine, 1.0), "mode": "fast"}
        steps = steps_of(engine, **fields)
        assert ids_of(steps) == ids_of(steps_of(engine, num_draft_tokens=0, **fields))
        num_trees += sum(len(step.tree.leaves) > 1 for step in steps)
    assert METRICS.value(FAILURES) == failed
    assert num_trees > 20


@pytest.mark.drafting_fails
@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("call", ["prefill_or_extend_step", "branch_step"])
def test_a_drafter_that_breaks_costs_no_answer(
    engine: Engine, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(self: BranchingSession, *args: object) -> None:
        raise RuntimeError("weights that cannot be computed with")

    failed = METRICS.value(FAILURES)
    plain = [ids_of(steps_of(engine, max_new_tokens=12, num_draft_tokens=0, seed=seed)) for seed in range(10)]
    monkeypatch.setattr(BranchingSession, call, breaks)
    engine.decoder.failures._last_s = None
    assert [ids_of(steps_of(engine, max_new_tokens=12, seed=seed)) for seed in range(10)] == plain
    assert METRICS.value(FAILURES) - failed == 10
    assert len([record for record in caplog.records if "drafting for" in record.getMessage()]) == 1


@pytest.mark.drafting_fails
@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_messages_that_the_drafters_template_refuses_are_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"prompt": None, "messages": messages, "max_new_tokens": 12}
    plain = ids_of(steps_of(engine, num_draft_tokens=0, **fields))
    tokenizer = engine.pair.drafter_tokenizer
    monkeypatch.setattr(tokenizer, "_resolved", replace(tokenizer._resolved, chat_template=None))
    assert ids_of(steps_of(engine, **fields)) == plain


@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_inside_another_engine_texts_outgrow_the_drafter_too(
    engine: Engine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Texts of three times its context, in rounds as vLLM has them; the engine's part is replayed from their ids."""
    local = {"log": {"url": f"sqlite:///{tmp_path}/log.db"}, "registry": {"url": f"directory:///{tmp_path}/registry"}}
    settings, metrics = without_lookup(models, recorder={"enabled": False}, **local), CountingMetrics()
    rounds = assembly.batching(settings, metrics, num_tokens=NUM_TOKENS).rounds
    replayed = [_Replayed(engine, PROMPT[:length]) for length in range(9, 31, 5)]
    while any(each.is_running for each in replayed):
        emitted = [each.emit() for each in replayed]
        drafts = rounds.next(emitted, lambda index: replayed[index].ids, lambda num_rows: None)
        for each, drafted in zip(replayed, drafts, strict=True):
            each.drafted = drafted
    assert metrics.value(FAILURES) == 0
    before, behind = (float(np.mean([share for each in replayed for share in each.accepted[past]])) for past in (0, 1))
    print(f"in rounds: acceptance {before:.3f} before the limit, {behind:.3f} behind it")
    assert sum(len(each.accepted[1]) for each in replayed) > 100
    assert behind > 0.5 * before > 0.05


class _Replayed:
    """A known text that another engine decodes again."""

    def __init__(self, engine: Engine, prompt: str) -> None:
        answer = ids_of(steps_of(engine, prompt=prompt, sampling=endless(engine, 0.3), num_draft_tokens=0))
        prompt_ids = engine.pair.target_tokenizer.prompt_ids(prompt)
        self._text, self._length = prompt_ids + answer, len(prompt_ids)
        self.drafted: list[int] = []
        self.accepted: tuple[list[float], list[float]] = ([], [])
        """Shares of the rounds in which the text fits into the drafter's context, and of those behind."""

    @property
    def is_running(self) -> bool:
        return self._length < len(self._text)

    @property
    def ids(self) -> np.ndarray:
        return np.array(self._text[: self._length], np.int32)

    def emit(self) -> list[int]:
        """Emit the accepted part of the draft and the next token."""
        rest = self._text[self._length :]
        wrong = (at for at, token in enumerate(self.drafted) if rest[at : at + 1] != [token])
        num_right = next(wrong, len(self.drafted))
        if self.drafted:
            self.accepted[self._length > CONTEXT].append(num_right / len(self.drafted))
        emitted = rest[: num_right + 1]
        self._length += len(emitted)
        return emitted
