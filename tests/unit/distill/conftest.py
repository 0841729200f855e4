"""Both kinds of drafter, and one thread."""

import pytest
import torch

from tests.tiny_pair import Pair, make_pair


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def any_pair(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With one matrix for embedding and head, and with two."""
    return pair if request.param else make_pair(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def lively_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With a drafter whose layers decide what it says, so that low-rank factors of them can learn within a few steps;
    that of `pair` says what its embeddings say."""
    return make_pair(tmp_path_factory.mktemp("lively"), tied=True, spread=0.2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
