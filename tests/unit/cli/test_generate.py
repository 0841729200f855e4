"""What `omnidraft generate` refuses in the file of a schema, before it looks for models."""

from pathlib import Path

import pytest

from tests.cli_runs import run_cli


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "can't decode"),
        (b"[1", "not JSON"),
        (b"[1]", "must be an object"),
        (b'{"type": 3}', "type must be a string"),
    ],
    ids=["missing", "no text", "no JSON", "no object", "no schema"],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_by_the_name_of_its_file(
    content: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    asked = ("generate", "--prompt", "x", "--target", "no-such-model", "--json-schema", file)
    done = run_cli(asked, monkeypatch, capsys)
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert words in done.stderr
