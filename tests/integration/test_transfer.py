"""`omnidraft transfer` on tiny models: folders that transformers loads, runs that survive a kill, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft.testing.tiny_models import TEXT, make_drafter
from omnidraft.transfer.models import HYPERNETWORK_FILE, hypernetworks, load_pair
from omnidraft.transfer.settings import TrainingSettings
from omnidraft.transfer.transfer import TransferRequest
from omnidraft.transfer.transfer import transfer as run_transfer
from tests.cli_runs import run_cli
from tests.tiny_gguf import write_gguf_beside
from tests.tiny_pair import Pair, assert_same, make_pair

Run = Callable[..., Any]
SETTINGS = TrainingSettings(
    num_steps=4, texts_per_step=2, learning_rate=1e-2, warmup_steps=1, losses=(("alm", 1.0), ("nll", 0.1))
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": TEXT[0]}) for text in TEXT * 2))
    return path


@pytest.fixture
def transfer(
    omnidraft_home: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run `omnidraft transfer MODEL --tokenizer ... --out ...` in a few steps."""

    def run(model: object, tokenizer: object, out: object, *options: object, texts: Path = data) -> Any:
        few = ("--num-steps", 4, "--held-out-every", 4)
        arguments = ("transfer", model, "--tokenizer", tokenizer, "--out", out, "--data", texts, *few, *options)
        return run_cli(arguments, monkeypatch, capsys, {"OMNIDRAFT_HOME": str(omnidraft_home)})

    return run


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def embeddings(folder: Path) -> torch.Tensor:
    weight: torch.Tensor = load(folder).get_input_embeddings().weight.detach()
    return weight


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def assert_refused(done: Any, words: str) -> None:
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("omnidraft: ")
    assert words in last


@pytest.mark.parametrize("options", [(), ("--init", "omp", "--train", "lora"), ("--init", "mean")])
def test_a_transferred_model_loads_with_its_new_tokenizer(
    transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    done = transfer(tiny_models[1], tiny_models[0], out, *options)
    assert done.returncode == 0, done.stderr
    tokenizer, model = AutoTokenizer.from_pretrained(out), load(out)
    given = AutoTokenizer.from_pretrained(tiny_models[0])
    assert tokenizer(TEXT[3])["input_ids"] == given(TEXT[3])["input_ids"]
    assert tokenizer.chat_template == given.chat_template
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert logits_of(model, given(TEXT[3])["input_ids"]).shape[-1] == load(tiny_models[0]).config.vocab_size
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    report = json.loads((out / "transfer.json").read_text())
    assert [point["step"] for point in report["curve"]] == [0, 4]
    assert set(report["bits_per_byte"]) == {"original", report["run"]["init"], "trained"}
    assert (out / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out.parts").exists()
    assert "bits per byte" in done.stdout


@pytest.mark.long
def test_a_tokenizer_needs_no_model_and_untied_matrices_stay_untied(transfer: Run, data: Path, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", tied=False)
    out = tmp_path / "out"
    done = transfer(pair.folder, tmp_path / "pair" / "target", out, "--num-steps", 0)
    assert done.returncode == 0, done.stderr
    before, after = load(pair.folder), load(out)
    for matrix in ("get_input_embeddings", "get_output_embeddings"):
        old_DH, new_TH = (getattr(model, matrix)().weight for model in (before, after))
        pieces = [pair.alignment.draft_pieces(token) for token in range(len(new_TH))]
        shared = [(token, each[0]) for token, each in enumerate(pieces) if len(each) == 1]
        assert all(torch.equal(new_TH[new], old_DH[old]) for new, old in shared)
    assert_refused(transfer(pair.folder, tmp_path / "pair" / "target", tmp_path / "omp", "--init", "omp"), "omp needs")


@pytest.mark.long
def test_a_model_reads_bytes(transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = transfer(tiny_models[1], "bytes", out)
    assert done.returncode == 0, done.stderr
    tokenizer, given = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(tiny_models[1])
    assert len(tokenizer(TEXT[3])["input_ids"]) == len(TEXT[3].encode())
    assert tokenizer.decode(tokenizer(TEXT[3])["input_ids"]) == TEXT[3]
    assert (tokenizer.eos_token, tokenizer.chat_template) == (given.eos_token, given.chat_template)
    assert load(out).config.vocab_size == 256 + 3


@pytest.mark.long
def test_a_transfer_begins_with_the_hypernetwork_of_another(
    transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = tiny_models
    first, third = tmp_path / "first", tmp_path / "third"
    assert transfer(drafter, target, first, "--learning-rate", 1e-2).returncode == 0
    assert transfer(drafter, target, tmp_path / "fvt", "--num-steps", 0).returncode == 0
    learned_TH, fvt_TH = embeddings(first), embeddings(tmp_path / "fvt")
    spelled_TH = fvt_TH + hypernetworks(load(drafter), load_pair(str(drafter), str(target)), first)[0].added()
    away_T = (learned_TH - spelled_TH).norm(dim=1) / (learned_TH - fvt_TH).norm(dim=1)
    assert (away_T < 0.05).float().mean() > 0.5  # the format rounds; the others occurred, and learned alone too
    done = transfer(drafter, "bytes", third, "--init", first)
    assert done.returncode == 0, done.stderr
    report = json.loads((third / "transfer.json").read_text())
    assert set(report["bits_per_byte"]) == {"original", "hypernetwork", "trained"}
    assert_refused(transfer(drafter, target, tmp_path / "none", "--init", target), "no hypernetwork")
    assert_refused(transfer(target, "bytes", tmp_path / "none", "--init", first), "no hypernetwork of this model")


@pytest.mark.long
@pytest.mark.parametrize(("number", "tokenizer"), [(1, None), (0, "bytes")])
def test_a_transfer_goes_on_from_one_to_the_same_tokenizer(
    transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path, number: int, tokenizer: str | None
) -> None:
    """Also where transformers writes the same tokenizer in other words, as it does beside models of another type."""
    model, tokenizer_of = tiny_models[number], tokenizer or tiny_models[0]
    first, again = tmp_path / "first", tmp_path / "again"
    assert transfer(model, tokenizer_of, first, "--learning-rate", 1e-2).returncode == 0
    done = transfer(model, tokenizer_of, again, "--init", first, "--num-steps", 0)
    assert done.returncode == 0, done.stderr
    assert_same(load(again).state_dict(), load(first).state_dict())
    assert_same(load_file(again / HYPERNETWORK_FILE), load_file(first / HYPERNETWORK_FILE))
    before, after = (json.loads((each / "transfer.json").read_text())["bits_per_byte"] for each in (first, again))
    assert set(after) == {"original", "continued", "trained"}
    assert after["continued"] == after["trained"] == before["trained"]


def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_weights(
    pair: Pair, data: Path, tmp_path: Path, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))

    def request(out: str) -> TransferRequest:
        names = str(pair.folder), str(pair.folder.parent / "target")
        return TransferRequest(*names, (data,), tmp_path / out, SETTINGS, held_out_every=4, measure_every=2)

    def killed(point: Any) -> None:
        if point.step == 4:
            raise KeyboardInterrupt

    whole = run_transfer(request("whole"), lambda point: None)
    with pytest.raises(KeyboardInterrupt):
        run_transfer(request("out"), killed)
    assert not (tmp_path / "out").exists()
    steps: list[int] = []
    resumed = run_transfer(request("out"), lambda point: steps.append(point.step))
    assert steps == [4]
    assert resumed["bits_per_byte"] == whole["bits_per_byte"]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]


@pytest.mark.long
def test_a_gguf_file_has_the_weights_of_the_folder_and_the_tokenizers_tokens(
    transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter")
    write_gguf_beside(drafter)
    target = gguf.GGUFReader(write_gguf_beside(tiny_models[0]))
    out = tmp_path / "out"
    done = transfer(drafter, tiny_models[0], out, "--gguf")
    assert done.returncode == 0, done.stderr
    tokens = "tokenizer.ggml.tokens"
    assert gguf.GGUFReader(out / "out.gguf").fields[tokens].contents() == target.fields[tokens].contents()
    ids = AutoTokenizer.from_pretrained(out)(TEXT[0])["input_ids"]
    assert torch.equal(logits_of(load(out, gguf_file="out.gguf"), ids), logits_of(load(out), ids))


def test_what_cannot_be_transferred_is_refused_in_one_line(
    transfer: Run, tiny_models: tuple[Path, Path], tmp_path: Path, data: Path
) -> None:
    target, drafter = tiny_models
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    assert_refused(transfer(drafter, target, tmp_path), "is not empty")
    assert_refused(transfer(drafter, empty, out), "no model")
    assert_refused(transfer(empty, target, out), "no model")
    assert_refused(transfer(drafter, "no-such-model", out), "no-such-model")
    assert "fvd is none of fvt, omp, mean" in transfer(drafter, target, out, "--init", "fvd").stderr
    assert_refused(transfer(drafter, target, out, "--held-out-every", 100), "too few")
    assert_refused(transfer(drafter, target, out, "--max-tokens", 5000), "reads 1024 tokens")
    assert_refused(transfer(drafter, target, out, texts=tmp_path / "none.jsonl"), "cannot read")
    assert_refused(transfer(drafter, target, out, "--gguf"), "GGUF")
    assert not out.exists()
