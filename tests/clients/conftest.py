"""One worker for all clients."""

from collections.abc import Iterator

import pytest

from tests.clients.worker import TARGET, Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), TARGET, "--quantize", "int8") as started:
        yield started
