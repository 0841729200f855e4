"""A toy pair of vocabularies that spell JSON in different tokens, its proposers, and the nodes that were drafted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.prompt_lookup import PromptLookup
from omnidraft.decode.drafting.suffix_source import SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.ports import (
    NO_OTHERS,
    DraftRequest,
    DraftTree,
    Grammar,
    OtherTexts,
    Policy,
    Proposer,
    ProposerSession,
    Request,
    Sampling,
    Step,
)
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget, ToyTokenizer
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from tests.unit.decode.toys import Strict, emitted
from tests.warm_cache import warmed

ASCII = [bytes([byte]) for byte in range(32, 127)]
TARGET_PIECES = [b"", b"", *ASCII, b'{"', b'":', b'": "', b'", "', b"head", b"line", b"tr", b"ab", b"12", b"\n"]
DRAFT_PIECES = [
    *(b"", b"", b"", *ASCII),
    *(b'{"h', b"headl", b"head", b"in", b"true", b'":', b"ab", b"23", b"\xf0\x9f", b"\n"),
]
EOS, DRAFT_EOS = 1, 2
STOPS = frozenset({EOS})
TARGET = ToyTokenizer(TARGET_PIECES, {"unk": 0, "eos": EOS})
DRAFTER = ToyTokenizer(DRAFT_PIECES, {"unk": 0, "user": 1, "eos": DRAFT_EOS})
T = {piece: token for token, piece in enumerate(TARGET_PIECES) if piece}
GRAMMARS = Grammars(TARGET.vocabulary)
TABLE = ToyTable.random(len(TARGET_PIECES), seed=11, order=1, num_states=256)
PROMPT = b'ab "headline": '
SCHEMA = {
    "type": "object",
    "properties": {
        "headline": {"type": "boolean"},
        "ab": {"enum": ["head", "tree"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["headline", "ab", "n"],
    "additionalProperties": False,
}
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


class UnawareProposer(Proposer):
    """A proposer that is told the temperature of a request and none of its other settings."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def open(self, request: Request) -> ProposerSession:
        return self._proposer.open(replace(request, sampling=Sampling(request.sampling.temperature)))

    def propose_all(self, requests: Sequence[DraftRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
        return self._proposer.propose_all(requests, others)


class Bushy(FixedPolicy):
    """Four candidates after each node."""

    num_candidates = 4


def request(sampling: Sampling, **fields: object) -> Request:
    defaults = {"max_new_tokens": 60, "num_draft_tokens": 6, "mode": "fast", "stop_ids": STOPS}
    ids = tuple(TARGET.encode(PROMPT.decode()))
    return Request(ids, (1, *DRAFTER.encode(PROMPT.decode())), sampling=sampling, **(defaults | fields))  # type: ignore[arg-type]


def drafting(
    drafter: ToyTokenizer = DRAFTER,
    table: ToyTable | None = None,
    *,
    policy: Policy | None = None,
    noise_weight: float = 1.0,
    has_lookup: bool = False,
    context_limit: int = 4096,
) -> TreeProposer:
    """The real proposer over a toy drafter with another vocabulary; its weights are random by default."""
    alignment = align(drafter, TARGET)
    cache = warmed(NgramCache(alignment.fingerprint, drafter.vocabulary, TARGET.vocabulary, 64), alignment)
    model = ToyDrafter(table or ToyTable.random(len(drafter.vocabulary), seed=3), context_limit=context_limit)
    source = Drafter(model, drafter, TARGET.vocabulary, alignment, cache, NoiseCoupling((noise_weight,)))
    chosen = policy or FixedPolicy()
    copies = (PromptLookup(), SuffixSource(len(TARGET_PIECES))) if has_lookup else ()
    return TreeProposer((*copies, source), lambda mode: chosen)


def perfect(*, noise_weight: float = 1.0) -> TreeProposer:
    """A drafter that is the target itself."""
    return drafting(TARGET, TABLE, noise_weight=noise_weight)


def decoded(decode_request: Request, proposer: Proposer | None, table: ToyTable = TABLE) -> list[Step]:
    return list(Decoder(ToyTarget(table), TARGET.vocabulary, failures=Strict()).decode(decode_request, proposer))


def tokens_per_pass(sampling: Sampling, proposer: Proposer, table: ToyTable = TABLE, num_texts: int = 4) -> float:
    """Over texts of several seeds, which are the target's own."""
    num_tokens = num_passes = 0
    for seed in range(num_texts):
        decode_request = request(sampling, seed=seed, num_draft_tokens=5)
        steps = decoded(decode_request, proposer, table)
        assert emitted(steps) == emitted(decoded(decode_request, None, table))
        num_tokens += len(emitted(steps))
        num_passes += len(steps)
    return num_tokens / num_passes


@dataclass(frozen=True)
class Drafted:
    """One drafted node: the answer and the path before it, and what it is."""

    before: tuple[int, ...]
    token: int
    source: str | None


def drafted_nodes(steps: Sequence[Step]) -> Iterator[Drafted]:
    answer: list[int] = []
    for step in steps:
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(step.tree)):
            before = paths[step.tree.parents[node]]
            yield Drafted((*answer, *before), step.tree.tokens[node], step.tree.sources[node])
            paths.append((*before, step.tree.tokens[node]))
        answer += step.emitted


def allowed_after(grammar: Grammar, ids: Sequence[int]) -> set[int]:
    """Ids that the target can draw after these, by its own matcher."""
    matcher = GRAMMARS.matcher(grammar, STOPS)
    for token in ids:
        matcher.take(token)
    logits = np.zeros(len(TARGET_PIECES))
    matcher.apply(logits)
    return set(np.flatnonzero(logits > -np.inf).tolist())
