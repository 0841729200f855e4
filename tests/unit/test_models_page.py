"""docs/models.md has a row for each family that is tested, and those that our kernels know run there."""

from omnidraft.models.native.families import FAMILIES as KNOWN
from tests.models.families import FAMILIES
from tests.models.page import BEGIN, END, PAGE
from tests.models.runs import KERNELS, new_row


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {family: others for family, *others in cells[2:]}


def test_the_page_has_a_row_for_each_family() -> None:
    assert sorted(rows()) == sorted(FAMILIES), "run `make test-models`"
    assert {name: f"`{new_row(name).model_type}`" for name in FAMILIES} == {
        name: row[0] for name, row in rows().items()
    }


def test_the_page_knows_what_the_kernels_know() -> None:
    on_kernels = {row[0].strip("`") for row in rows().values() if row[1] == KERNELS}
    parts = {f"{each}_text" for each in on_kernels}  # text models inside those of images
    assert set(KNOWN) - on_kernels - parts == set()
