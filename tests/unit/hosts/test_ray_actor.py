"""The distiller's actor without Ray around it."""

import logging

from omnidraft.hosts.ray_actor import WarningBuffer


def test_a_warning_that_cannot_be_formatted_raises_nothing_and_loses_no_other() -> None:
    buffer, logger = WarningBuffer(), logging.Logger("a library")
    logger.addHandler(buffer)
    logger.warning("x", FutureWarning)
    logger.warning("%d records", 3)
    assert buffer.take() == [(logging.WARNING, "3 records")]
