"""The proposers of the decoding tests, for the checks too."""

from tests.unit.decode.conftest import any_proposer  # noqa: F401
