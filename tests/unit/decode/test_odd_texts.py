"""Odd texts decode alike: 100 byte strings and a target that emits broken UTF-8, and the package's odd prompts."""

import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from omnidraft import prompts
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.prompt_lookup import PromptLookup
from omnidraft.decode.drafting.token_healing import TokenHealing
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.engine import Engine
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.exactness.check import CheckPlan, ExactnessCheck
from omnidraft.ports import Mode, Request, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget, ToyTokenizer
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from tests.tiny_engine import tiny_worker
from tests.unit.decode.toys import emitted
from tests.unit.vocab.texts import ODD

BYTES = [bytes([byte]) for byte in range(256)]
EMOJI, CJK = "\U0001f600".encode(), "\u4f60\u597d".encode()
TARGET = ToyTokenizer(
    [b"", *BYTES, EMOJI, CJK[:4], CJK[4:], b"\t\t", b"\n\n", b"xxxx", b"the", b"\xf0\x9f"], {"eos": 0}
)
DRAFTER = ToyTokenizer(
    [b"", *BYTES, EMOJI[2:], CJK, b"\n\t", b"\n  ", b"xx", b"th", b" river", b"\xff\xfe"], {"eos": 0}
)
ALIGNMENT = align(DRAFTER, TARGET)
DECODER = Decoder(ToyTarget(ToyTable.random(len(TARGET.vocabulary), seed=1, spread=3.0)), TARGET.vocabulary)


def make_proposer(weight: float) -> TreeProposer:
    ngrams = NgramCache(ALIGNMENT.fingerprint, DRAFTER.vocabulary, TARGET.vocabulary, 1000)
    model = ToyDrafter(ToyTable.random(len(DRAFTER.vocabulary), seed=2, spread=3.0))
    healing = TokenHealing(DRAFTER.vocabulary, TARGET, ALIGNMENT)
    coupling = NoiseCoupling((weight,))
    drafter = Drafter(model, DRAFTER, TARGET.vocabulary, ALIGNMENT, ngrams, coupling, healing=healing)
    return TreeProposer((PromptLookup(), drafter), lambda mode: FixedPolicy())


PROPOSER = make_proposer(1.0)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=ODD)
def test_any_bytes_decode_to_plain_decodings_text(data: bytes) -> None:
    """The target emits any byte at any position, so that characters break off and continue in the middle of trees."""
    prompt = tuple(TARGET.vocabulary.byte_table.longest_match(data))[-32:] or (1,)
    drafter_prompt = tuple(DRAFTER.vocabulary.byte_table.longest_match(data))[-32:]
    seed = zlib.crc32(data)
    sampling = Sampling((0.0, 0.7, 1.0)[seed % 3])
    request = Request(prompt, drafter_prompt, 4, sampling, seed, stop_ids=frozenset({0}), mode="fast")
    drafted = list(DECODER.decode(request, PROPOSER))
    plain = list(DECODER.decode(request, None))
    assert emitted(drafted) == emitted(plain)
    assert "".join(step.text for step in drafted) == "".join(step.text for step in plain)


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    return tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine


@pytest.mark.parametrize("mode", ["reproducible", "fast"])
def test_every_built_in_prompt_decodes_to_plain_decodings_text(engine: Engine, mode: Mode) -> None:
    """Emoji, scripts without spaces, tabs and newlines, a long word, through real tokenizers and templates."""
    texts = [prompt.text for prompt in prompts.built_in()]
    run = ExactnessCheck(engine, CheckPlan(texts, max_new_tokens=6, num_samples=100)).run(1.0, mode)
    assert run["identical"] == len(texts)
    assert run["passed"]
