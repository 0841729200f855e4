"""Every command line of the pages for people parses with today's commands and options, and their Python compiles."""

import importlib
import re
import shlex
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

import pytest
import typer

from omnidraft.cli import app
from tests.doc_blocks import PAGES, ROOT, SHELL, blocks, commands, inline_code

PLACEHOLDER = re.compile(r"\.\.\.|^[A-Z][A-Z.]*$|[\[\]]|\|")
"""Words that stand for others, and how pages write alternatives; a line with one is not parsed as a whole."""
ENDS = {"|", "&&", ";", "||", "&", "|?"}
PAGE_IDS = [page.name for page in PAGES]


@cache
def pipeline(module: str) -> Any:
    """The command that `python -m` of this module runs."""
    is_package = find_spec(module).submodule_search_locations
    made = typer.Typer()
    made.command()(importlib.import_module(f"{module}.__main__" if is_package else module).main)
    return typer.main.get_command(made)


@cache
def program() -> Any:
    return typer.main.get_command(app)


def words_of(line: str) -> list[str]:
    """The words of the first command of a line, without assignments before it and brackets in it."""
    words = shlex.split(line.replace(" #", "\n#").split("\n")[0])
    words = list(takewhile(lambda word: word not in ENDS, words))
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] == "$"):
        del words[0]
    return words


def complaint(line: str) -> str | None:
    """What is wrong with a command line of ours; None for those of other programs, too."""
    words = words_of(line)
    if not words:
        return None
    match words[0].removeprefix(".venv/bin/"), words[1:]:
        case "omnidraft", rest:
            return misuse(program(), rest)
        case (("python" | "python3"), ["-m", module, *rest]) if module.startswith("pipelines."):
            return misuse(pipeline(module), rest)
        case (("python" | "python3"), ["-m", module, *rest]) if module.startswith("services."):
            return None if rest[::2] in ([], ["--config"]) else f"{module} has --config alone"
        case (("python" | "python3"), [script, *_]) if script.endswith(".py"):
            return None if (ROOT / script).exists() else f"there is no {script}"
    return None


def misuse(command: Any, words: list[str]) -> str | None:
    """What a command has not: a subcommand, an option; else what its parser says, where all words are given."""
    words = [word.strip("[]") for word in words]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0).split("|")[0]
        if name == "...":
            return None
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    if unknown := set(options) - known:
        return f"no option {sorted(unknown)[0]}"
    return None


def is_whole(line: str) -> bool:
    return not any(PLACEHOLDER.search(word) for word in words_of(line))


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_of_a_block_has_todays_options(page):
    lines = [(block.place, line) for block in blocks(page) if block.language in SHELL for line in commands(block)]
    assert [(place, line, wrong) for place, line in lines if (wrong := complaint(line))] == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_whole_command_of_a_block_parses(page):
    """Types and required options too; nothing is run."""
    for block in blocks(page):
        for line in commands(block) if block.language in SHELL else ():
            words = words_of(line)
            if words[:1] == ["omnidraft"] and is_whole(line):
                command, rest = program(), words[1:]
                while hasattr(command, "commands"):
                    command = command.commands[rest.pop(0)]
                command.make_context(line, rest)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_between_backticks_has_todays_options(page):
    named = [(number, code) for number, code in inline_code(page) if re.match(r"(omnidraft|python -m) \S", code)]
    assert [(number, code, wrong) for number, code in named if (wrong := complaint(code))] == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_python_block_compiles(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, block.place, "exec")


@pytest.mark.parametrize("line", ["omnidraft serve --frobnicate", "omnidraft frob", "python -m pipelines.learn --frob"])
def test_the_check_finds_what_is_not_there(line):
    assert complaint(line)
