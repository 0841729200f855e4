"""Each decoder family of transformers: it runs as it says; what was seen goes to a page.

`make test-models`; the page is docs/models.md.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnidraft.models.catalog import store
from tests.homes import make_home
from tests.models.families import FAMILIES, native
from tests.models.learning import ALL, learn_family
from tests.models.page import RESULTS
from tests.models.runs import KERNELS, Server, TokenizerFiles, decode_family, new_row, tokenizer_files

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

DIFFERENT = {"MiniMax-Text-01": "transformers' passes over one id say something else than those over a whole text"}
LEARNS = {"GPT-2": ["full"], "Ettin": []}
"""What drafters learn that do not learn all."""


@pytest.fixture(scope="module")
def catalog() -> dict[str, Path]:
    """Folders with real tokenizers."""
    return {name: store.resolve(name) for name in ("qwen2.5-coder-0.5b", "smollm2-135m", "gemma3-270m")}


@pytest.fixture(scope="module")
def home(catalog: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    own = make_home(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(own))
        yield own


@pytest.fixture(scope="module")
def tokenizer(catalog: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    """Of all targets."""
    return tokenizer_files(catalog["qwen2.5-coder-0.5b"], tmp_path_factory.mktemp("tokenizer") / "target")


@pytest.fixture(scope="module")
def others(
    tokenizer: TokenizerFiles, catalog: dict[str, Path], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Server]:
    """Servers with drafters of other tokenizers than the target, one of them larger."""
    root = tmp_path_factory.mktemp("drafters")
    target = tokenizer.save_family("Llama 3", root / "target")
    small = tokenizer_files(catalog["smollm2-135m"], root / "smollm2").save_family("Llama 2", root / "small")
    large = tokenizer_files(catalog["gemma3-270m"], root / "gemma3").save_family("Gemma 3", root / "large")
    return [Server(target, small), Server(target, large)]


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Iterator[Path]:
    """Where the model goes, for as long as it is needed."""
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    shutil.rmtree(home / "packed", ignore_errors=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(
    name: str,
    folder: Path,
    tokenizer: TokenizerFiles,
    others: list[Server],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if name in DIFFERENT:
        request.applymarker(pytest.mark.xfail(reason=DIFFERENT[name], raises=AssertionError, strict=True))
    row = new_row(name)
    tokenizer.save_family(name, folder)
    try:
        decode_family(row, folder, others, length=200)
        if row.drafts == "trees":  # others are no drafters
            learn_family(row, tmp_path)
    finally:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(row.as_dict()))
    assert row.modes == ["fast", "reproducible"]
    assert row.learns == ([] if row.drafts != "trees" else LEARNS.get(name, list(ALL)))
    assert name not in native.FAMILIES or row.computed_by == KERNELS
