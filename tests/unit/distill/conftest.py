"""Both kinds of drafter, and one thread."""

import pytest
import torch

from tests.tiny_pair import Pair, make_pair


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def any_pair(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With one matrix for embedding and head, and with two."""
    return pair if request.param else make_pair(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
