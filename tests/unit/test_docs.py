"""What the pages for people name is there: links, files, make targets, commands with options; their Python compiles."""

import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from omnidraft.cli import app
from omnidraft.config import Settings
from pipelines import measured
from tests.doc_blocks import PAGES, ROOT, SHELL, anchors, blocks, commands, inline_code

LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]+)")
FILE = re.compile(r"(?<![\w./-])(?:omnidraft|pipelines|services|tests|deploy|docs|\.github|\.ci)/[\w./-]*[\w/]")
ENDS = {"|", "&&", ";", "||", "&"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_of(page: Path) -> list[tuple[int, str]]:
    """The lines of code of a page: those of its blocks of commands, and what is between backticks."""
    of_blocks = [(block.line, line) for block in blocks(page) if block.language in SHELL for line in commands(block)]
    return of_blocks + list(inline_code(page))


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [(name, anchor) for name, anchor in LINK.findall(page.read_text()) if "://" not in name]
    assert [name for name, _ in links if not (page.parent / name).exists()] == []
    of_pages = [((page.parent / name) if name else page, anchor) for name, anchor in links if anchor]
    assert [(path.name, anchor) for path, anchor in of_pages if anchor not in anchors(path.resolve())] == []


@each_page
def test_every_make_target_and_file_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = code_of(page)
    assert [
        (line, name) for line, text in code for name in MAKE.findall(text.split(" #")[0]) if name not in targets
    ] == []
    named = [(line, name) for line, text in code if "*" not in text for name in FILE.findall(text)]
    assert [(line, name) for line, name in named if not (ROOT / name).exists()] == []


@each_page
def test_every_command_has_todays_options(page: Path) -> None:
    wrong = [(line, text, problem(text)) for line, text in code_of(page)]
    assert [each for each in wrong if each[-1]] == []


@each_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    known = set(setting_names(Settings))
    sections = {name.split(".")[0] for name in known}
    named = re.findall(r"`(\w+\.[\w.]+)(?: = [^`]*)?`", page.read_text())
    of_environment = re.findall(r"OMNIDRAFT_([A-Z]+__[A-Z_]+)", page.read_text())
    named += [name.lower().replace("__", ".") for name in of_environment]
    assert [name for name in named if name.split(".")[0] in sections and name not in known] == []


@each_page
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_the_page_of_figures_is_what_its_data_says() -> None:
    data = measured.PAGE.with_suffix(".toml").read_text()
    assert measured.PAGE.read_text() == measured.page(data), "run `python -m pipelines.measured`"


def test_no_make_target_hides_another() -> None:
    done = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "line", ["omnidraft serve --frobnicate", "omnidraft frob", "python -m pipelines.record --frob"]
)
def test_the_check_finds_what_is_not_there(line: str) -> None:
    assert problem(line)


def problem(line: str) -> str | None:
    """What is wrong with a command line of ours; None for those of other programs, too."""
    match words_of(line):
        case [program, *rest] if program.removeprefix(".venv/bin/") == "omnidraft" and rest:
            return misuse(typer.main.get_command(app), rest)
        case [python, "-m", module, *rest] if "python" in python and module.startswith("pipelines."):
            return misuse(pipeline(module), rest)
    return None


def words_of(line: str) -> list[str]:
    """The words of the first command of a line, without comments, and without assignments before it."""
    if not re.match(r"([A-Z_]+=\S+ )*[\w./-]*(omnidraft|python3?) ", line):
        return []
    words = shlex.split(line.replace(" #", "\n#").split("\n")[0])
    return [word for word in takewhile(lambda word: word not in ENDS, words) if not re.match(r"[A-Z_]+=", word)]


def setting_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")


@cache
def pipeline(module: str) -> Any:
    """The command that `python -m` of this module runs; None where there is no such module."""
    if (found := find_spec(module)) is None:
        return None
    made = typer.Typer()
    made.command()(importlib.import_module(f"{module}.__main__" if found.submodule_search_locations else module).main)
    return typer.main.get_command(made)


def misuse(command: Any, words: list[str]) -> str | None:
    """What there is not: the program, a subcommand, or an option."""
    if command is None:
        return "no such module"
    words = [word.strip("[]") for word in words]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0).split("|")[0]
        if name == "...":
            return None
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    unknown = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)} - known
    return f"no option {min(unknown)}" if unknown else None
