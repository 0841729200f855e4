"""What one tenant said is drafted for no other, whatever the other asks for, and no metric tells it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from omnidraft.config import MemorySettings
from omnidraft.decode.drafting.suffix_source import FleetMemory, SuffixSource, scope_of
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
from omnidraft.decode.step_telemetry import StepCounter
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.memory.memory_file import Owner, Owners
from omnidraft.memory.recent_texts import MemoryText, RecentTexts
from omnidraft.ports import (
    DraftRequest,
    DraftTree,
    Metrics,
    ProposerSession,
    Request,
    Sampling,
    Step,
    Timings,
    TreeLimits,
)
from omnidraft.telemetry.metrics import CountingMetrics, PrometheusMetrics
from tests.unit.decode.toys import NOISE, TARGET_PIECES, TARGET_TOKENIZER, make_drafter, make_request

pytestmark = pytest.mark.long

TENANTS = [f"tenant-{number}" for number in range(10)]
NUM_REQUESTS, TEXTS_A_ROUND = 10_000, 8
WHOLE = [token for token, piece in enumerate(TARGET_PIECES) if piece and piece.isascii()]
"""The ids that spell whole characters."""
NUM_SECRET, NUM_SHOWN = 12, 6
"""Ids of a secret, and how many of them anybody may guess right as the end of a prompt."""
NUM_LEAKED = 5
"""So many of the next ids in a row are a leak: a drafter of 18 ids comes upon them once in a million paths."""


def secrets_of(draws: Random) -> dict[str, list[int]]:
    return {tenant: [draws.choice(WHOLE) for _ in range(NUM_SECRET)] for tenant in TENANTS}


def fleet_memory(secrets: dict[str, list[int]], folder: Path) -> FleetMemory:
    """The memory of the first half of the tenants, through the files of a snapshot."""
    memory = TextMemory(MemorySettings(), vocabulary_size=len(TARGET_PIECES))
    texts = {
        Owner("tenant", tenant): [MemoryText(tenant, number, 0, 1, 0, np.array(secrets[tenant], np.uint32))]
        for number, tenant in enumerate(TENANTS[: len(TENANTS) // 2])
    }
    memory.restore(texts)
    for owner in texts:
        memory.mark_changed(owner)
    MemoryFiles(memory, folder / "memory", CountingMetrics()).stage()
    return MemoryLoader(Owners({}), CountingMetrics(), target="t").load(None, folder)


def paths(tree: DraftTree) -> Iterator[tuple[int, ...]]:
    """The ids behind the root along each path of NUM_LEAKED nodes."""
    for node in range(1, len(tree)):
        path = [node]
        while tree.parents[path[-1]]:
            path.append(tree.parents[path[-1]])
        if len(path) == NUM_LEAKED:
            yield tuple(tree.tokens[each] for each in reversed(path))


def asking(draws: Random, tenant: str, secret: Sequence[int]) -> tuple[Request, list[int]]:
    """A request whose prompt ends in the beginning of a secret, and the rest of it."""
    num_shown = draws.randrange(3, NUM_SHOWN + 1)
    prompt = (*(draws.choice(WHOLE) for _ in range(3)), *secret[:num_shown])
    request = replace(make_request(Sampling(0.0), num_draft_tokens=8), prompt_ids=prompt, tenant=tenant)
    return request, secret[num_shown:]


def end(session: ProposerSession, request: Request, step: Step, recent: RecentTexts, metrics: Metrics) -> None:
    """End a text with this step, as the engine does."""
    for observer in (TextMemorizer(recent, request), StepCounter(metrics, "t", "1", lambda: None)):
        observer.take(step)
        observer.end(None)
    session.observe(step.emitted)
    session.close()


def test_a_planted_secret_of_one_tenant_is_drafted_for_no_other_in_10000_requests(tmp_path: Path) -> None:
    """Every tenant is told its secret again and again, and asks for the rest of its own and of all others', in common
    rounds, of all memories and in every other round of a drafter too. Its own is drafted, so a leak would show."""
    draws = Random(11)
    secrets, recent, metrics = secrets_of(draws), RecentTexts(50_000), PrometheusMetrics()
    memories, drafter = SuffixSource(len(TARGET_PIECES), recent, fleet_memory(secrets, tmp_path)), make_drafter()
    proposers = [TreeProposer((memories, *others), drafter.policy_for) for others in ((), drafter.sources)]
    num_own = num_own_drafted = 0
    for number in range(NUM_REQUESTS // TEXTS_A_ROUND):
        proposer = proposers[number % 2]
        asked = [(draws.choice(TENANTS), draws.choice(TENANTS)) for _ in range(TEXTS_A_ROUND)]
        requests = [asking(draws, tenant, secrets[owner]) for tenant, owner in asked]
        sessions = [proposer.open(request) for request, _ in requests]
        trees = proposer.propose_all([DraftRequest(each, 9, TreeLimits(10), NOISE) for each in sessions])
        for (tenant, owner), (request, rest), session, tree in zip(asked, requests, sessions, trees, strict=True):
            is_drafted = tuple(rest[:NUM_LEAKED]) in paths(tree)
            assert tenant == owner or not is_drafted
            num_own += tenant == owner
            num_own_drafted += tenant == owner and is_drafted
            said = rest if tenant == owner else [draws.choice(WHOLE) for _ in range(3)]
            end(session, request, Step(tree, tuple(said), (), "", None, Timings(), None), recent, metrics)
            recent.add(scope_of(request), secrets[tenant])
    assert num_own > 500
    assert num_own_drafted > 0.9 * num_own
    exposed = metrics.render().decode()
    for tenant, secret in secrets.items():
        assert tenant not in exposed
        assert TARGET_TOKENIZER.vocabulary.spell(secret).decode() not in exposed
