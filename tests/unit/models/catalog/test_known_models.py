"""The catalog: names resolve, and its entries are complete."""

import re

import pytest

from omnidraft.errors import ModelUnknown
from omnidraft.models.catalog.known_models import CATALOG, CatalogModel, find, names


@pytest.mark.parametrize("model", CATALOG, ids=names())
def test_every_name_finds_its_model_in_any_case_of_letters(model: CatalogModel) -> None:
    assert find(model.name) is model
    assert find(model.name.upper()) is model


@pytest.mark.parametrize("model", CATALOG, ids=names())
def test_every_model_can_be_checked_and_repeated(model: CatalogModel) -> None:
    """A sha256, exact versions, a hub id, and no wheel twice."""
    assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel) for wheel in model.wheels)
    assert len(set(model.wheels)) == len(model.wheels)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.hub_id)
    assert 0 < model.gguf_bytes < model.folder_bytes


def test_names_are_unique() -> None:
    assert len(set(names())) == len(CATALOG)


def test_a_misspelled_name_is_answered_with_the_right_one_and_all_others() -> None:
    with pytest.raises(ModelUnknown, match="did you mean smollm2-135m") as caught:
        find("smolm-135m")
    assert all(name in str(caught.value) for name in names())


def test_a_strange_name_gets_no_guess() -> None:
    with pytest.raises(ModelUnknown) as caught:
        find("zzz")
    assert "did you mean" not in str(caught.value)
