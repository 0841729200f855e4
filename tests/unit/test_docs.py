"""What the pages for people name is there."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.page_anchors import anchors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]+)")
COMMAND = re.compile(r"python -m ((?:pipelines|services)\.[a-z_]+)")
CODE = re.compile(r"```.*?```|^    .*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def code_of(page: Path) -> str:
    return "\n".join(CODE.findall(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [(name, anchor) for name, anchor in LINK.findall(page.read_text()) if "://" not in name]
    assert [name for name, _ in links if not (page.parent / name).exists()] == []
    of_pages = [(page.parent / name, anchor) for name, anchor in links if anchor and name.endswith(".md")]
    assert [(path.name, anchor) for path, anchor in of_pages if anchor not in anchors(path.resolve())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_and_pipeline_that_a_page_names_exists(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = code_of(page)
    assert set(TARGET.findall(code)) <= known
    modules = {ROOT / name.replace(".", "/") for name in COMMAND.findall(code)}
    assert [path for path in modules if not (path.with_suffix(".py").exists() or path.is_dir())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_this_package_by_its_name_since_no_index_has_it(page: Path) -> None:
    assert re.findall(r"pip install [^\n`]*'omnidraft\b.*", page.read_text()) == []


def test_nothing_that_measures_or_draws_writes_over_the_published_pages_unless_told() -> None:
    recipes = re.findall(r"^\t.*(?:--[a-z]+|termtosvg) docs/.*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    sources = [path for path in (ROOT / "pipelines").rglob("*.py") if 'Path("docs' in path.read_text()]
    assert recipes == sources == []


def test_no_make_target_hides_another() -> None:
    done = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
