"""An engine over the tiny models, and proposers that do what a test needs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.decode.engine import Engine
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.ports import DraftTree, Noise, Proposer, ProposerSession, Request, Source, Step, TreeLimits
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.telemetry.metrics import CountingMetrics

PATIENCE_S = 20.0


def wait_until(is_true: Callable[[], object]) -> None:
    """Return once it is; fail when that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def steps_of(queued: QueuedRequest) -> Iterator[tuple[int, Step]]:
    """Each with the number of its text, to the end; raises what decoding raised."""
    while True:
        for step in queued.ready_steps():
            if step is None:
                return
            yield step
        time.sleep(0.002)


def tiny_settings(
    models: tuple[Path, Path], *, more_targets: Sequence[Path] = (), **sections: dict[str, Any]
) -> config.Settings:
    """All models in float32 and one width, so that a text depends on its seed alone; always drafts, right or wrong."""
    target, drafter = map(str, models)
    names: dict[str, Any] = {"target": target, "drafter": drafter, "more_targets": [str(each) for each in more_targets]}
    names |= {"precision": "float32", "drafter_precision": "float32"}
    decode = {"mode": "reproducible", "policy": "fixed", "num_draft_tokens": 5, "threads": 1}
    return config.load(None, {}, models=names, decode=decode, **sections)


def tiny_worker(
    models: tuple[Path, Path], home: Path, metrics: CountingMetrics, *, max_num_seqs: int = 16
) -> assembly.Worker:
    """Engine alone, with the base drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(home))
        return assembly.engine(tiny_settings(models, scheduler={"max_num_seqs": max_num_seqs}), metrics)


def snapshot(version: int, proposer: Proposer) -> LoadedSnapshot:
    """A snapshot that drafts with this proposer."""
    return LoadedSnapshot(version, f"snapshot-{version}", proposer, None, None)


@dataclass
class Foretold(Proposer):
    """Drafts a known answer, three tokens at a time, as long as the target follows it."""

    answer: Sequence[int]

    def open(self, request: Request) -> "_Foretelling":
        return _Foretelling(request.prompt_ids[-1], list(self.answer))


@dataclass
class _Foretelling(ProposerSession):
    root: int
    left: list[int]

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        ids = self.left[: min(limits.num_nodes, 3)]
        return DraftTree.chain(self.root, ids, [Source.LOOKUP] * len(ids), [0.0] * len(ids))

    def observe(self, emitted: Sequence[int]) -> None:
        self.root, self.left = emitted[-1], self.left[len(emitted) :]


@dataclass
class Gated(Proposer):
    """Drafts nothing, and holds every pass up until the gate opens."""

    gate: Event = field(default_factory=Event)
    is_reached: Event = field(default_factory=Event)

    def open(self, request: Request) -> "_Waiting":
        return _Waiting(self, request.prompt_ids[-1])


@dataclass
class _Waiting(ProposerSession):
    gated: Gated
    root: int

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        self.gated.is_reached.set()
        self.gated.gate.wait(PATIENCE_S)
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


@dataclass
class Slow(Proposer):
    """Drafts nothing, and takes its time."""

    pass_s: float

    def open(self, request: Request) -> "_Slowly":
        return _Slowly(self.pass_s, request.prompt_ids[-1])


@dataclass
class _Slowly(ProposerSession):
    pass_s: float
    root: int

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        time.sleep(self.pass_s)
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


@dataclass
class Failing(Proposer):
    """Drafts nothing for some passes, then raises."""

    error: Exception
    num_good: int = 0

    def open(self, request: Request) -> "_Breaking":
        return _Breaking(self.error, self.num_good, request.prompt_ids[-1])


@dataclass
class _Breaking(ProposerSession):
    error: Exception
    num_left: int
    root: int

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        if not self.num_left:
            raise self.error
        self.num_left -= 1
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


@contextmanager
def broken_target(engine: Engine, error: Exception, num_good: int) -> Iterator[None]:
    """Inside, every text's target raises after so many passes."""
    whole = engine.decoder
    engine.decoder = whole.with_target(_BrokenTarget(whole.target, error, num_good))  # type: ignore[arg-type]
    try:
        yield
    finally:
        engine.decoder = whole


@dataclass
class _BrokenTarget:
    whole: Any
    error: Exception
    num_good: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def open(self, *args: Any) -> "_BrokenSession":
        return _BrokenSession(self.whole.open(*args), self.error, self.num_good)

    def forward(self, trees: Any, prompts: Any = ()) -> Any:
        for session, num_ids in prompts:
            session.read(num_ids)
        return [session.score(tree) for session, tree in trees]


@dataclass
class _BrokenSession:
    whole: Any
    error: Exception
    num_left: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def score(self, tree: DraftTree) -> Any:
        if not self.num_left:
            raise self.error
        self.num_left -= 1
        return self.whole.score(tree)


@contextmanager
def slow_prompts(engine: Engine, pass_s: float) -> Iterator[list[int]]:
    """Inside, every pass over prompts takes so long; yields the ids that each has read."""
    whole = engine.decoder
    slow = _SlowPrompts(whole.target, pass_s)
    engine.decoder = whole.with_target(slow, max_num_seqs=16)  # type: ignore[arg-type]
    try:
        yield slow.num_read
    finally:
        engine.decoder = whole


@dataclass
class _SlowPrompts:
    whole: Any
    pass_s: float
    num_read: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def forward(self, trees: Any, prompts: Any = ()) -> Any:
        if prompts:
            self.num_read.append(sum(num_ids for _, num_ids in prompts))
            time.sleep(self.pass_s)
        return self.whole.forward(trees, prompts)
