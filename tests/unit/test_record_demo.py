"""The recording of the demo is a picture of what the command printed, in the order in which it did."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
SAYS = "import sys; print('a < b'); print('x' * 130, flush=True); sys.exit(3)"
SVG = "{http://www.w3.org/2000/svg}"


def test_every_line_is_in_the_picture_and_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "deploy/record_demo.py", tmp_path / "said.svg", sys.executable, "-c", SAYS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, f"a < b\n{'x' * 130}\n")
    texts = [each.text for each in ElementTree.parse(tmp_path / "said.svg").iter(f"{SVG}text")]
    assert texts[0].startswith("$ ")
    assert texts[-3:] == ["a < b", "x" * 120, "x" * 10]
