"""Progress where stderr is no terminal: quick work prints nothing, long work a line before its end."""

import time

import pytest

from omnidraft import progress


def test_only_work_that_takes_long_prints_a_line(monkeypatch, capsys):
    with progress.bar("quick", 3, transient=True) as advance:
        advance()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.2)
    with progress.bar("reading", 3, transient=True) as advance:
        advance(2)
        time.sleep(0.6)
    assert capsys.readouterr().err == "reading: 2 of 3\n"


def test_lines_follow_one_another_while_work_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.05)
    with progress.bar("messages", None, transient=True) as advance:
        for _ in range(3):
            time.sleep(0.06)
            advance(10)
    assert capsys.readouterr().err.splitlines() == ["messages: 10", "messages: 20", "messages: 30"]


def test_a_title_from_outside_is_shown_as_it_is_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.bar("x [/x]", None, transient=True):
        pass
    assert "x [/x]" in capsys.readouterr().err


def test_a_failure_ends_the_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.2)
    with pytest.raises(RuntimeError), progress.bar("reading", 3, transient=True):
        raise RuntimeError
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
