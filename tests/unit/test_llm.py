"""The Python API gives the texts of the engine, many at once, and needs no other process."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

import omnidraft
from omnidraft import LLM, SamplingParams
from omnidraft.errors import ConfigError, ModelError, RequestError
from tests.tiny_engine import broken_target

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DECODE = {"mode": "reproducible", "policy": "fixed", "num_draft_tokens": 5, "threads": 1}


@pytest.fixture(scope="module")
def llm(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> LLM:
    target, drafter = map(str, tiny_models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        return LLM(target, drafter, quantize="float32", decode=DECODE, models={"drafter_precision": "float32"})


def text_of(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_prompts_are_answered_together_with_the_texts_that_they_have_alone(llm: LLM) -> None:
    prompts = ["How many clips", "Natalia sold", "def main("]
    alone = [text_of(llm, each, GREEDY) for each in prompts]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [each.outputs[0].text for each in together] == alone
    assert [each.prompt for each in together] == prompts
    for each in together:
        assert each.finished
        assert len(each.outputs[0].token_ids) == each.outputs[0].stats.num_tokens <= 12
        assert each.num_prompt_tokens > 0
    plain = SamplingParams(temperature=0, max_tokens=12, num_draft_tokens=0)
    assert [each.outputs[0].text for each in llm.generate(prompts, plain, use_tqdm=False)] == alone


def test_n_texts_share_a_prompt_and_can_be_had_again_by_their_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, n=3, seed=5, logprobs=2)
    (result,) = llm.generate("How many clips did she sell", params, use_tqdm=False)
    assert len({output.text for output in result.outputs}) > 1
    for output, seed in zip(result.outputs, result.seeds, strict=True):
        again = SamplingParams(temperature=1.0, max_tokens=10, seed=seed)
        assert text_of(llm, "How many clips did she sell", again) == output.text
        assert len(output.logprobs) == len(output.token_ids)
        assert all(token in row for token, row in zip(output.token_ids, output.logprobs, strict=True))


def test_arguments_have_vllms_names_and_its_dicts_are_refused(llm: LLM) -> None:
    (said,) = llm.generate(prompts="How many clips", sampling_params=GREEDY, use_tqdm=False)
    assert said.outputs[0].text == text_of(llm, "How many clips", GREEDY)
    messages = [{"role": "user", "content": "How many clips"}]
    assert llm.chat(messages=messages, sampling_params=GREEDY, use_tqdm=False)[0].outputs[0].text
    with pytest.raises(RequestError, match="dicts as vLLM has them"):
        llm.generate({"prompt": "def f"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat({"role": "user", "content": "Hi"})  # type: ignore[arg-type]


def test_a_chat_may_call_tools(llm: LLM) -> None:
    number = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "count", "parameters": number, "strict": True}}
    chosen = {"type": "function", "function": {"name": "count"}}
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=2)
    (result,) = llm.chat("How many?", params, use_tqdm=False, tools=[tool], tool_choice=chosen)
    (call,) = result.outputs[0].tool_calls
    assert (call.name, json.loads(call.arguments)) == ("count", {"n": 7})
    other = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(RequestError, match="no tool 'other'"):
        llm.chat("How many?", params, use_tqdm=False, tools=[tool], tool_choice=other)
    (plain,) = llm.chat("How many?", GREEDY, use_tqdm=False)
    assert plain.outputs[0].tool_calls == []


def test_a_chat_is_streamed_piece_by_piece(llm: LLM) -> None:
    text = "How many clips were sold? " * 4  # long enough that its keys are reused
    question = [{"role": "user", "content": text}]
    (whole,) = llm.chat(question, GREEDY, use_tqdm=False)
    assert "".join(llm.stream(text, GREEDY)) == whole.outputs[0].text
    first_and_then_closed = llm.stream(question, GREEDY)
    next(first_and_then_closed)
    first_and_then_closed.close()
    two = llm.chat([text, question], GREEDY, use_tqdm=False)
    assert [each.outputs[0].text for each in two] == 2 * [whole.outputs[0].text]
    assert two[1].num_cached_tokens > 0


def test_streams_that_are_open_together_have_the_texts_that_they_have_alone(llm: LLM) -> None:
    questions = ["How many?", "Which robe?"]
    alone = ["".join(llm.stream(each, GREEDY)) for each in questions]
    streams = [llm.stream(each, GREEDY) for each in questions]
    pieces = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(each) for each in zip(*pieces, strict=True)] == alone
    assert alone[0] != alone[1]


def test_whole_answers_inside_an_open_stream_lose_nothing_of_either(llm: LLM) -> None:
    alone = "".join(llm.stream("How many?", GREEDY))
    whole = llm.chat("Which robe?", GREEDY, use_tqdm=False)[0].outputs[0].text
    stream = llm.stream("How many?", GREEDY)
    begun = next(stream)
    assert llm.chat("Which robe?", GREEDY, use_tqdm=False)[0].outputs[0].text == whole
    assert begun + "".join(stream) == alone


def test_a_stream_that_is_closed_early_leaves_no_text_behind(llm: LLM) -> None:
    closed, other = llm.stream("How many?", GREEDY), llm.stream("Which robe?", GREEDY)
    next(closed)
    rest = next(other)
    closed.close()
    assert rest + "".join(other) == "".join(llm.stream("Which robe?", GREEDY))
    assert not llm._engine.has_work
    assert not llm._inboxes


def test_a_prompt_that_is_too_long_is_refused_before_any_text_is_begun(llm: LLM) -> None:
    with broken_target(llm._engine, AssertionError("a pass was run"), num_good=0):
        with pytest.raises(RequestError, match="context"):
            llm.generate(["good", "clips " * 2000], GREEDY, use_tqdm=False)
        assert not llm._engine.has_work


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "prompt is empty"),
        ("a", {"max_tokens": 0}, "max_tokens must be an integer between 1 and"),
        ("a", {"max_tokens": 2.5}, "max_tokens must be an integer .* got 2.5"),
        ("a", {"n": 0}, "n must be an integer between 1 and"),
        ("a", {"n": 2.5}, "n must be an integer .* got 2.5"),
        ("a", {"top_k": 2.5}, "top_k must be an integer .* got 2.5"),
        ("a", {"top_k": -2}, "top_k must be an integer .* got -2"),
        ("a", {"mode": "slow"}, "mode must be one of fast, reproducible, got slow"),
        ("a", {"temperature": "hot"}, "temperature must be between 0 and 100, got hot"),
        ("a", {"stop": [7]}, "stop must be text, got 7"),
        ("a", {"logprobs": -2}, "logprobs must be an integer .* got -2"),
        ("a", {"logprobs": 2.5}, "logprobs must be an integer .* got 2.5"),
        ("a", {"num_draft_tokens": 2.5}, "num_draft_tokens must be an integer .* got 2.5"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"regex": "(", "temperature": 0}, "regex"),
        ("a", {"regex": "a", "json_schema": {}}, "either json_schema or regex"),
    ],
)
def test_what_is_not_possible_says_so_and_ends_nothing_else(llm: LLM, prompt: str, fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["good", prompt], SamplingParams(**fields), use_tqdm=False)
    assert text_of(llm, "good", GREEDY)


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"stop": None}, {"logit_bias": None}])
def test_what_changes_nothing_in_vllm_changes_nothing_here(llm: LLM, fields: dict) -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    assert text_of(llm, "How many", replace(drawn, **fields)) == text_of(llm, "How many", drawn)


def test_minus_one_reports_the_log_probabilities_of_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1)
    rows = llm.generate("How many", params, use_tqdm=False)[0].outputs[0].logprobs
    assert {len(row) for row in rows} == {llm._engine.decoder.target.vocab_size}
    assert [sum(map(math.exp, row.values())) for row in rows] == pytest.approx([1.0] * len(rows), abs=1e-3)


def test_a_text_goes_on_until_its_context_is_full(llm: LLM) -> None:
    never_stop = dict.fromkeys(llm._engine.pair.target_tokenizer.stop_ids, -100.0)
    params = SamplingParams(temperature=1.0, seed=1, logit_bias=never_stop)
    (result,) = llm.generate("clips " * 600, params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) > 256
    assert result.outputs[0].finish_reason == "length"
    assert result.num_prompt_tokens + len(result.outputs[0].token_ids) == llm._engine.decoder.target.context_limit


def test_a_schema_holds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, regex="[ab]{3}")
    assert set(text_of(llm, "Say", params)) <= {"a", "b"}


def test_settings_and_models_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="decode"):
        LLM(decode={"no_such": 1})
    with pytest.raises(ModelError, match="no-such"):
        LLM("no-such/model-anywhere")


def test_the_package_is_imported_without_models_brokers_or_registries() -> None:
    code = (
        "import sys, omnidraft; print('torch' in sys.modules); from omnidraft import llm; "
        "print(*{'ray', 'mlflow', 'kafka'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = omnidraft.nothing
