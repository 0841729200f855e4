"""Evaluations score choices by log-probabilities, and rollouts take ids: the figures are those of transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft.models.catalog import store
from tests.clients import environments
from tests.clients.worker import SCRIPTS, SDKS, Server, run, serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

TARGET = "qwen2.5-coder-0.5b"
LM_EVAL = ("lm_eval[api]==0.4.13", "transformers")
ROUNDING = 2e-3
"""Sums of float32 in another order, over the tokens of a choice: transformers in other pass sizes differs as much."""
ITEMS: Sequence[tuple[str, Sequence[str], int]] = (
    ("The capital of France is", ("Paris", "Lyon", "Marseille", "Nice"), 0),
    ("Water freezes at zero degrees", ("Kelvin", "Celsius", "Rankine", "of latitude"), 1),
    ("In Python, a list is made longer by one element with the method", ("push", "add", "append", "insert_last"), 2),
    ("Two plus two is", ("three", "five", "nine", "four"), 3),
    ("I hope this helps! Let me know if you have any other", ("questions.", "oranges.", "cats.", "ice."), 0),
    ("A triangle has", ("four sides", "three sides", "no sides", "ten sides"), 1),
    ("The chemical symbol of gold, größer als Silber, is", ("Ag", "Fe", "Au", "Gd"), 2),
    ("The planet closest to the sun is", ("Earth", "Mars", "Neptune", "Mercury"), 3),
)
"""Behind one of the choices the text ends, so that the token that lm-eval draws behind each is a stop token there."""
TASK = """
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/facts.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A worker in float32, whose log-probabilities can be compared."""
    with serving(tmp_path_factory.mktemp("server"), TARGET, MODELS__PRECISION="float32") as started:
        yield started


class Reference:
    """The same weights in transformers."""

    def __init__(self) -> None:
        folder = store.resolve(TARGET)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def log_probs(self, prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[float], bool]:
        """Of ids behind a prompt, and whether greedy decoding writes them."""
        with torch.no_grad():
            log_p_TV = self._model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = torch.tensor(ids)
        return log_p_TV.gather(1, chosen[:, None])[:, 0].tolist(), bool((log_p_TV.argmax(-1) == chosen).all())

    def choice(self, question: str, choice: str) -> tuple[float, bool]:
        """The log-likelihood of a choice, and whether greedy decoding writes it."""
        num_prompt = len(self.tokenizer(question).input_ids)
        ids = self.tokenizer(f"{question} {choice}").input_ids
        log_probs, is_greedy = self.log_probs(ids[:num_prompt], ids[num_prompt:])
        return sum(log_probs), is_greedy


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.mark.parametrize("requests", ["tokenized_requests=True", "tokenized_requests=False"])
def test_lm_eval_scores_choices_as_transformers_does(
    exact_server: Server, reference: Reference, tmp_path: Path, requests: str
) -> None:
    samples, accuracy = evaluated(exact_server, tmp_path, requests)
    figures = [[reference.choice(question, choice) for choice in choices] for question, choices, _ in ITEMS]
    for sample, expected in zip(samples, figures, strict=True):
        found = [(float(log_p), is_greedy == "True") for ((log_p, is_greedy),) in sample["resps"]]
        assert [log_p for log_p, _ in found] == pytest.approx([log_p for log_p, _ in expected], abs=ROUNDING)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    best = [max(range(len(each)), key=lambda choice: each[choice][0]) for each in figures]
    right = [choice == gold for choice, (_, _, gold) in zip(best, ITEMS, strict=True)]
    assert accuracy == sum(right) / len(ITEMS)
    assert accuracy > 0


def test_a_rollout_gets_the_ids_that_were_drawn_and_their_log_probabilities(
    exact_server: Server, reference: Reference, tmp_path: Path
) -> None:
    tokenizer = reference.tokenizer
    *rollouts, stop = json.loads(run([environments.python(SDKS), SCRIPTS / "rollouts.py"], exact_server, tmp_path))
    *drawn, stopped = rollouts
    streamed, whole = ([each["prompt"], each["ids"], each["text"]] for each in drawn[:2])
    assert streamed == whole
    assert drawn[1]["ids"] != drawn[2]["ids"]  # two choices
    assert "été 🌈" in tokenizer.decode(drawn[0]["prompt"])
    for each in drawn:
        assert tokenizer.decode(each["ids"], skip_special_tokens=True) == each["text"]
    assert tokenizer.decode(stopped["ids"]).startswith(stopped["text"] + stop)
    for each in rollouts:
        log_probs, _ = reference.log_probs(each["prompt"], each["ids"])
        assert each["log_probs"] == pytest.approx(log_probs, abs=ROUNDING)


def evaluated(server: Server, folder: Path, requests: str) -> tuple[Sequence[Mapping[str, Any]], float]:
    """The samples of the items in order, and the accuracy."""
    rows = [{"question": question, "choices": choices, "gold": gold} for question, choices, gold in ITEMS]
    (folder / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "facts.yaml").write_text(TASK.format(folder=folder))
    arguments = f"model={TARGET},base_url={server.url}/v1/completions,tokenizer={store.resolve(TARGET)},{requests}"
    lm_eval = environments.python(LM_EVAL).with_name("lm_eval")
    run(
        [
            lm_eval, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "facts",
            "--include_path", folder, "--output_path", folder / "out", "--log_samples", "--batch_size", "4",
        ],
        server, folder,
    )  # fmt: skip
    (samples,) = (folder / "out").rglob("samples_facts_*.jsonl")
    (results,) = (folder / "out").rglob("results_*.json")
    documents = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda each: each["doc_id"])
    return documents, json.loads(results.read_text())["results"]["facts"]["acc,none"]
