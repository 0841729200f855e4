"""Exported drafters are what a worker drafts with, in the folders that transformers and llama.cpp load."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from omnidraft import assembly
from omnidraft.models.hf.trainable_drafter import Train, load_trainable
from omnidraft.ports import PackedTexts
from omnidraft.snapshots import bundle
from omnidraft.testing.tiny_models import make_drafter
from tests.cli_runs import run_cli
from tests.tiny_engine import tiny_settings
from tests.tiny_gguf import write_gguf_beside

PROMPT = "How many clips did Natalia sell? \u20ac 12"
TOO_FEW_BYTES = 100_000
"""The tiny drafter's weights have more, its other files fewer."""

Export = Callable[..., Any]


@pytest.fixture
def omnidraft(
    omnidraft_home: Path, settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Export:
    """Run `omnidraft snapshots`."""
    environ = {"OMNIDRAFT_HOME": str(omnidraft_home)}

    def run(*arguments: object, **more: str) -> Any:
        return run_cli(("snapshots", *arguments, "--config", settings_file), monkeypatch, capsys, environ | more)

    return run


def vocabularies(models: tuple[Path, Path], home: Path) -> assembly.Vocabularies:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(home))
        return assembly.vocabularies(tiny_settings(models))


def learned(
    folder: Path, models: tuple[Path, Path], home: Path, train: Train = "full"
) -> tuple[Path, Callable[[list[int]], torch.Tensor]]:
    """A snapshot whose weights differ from the base drafter's, and the learner's own logits of these weights."""
    trainable = load_trainable(models[1], train=train, rank=2, seed=0)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable.trained().values():
            changed = parameter + 0.05 * torch.randn(parameter.shape, generator=draws)
            parameter.copy_(changed.to(torch.bfloat16) if train == "full" else changed)
    settings = tiny_settings(models, learner={"train": train})
    manifest = assembly.identity(settings, vocabularies(models, home)).manifest(None)
    bundle.write(folder, manifest, {bundle.DRAFTER: trainable.serving_tensors()})

    def logits(ids: list[int]) -> torch.Tensor:
        ids_R, num = torch.tensor(ids), len(ids)
        texts = PackedTexts(ids_R, torch.zeros(num, dtype=torch.int64), torch.arange(num), 0)
        return trainable.logits(trainable.hidden(texts)).detach()

    return folder, logits


def load(folder: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def assert_refused(done: Any, words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_hugging_face_folder_has_the_logits_and_the_tokenizer_of_the_learned_drafter(
    omnidraft: Export, tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, train: Train
) -> None:
    snapshot, logits = learned(tmp_path / "snapshot", tiny_models, omnidraft_home, train)
    done = omnidraft("export", snapshot, "--as", "hf", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    own, made = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_models[1], tmp_path / "out"))
    ids = own(PROMPT)["input_ids"]
    torch.testing.assert_close(logits_of(load(tmp_path / "out"), ids), logits(ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(load(tiny_models[1]), ids), logits(ids), atol=1e-2)
    assert (made(PROMPT)["input_ids"], made.chat_template) == (ids, own.chat_template)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == (
        "bfloat16" if train == "full" else "float32"
    )


def test_a_drafter_in_the_targets_vocabulary_has_the_mean_of_the_pieces_of_each_token(
    omnidraft: Export, tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path
) -> None:
    snapshot, _ = learned(tmp_path / "snapshot", tiny_models, omnidraft_home)
    for form in ("hf", "hf-target-vocab"):
        assert omnidraft("export", snapshot, "--as", form, "--output", tmp_path / form).returncode == 0
    old, new = load(tmp_path / "hf"), load(tmp_path / "hf-target-vocab")
    old_DH, new_TH = (model.get_input_embeddings().weight.detach() for model in (old, new))  # type: ignore[union-attr, operator]
    alignment = vocabularies(tiny_models, omnidraft_home).alignment
    pieces = [alignment.draft_pieces(token) for token in range(len(new_TH))]
    assert {min(len(each), 2) for each in pieces} == {0, 1, 2}
    means = [old_DH[list(each)].mean(0) if each else old_DH.mean(0) for each in pieces]
    torch.testing.assert_close(new_TH, torch.stack(means), rtol=1e-2, atol=1e-3)
    assert new.get_output_embeddings().weight is new.get_input_embeddings().weight  # type: ignore[union-attr, operator]
    layers = [name for name, _ in old.named_parameters() if ".layers." in name]
    assert layers
    assert all(torch.equal(old.get_parameter(name), new.get_parameter(name)) for name in layers)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_gguf_file_has_the_learned_weights_and_all_else_of_the_base_drafters(
    omnidraft: Export, omnidraft_home: Path, tmp_path: Path, tiny_models: tuple[Path, Path], train: Train
) -> None:
    """transformers' own reader of GGUF files judges names and layout."""
    models = tiny_models[0], make_drafter(tmp_path / "drafter")
    base = gguf.GGUFReader(write_gguf_beside(models[1]))
    snapshot, logits = learned(tmp_path / "snapshot", models, omnidraft_home, train)
    told = {"OMNIDRAFT_MODELS__DRAFTER": str(models[1])}
    done = omnidraft("export", snapshot, "--as", "gguf", "--output", tmp_path / "out", **told)
    assert done.returncode == 0, done.stderr
    made = gguf.GGUFReader(tmp_path / "out" / "out.gguf")
    kept = [name for name in base.fields if name.startswith(("llama.", "tokenizer."))]
    assert [made.fields[name].contents() for name in kept] == [base.fields[name].contents() for name in kept]
    shapes = [{each.name: each.shape.tolist() for each in reader.tensors} for reader in (base, made)]
    assert shapes[0] == shapes[1]
    kinds = {each.tensor_type.name for each in made.tensors if len(each.shape) == 2}
    assert kinds == ({"BF16"} if train == "full" else {"F32"})
    ids = AutoTokenizer.from_pretrained(models[1])(PROMPT)["input_ids"]
    read = load(tmp_path / "out", gguf_file="out.gguf")
    torch.testing.assert_close(logits_of(read, ids), logits(ids), rtol=1e-4, atol=1e-5)
    embedding = next(each for each in made.tensors if each.name == "token_embd.weight")
    own_DH = read.get_input_embeddings().weight.detach().numpy()  # type: ignore[union-attr, operator]
    assert np.array_equal(gguf.dequantize(embedding.data, embedding.tensor_type), own_DH)


@pytest.mark.long
def test_a_gguf_file_in_the_targets_vocabulary_has_its_tokenizer_and_the_weights_of_the_hugging_face_folder(
    omnidraft: Export, omnidraft_home: Path, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    models = tiny_models[0], make_drafter(tmp_path / "drafter")
    base, target = (gguf.GGUFReader(write_gguf_beside(folder)) for folder in (models[1], models[0]))
    snapshot, _ = learned(tmp_path / "snapshot", models, omnidraft_home)
    told = {"OMNIDRAFT_MODELS__DRAFTER": str(models[1])}
    for form in ("hf-target-vocab", "gguf-target-vocab"):
        done = omnidraft("export", snapshot, "--as", form, "--output", tmp_path / form, **told)
        assert done.returncode == 0, done.stderr
    file = "gguf-target-vocab.gguf"
    made = gguf.GGUFReader(tmp_path / "gguf-target-vocab" / file)
    for reader, beginning in ((target, "tokenizer."), (base, "llama.attention.")):
        names = [name for name in reader.fields if name.startswith(beginning)]
        assert names
        assert [made.fields[name].contents() for name in names] == [reader.fields[name].contents() for name in names]
    ids = AutoTokenizer.from_pretrained(models[0])(PROMPT)["input_ids"]
    read, expected = load(tmp_path / "gguf-target-vocab", gguf_file=file), load(tmp_path / "hf-target-vocab")
    assert torch.equal(logits_of(read, ids), logits_of(expected, ids))


def test_versions_of_the_registry_are_exported(
    omnidraft: Export, tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path
) -> None:
    snapshot, _ = learned(tmp_path / "snapshot", tiny_models, omnidraft_home)
    assert omnidraft("publish", snapshot).returncode == 0
    (tmp_path / "out").mkdir()
    done = omnidraft("export", 1, "--as", "hf", "--output", tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'out'}\n"), done.stderr
    assert_refused(omnidraft("export", 7, "--as", "hf", "--output", tmp_path / "other"), "7")


def test_what_cannot_be_exported_is_refused_in_one_line(
    omnidraft: Export, tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path
) -> None:
    out, tokenizers = tmp_path / "out", vocabularies(tiny_models, omnidraft_home)
    known = assembly.identity(tiny_settings(tiny_models), tokenizers).manifest(None, train="base")
    bundle.write(tmp_path / "empty", known, {})
    bundle.write(tmp_path / "others", known.model_copy(update={"drafter_hash": "another"}), {})
    asked = ("--as", "hf", "--output")
    assert_refused(omnidraft("export", tmp_path / "empty", *asked, out), "no weights of its own")
    assert_refused(omnidraft("export", tmp_path / "others", *asked, out), "learned from")
    assert_refused(omnidraft("export", "base", *asked, tmp_path), "is not empty")
    assert_refused(omnidraft("export", "base", *asked, tmp_path / "settings.toml"), "is a file")
    told = {"OMNIDRAFT_MODELS__DRAFTER": "none"}
    assert_refused(omnidraft("export", "base", *asked, out, **told), "no drafter")
    assert not out.exists()


@pytest.mark.long
@pytest.mark.parametrize("form", ["hf", "hf-target-vocab", "gguf", "gguf-target-vocab"])
def test_a_full_disk_is_told_and_leaves_nothing(
    omnidraft: Export, tmp_path: Path, tiny_models: tuple[Path, Path], form: str
) -> None:
    drafter = make_drafter(tmp_path / "drafter")
    write_gguf_beside(drafter)
    write_gguf_beside(tiny_models[0])
    told = {"OMNIDRAFT_MODELS__DRAFTER": str(drafter)}
    omnidraft("export", "base", "--as", form, "--output", tmp_path / "before", **told)
    before = set(tmp_path.iterdir())
    with files_limited_to(TOO_FEW_BYTES):
        done = omnidraft("export", "base", "--as", form, "--output", tmp_path / "out", **told)
    assert_refused(done, "cannot be written")
    assert set(tmp_path.iterdir()) == before


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """No file of this process can become larger: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
