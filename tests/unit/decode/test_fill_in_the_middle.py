"""Filling in a middle: what target and drafter read, that the text is that of plain decoding, where it ends."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_target
from tests.tiny_engine import tiny_worker

PREFIX, SUFFIX = "How many clips did", " sell altogether in April and May?"
PARTS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
ENDS = [*PARTS, "<|file_sep|>", "<|repo_name|>"]


@pytest.fixture(scope="module")
def code_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose tokenizer marks gaps."""
    folder = make_target(tmp_path_factory.mktemp("code") / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *ENDS]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(code_target: Path, tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    return tiny_worker((code_target, tiny_models[1]), omnidraft_home, CountingMetrics()).engine


def gap(**fields: object) -> GenerationRequest:
    values = {"prompt": PREFIX, "suffix": SUFFIX, "max_new_tokens": 12, "sampling": Sampling(1.0), "seed": 5} | fields
    return GenerationRequest(**values)  # type: ignore[arg-type]


def special(engine: Engine, text: str) -> int:
    return engine.pair.target_tokenizer.special_ids[text]


def test_the_target_reads_both_sides_of_the_gap_and_the_drafter_what_is_before_it(engine: Engine) -> None:
    request = engine.decode_request(gap())
    prefix, suffix, middle = (special(engine, part) for part in PARTS)
    target, drafter = engine.pair.target_tokenizer, engine.pair.drafter_tokenizer
    assert drafter is not None
    assert list(request.prompt_ids) == [prefix, *target.encode(PREFIX), suffix, *target.encode(SUFFIX), middle]
    assert list(request.drafter_prompt_ids) == drafter.prompt_ids(PREFIX)


def test_a_drafter_that_marks_gaps_reads_both_sides_too(code_target: Path, omnidraft_home: Path) -> None:
    engine = tiny_worker((code_target, code_target), omnidraft_home, CountingMetrics()).engine
    request = engine.decode_request(gap())
    assert request.drafter_prompt_ids == request.prompt_ids


@pytest.mark.parametrize("prefix", [PREFIX, ""])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_middle_is_that_of_plain_decoding(engine: Engine, temperature: float, prefix: str) -> None:
    drafted, plain = (
        [step.text for step in engine.stream(gap(prompt=prefix, sampling=Sampling(temperature), **more)).steps]
        for more in ({}, {"num_draft_tokens": 0})
    )
    assert "".join(drafted) == "".join(plain)
    assert "".join(plain)


def test_another_suffix_is_another_text(engine: Engine) -> None:
    texts = {
        "".join(step.text for step in engine.stream(gap(**more)).steps)
        for more in ({}, {"suffix": " 48 of her friends"}, {"suffix": None})
    }
    assert len(texts) == 3


@pytest.mark.parametrize("end", ENDS)
def test_a_middle_ends_where_something_else_begins(engine: Engine, end: str) -> None:
    sampling = Sampling(0.0, logit_bias={special(engine, end): 100.0})
    (*_, last) = engine.stream(gap(sampling=sampling)).steps
    assert last.finish_reason == FinishReason.STOP
    (*_, goes_on) = engine.stream(gap(sampling=sampling, suffix=None)).steps
    assert goes_on.finish_reason == FinishReason.LENGTH


def test_markers_in_a_clients_texts_are_text(engine: Engine) -> None:
    ids = engine.decode_request(gap(prompt="".join(PARTS), suffix="".join(ENDS))).prompt_ids
    assert [token for token in ids if token in engine.pair.target_tokenizer.vocabulary.special_ids] == [
        special(engine, part) for part in PARTS
    ]


def test_what_cannot_be_filled_in_is_refused(
    engine: Engine, tiny_models: tuple[Path, Path], omnidraft_home: Path
) -> None:
    with pytest.raises(RequestError, match="suffix: it is for a plain prompt"):
        engine.decode_request(gap(prompt=None, messages=[{"role": "user", "content": "x"}]))
    with pytest.raises(RequestError, match="suffix: character 0 is half of a surrogate pair"):
        engine.decode_request(gap(suffix="\ud800"))
    other = tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine
    with pytest.raises(RequestError, match="suffix: the model has no special tokens for filling in a middle"):
        other.decode_request(gap())
