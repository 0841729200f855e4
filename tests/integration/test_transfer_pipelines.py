"""The pipelines that measure transferred models and ensembles, on tiny models."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnidraft.errors import RequestError, VocabularyError
from omnidraft.testing.tiny_models import TEXT, make_target
from omnidraft.transfer.report import JSON_FILE
from omnidraft.transfer.settings import TrainingSettings
from omnidraft.transfer.texts import align_text
from omnidraft.wiring.transfer import TransferRequest, split_texts, texts_digest
from omnidraft.wiring.transfer import transfer as run_transfer
from omnidraft.wiring.transfer_models import HYPERNETWORK_FILE, load_pair
from pipelines import ensemble, transfer, transfer_mean, transfer_texts
from tests.cli_runs import run_pipeline


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": TEXT[1]}) for text in TEXT))
    return path


@pytest.fixture(autouse=True)
def home(omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))


def test_initialisations_are_measured_beside_the_original(
    tiny_models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    target, drafter = tiny_models
    out, made = tmp_path / "figures.json", tmp_path / "made"
    asked = (drafter, "--tokenizer", target, "--data", data, "--json", out)
    shutil.copytree(target, made)
    with pytest.raises(RequestError, match="no folder that omnidraft transfer wrote"):
        run_pipeline(transfer.main, *asked, "--transferred", made)
    (made / JSON_FILE).write_text('{"run": {"held_out_every": 2}}')
    for other in (("--held-out-every", 4), ("--held-out-every", 2, "--split", "train")):
        with pytest.raises(RequestError, match="was made with --held-out-every 2; measure it with the same"):
            run_pipeline(transfer.main, *asked, "--transferred", made, *other)
    measured = (*asked, "--held-out-every", 2, "--transferred", made, "--by-occurrence")
    texts = split_texts(data, load_pair(str(drafter), str(target)), max_tokens=256, every=2)
    (made / JSON_FILE).write_text(json.dumps({"run": {"held_out_every": 2, "texts": texts_digest(*texts)}}))
    for other in (("--max-tokens", 16), ("--num-texts", 2)):
        with pytest.raises(RequestError, match="was made with other texts; --by-occurrence needs"):
            run_pipeline(transfer.main, *measured, *other)
    run_pipeline(transfer.main, *measured)
    figures = json.loads(out.read_text())
    for kind in ("by_occurrence", "by_pieces"):
        rows = figures[kind]["made"]["texts"]
        assert sum(row["chunks"] for row in rows) > 50
        for side, name in (("before", "original"), ("after", "made")):
            bits = sum(row[side] for row in rows) / math.log(2) / figures["held_out_bytes"]["texts"]
            assert bits == pytest.approx(figures["bits_per_byte"][name]["texts"], rel=1e-5)
    assert list(figures["bits_per_byte"]) == ["original", "mean", "fvt", "omp", "made"]
    assert all(0 < row["texts"] < 20 for row in figures["bits_per_byte"].values())
    assert figures["held_out_bytes"]["texts"] > 100


def test_an_ensemble_is_measured_beside_its_members(tiny_models: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    target, drafter = tiny_models
    other, out = make_target(tmp_path / "other", seed=3, spread=0.2), tmp_path / "figures.json"
    asked = ("--data", data, "--held-out-every", 2, "--json", out)
    run_pipeline(ensemble.main, target, other, *asked)
    figures = json.loads(out.read_text())
    rows = {name: row["texts"] for name, row in figures["bits_per_byte"].items()}
    assert len(rows) == 6
    assert rows["mean of probabilities"] < max(rows[str(target)], rows[str(other)])
    assert sum(figures["weights"]) == pytest.approx(1)
    with pytest.raises(VocabularyError, match="several tokenizers"):
        run_pipeline(ensemble.main, target, drafter, *asked)


def test_an_ensemble_is_not_measured_on_what_a_member_learned(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    target, made, out = tiny_models[0], tmp_path / "made", tmp_path / "figures.json"
    shutil.copytree(target, made)
    (made / JSON_FILE).write_text('{"run": {"held_out_every": 2, "split": "train"}}')
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": text, "split": "test" if number == 1 else "train"} for number, text in enumerate(TEXT)]
    data.write_text("\n".join(map(json.dumps, rows)))
    asked = (target, made, "--data", data, "--json", out)
    for other in (("--held-out-every", 2), ("--held-out-every", 4, "--split", "train")):
        with pytest.raises(RequestError, match="was made with --held-out-every 2 --split train"):
            run_pipeline(ensemble.main, *asked, *other)
    run_pipeline(ensemble.main, *asked, "--held-out-every", 2, "--split", "train")
    train = json.loads(out.read_text())["bits_per_byte"][str(target)]
    data.write_text("\n".join(json.dumps(row) for row in rows if row["split"] == "train"))
    run_pipeline(ensemble.main, *asked, "--held-out-every", 2, "--split", "train")
    assert json.loads(out.read_text())["bits_per_byte"][str(target)] == train, "rows of other splits are passed over"


def test_fitted_weights_are_the_likeliest() -> None:
    log_p_MN = torch.log(torch.rand(3, 40, generator=torch.Generator().manual_seed(0)))
    log_p_MN[0, :25] += 1.0

    def likelihood(weights: list[float]) -> float:
        return (log_p_MN + torch.tensor(weights).log()[:, None]).logsumexp(dim=0).sum().item()

    best = ensemble.fit_weights(log_p_MN)
    assert sum(best) == pytest.approx(1)
    for number in range(3):
        for shift in (-0.02, 0.02):
            moved = [max(weight + shift * (at == number), 1e-6) for at, weight in enumerate(best)]
            assert likelihood([weight / sum(moved) for weight in moved]) <= likelihood(best) + 1e-3


def test_texts_are_chosen_for_the_words_that_the_new_tokenizer_cuts_otherwise(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = map(str, tiny_models)
    pair, texts, out = load_pair(drafter, target), tmp_path / "pool.jsonl", tmp_path / "chosen.jsonl"
    pool = [f"{text[at : at + 24]} {number}" for number, text in enumerate(TEXT) for at in range(0, len(text) - 24, 3)]
    texts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*pool, *pool]))
    asked = (drafter, "--tokenizer", target, "--data", texts, "--out", out, "--num-tokens", 120, "--max-tokens", 64)
    run_pipeline(transfer_texts.main, *asked)
    lines = [line for row in out.read_text().splitlines() for line in json.loads(row)["prompt"].splitlines()]
    assert set(lines) <= set(pool)
    assert len(out.read_text().splitlines()) < len(lines)

    def words_per_token(chosen: list[str]) -> float:
        aligned = [align_text(text, pair.old, pair.new, 64) for text in chosen]
        words = {word for text in aligned for word in transfer_texts.split_words(text)}
        return len(words) / sum(len(text.new_ids_T) for text in aligned)

    assert words_per_token(lines) > 2 * words_per_token(pool)
    assert max(lines.count(line) for line in lines) <= 2
    once = out.read_bytes()
    run_pipeline(transfer_texts.main, *asked)
    assert out.read_bytes() == once


def test_words_that_are_cut_otherwise_have_several_new_pieces_and_no_common_end_inside(
    tiny_models: tuple[Path, Path],
) -> None:
    target, drafter = map(str, tiny_models)
    pair = load_pair(drafter, target)
    text = align_text(" ".join(TEXT), pair.old, pair.new, 256)
    words = transfer_texts.split_words(text)
    spelled = {pair.new.vocabulary.spell(word) for word in words}
    for word in spelled:
        assert word in " ".join(TEXT).encode()
    assert all(len(word) > 1 for word in words)
    inner = set(text.new_at_P.tolist())
    starts = [at for at in range(len(text.new_ids_T) - 1) if tuple(text.new_ids_T[at + 1 : at + 3]) == words[0][:2]]
    assert any(at in inner and at + 1 not in inner for at in starts)


def test_texts_without_such_words_are_refused(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    texts = tmp_path / "same.jsonl"
    texts.write_text(json.dumps({"prompt": TEXT[0]}) + "\n")
    asked = (tiny_models[0], "--tokenizer", tiny_models[0], "--data", texts, "--out", tmp_path / "out.jsonl")
    with pytest.raises(RequestError, match="no text has a word that the two tokenizers cut in different places"):
        run_pipeline(transfer_texts.main, *asked)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def transferred(tiny_models: tuple[Path, Path], data: Path, tmp_path: Path) -> list[Path]:
    """A transfer, and one that went on from it."""
    target, drafter = tiny_models
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, init in zip(folders, ("fvt", folders[0]), strict=True):
        request = TransferRequest(
            model=str(drafter),
            tokenizer=str(target),
            data=(data,),
            out=folder,
            settings=TrainingSettings(num_steps=2, learning_rate=1e-2),
            init=init,  # type: ignore[arg-type]
            held_out_every=2,
        )
        run_transfer(request, lambda _: None)
    return folders


def test_a_mean_has_the_mean_of_weights_and_of_hypernetworks(transferred: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "mean"
    run_pipeline(transfer_mean.main, *transferred, "--out", out)
    for name in ("model.safetensors", HYPERNETWORK_FILE):
        first, second, mean = (load_file(folder / name) for folder in (*transferred, out))
        assert mean.keys() == first.keys()
        assert any(not torch.equal(first[key], second[key]) for key in first)
        for key, each in mean.items():
            expected = ((first[key].float() + second[key].float()) / 2).to(each.dtype)
            torch.testing.assert_close(each, expected)
    run = json.loads((out / JSON_FILE).read_text())["run"]
    assert (run["held_out_every"], run["split"]) == (2, None)
    assert json.loads((out / "tokenizer.json").read_text()) == json.loads(
        (transferred[0] / "tokenizer.json").read_text()
    )


def test_models_that_do_not_go_together_have_no_mean(
    transferred: list[Path], tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = transferred
    for folders, message in (
        ((first,), "a mean is of two folders or more"),
        ((first, tiny_models[0]), "no folder that omnidraft transfer wrote"),
    ):
        with pytest.raises(RequestError, match=message):
            run_pipeline(transfer_mean.main, *folders, "--out", tmp_path / "mean")
    report = json.loads((second / JSON_FILE).read_text())
    (second / JSON_FILE).write_text(json.dumps({"run": report["run"] | {"held_out_every": 4}}))
    with pytest.raises(RequestError, match="held out other rows"):
        run_pipeline(transfer_mean.main, first, second, "--out", tmp_path / "mean")
    (second / JSON_FILE).write_text(json.dumps(report))
    (second / "tokenizer.json").write_bytes((tiny_models[1] / "tokenizer.json").read_bytes())
    with pytest.raises(RequestError, match="second has another tokenizer than"):
        run_pipeline(transfer_mean.main, first, second, "--out", tmp_path / "mean")
    (second / "tokenizer.json").write_bytes((first / "tokenizer.json").read_bytes())
    save_file({"0.maps_FHH": torch.zeros(3, 2, 2)}, second / HYPERNETWORK_FILE)
    with pytest.raises(RequestError, match="second is a model of another shape"):
        run_pipeline(transfer_mean.main, first, second, "--out", tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
