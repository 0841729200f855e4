"""The reference drafter as it serves: rounding must not cost agreement."""

import json

import pytest

from omnidraft.demo.recorded import QUESTIONS
from omnidraft.models.catalog.store import resolve
from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.models.native.drafter import NativeDrafter
from tests.unit.models.tiny import whole_pass

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LENGTH = 300


@pytest.mark.parametrize(("precision", "at_least"), [("float32", 0.998), ("bfloat16", 0.98), ("int8", 0.97)])
def test_the_likeliest_token_stays_that_of_exact_weights(precision, at_least):
    folder = resolve("smollm2-135m")
    model = load_model(folder).float()
    tokenizer = HfTokenizer(folder, model.config.vocab_size)
    drafter = NativeDrafter(model, precision)
    same = total = 0
    ids_of_questions = tokenizer.encode("\n".join(_questions()))
    for first in range(0, 3 * LENGTH, LENGTH):
        ids = ids_of_questions[first : first + LENGTH]
        session = drafter.open()
        session.prefill_or_extend(0, ids[:1])
        rows = session.branch(ids[1:], range(-1, len(ids) - 2))
        same += int((rows.argmax(1) == whole_pass(model, ids)[1:].argmax(1).numpy()).sum())
        total += len(rows)
    print(f"{precision}: the same likeliest token in {same / total:.3f} of {total} places")
    assert same / total >= at_least


def _questions() -> list[str]:
    return [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
