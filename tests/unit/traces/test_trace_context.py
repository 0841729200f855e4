"""Only a valid traceparent is accepted."""

import pytest

from omnidraft.traces.trace_context import is_sampled, valid_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_sound_header_is_taken_as_it_is() -> None:
    assert valid_traceparent(f"00-{TRACE}-{SPAN}-01") == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
    ],
)
def test_anything_else_is_nothing(header: str | None) -> None:
    assert valid_traceparent(header) is None


@pytest.mark.parametrize(("flags", "is_kept"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_the_last_bit_is_the_sampled_flag(flags: str, is_kept: bool) -> None:
    assert is_sampled(f"00-{TRACE}-{SPAN}-{flags}") is is_kept
