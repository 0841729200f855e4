"""The pipelines that measure transferred models and ensembles, on tiny models."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from omnidraft.errors import RequestError, VocabularyError
from omnidraft.testing.tiny_models import TEXT, make_target
from omnidraft.transfer.report import JSON_FILE
from omnidraft.wiring.transfer import split_texts, texts_digest
from omnidraft.wiring.transfer_models import load_pair
from pipelines import ensemble, transfer
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
    by_occurrence = figures["by_occurrence"]["made"]["texts"]
    assert sum(row["chunks"] for row in by_occurrence) > 50
    for side, name in (("before", "original"), ("after", "made")):
        bits = sum(row[side] for row in by_occurrence) / math.log(2) / figures["held_out_bytes"]["texts"]
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
