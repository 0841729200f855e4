"""A GGUF file is read whole, with all its parts, or refused in one clear sentence; values are those of the package."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import ModelError
from omnidraft.models.catalog import gguf_file
from omnidraft.models.catalog.gguf_file import GgufFile
from tests.tiny_gguf import write_gguf, write_tokenizer_gguf, written
from tests.unit.models.tiny import tiny_model

BLOCKWISE = [
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_K,
    gguf.GGMLQuantizationType.Q5_K,
    gguf.GGMLQuantizationType.Q6_K,
]
OTHERS = [
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
    gguf.GGMLQuantizationType.MXFP4,
]


@settings(max_examples=20)
@given(
    kind=st.sampled_from(BLOCKWISE),
    shape=st.sampled_from([(1,), (3,), (gguf_file.ROWS + 1,), (2, 5), (2, gguf_file.ROWS)]),
    num_blocks=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_blocks_give_the_values_of_the_package_gguf(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], num_blocks: int, seed: int
) -> None:
    row_bytes = gguf.GGML_QUANT_SIZES[kind][1] * num_blocks
    data = np.random.default_rng(seed).integers(0, 256, (*shape, row_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # of random scales some are no numbers
        expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(gguf_file.dequantize(data, kind), expected)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_give_the_values_of_the_package_gguf(kind: gguf.GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    np.testing.assert_array_equal(gguf_file.dequantize(data, kind), gguf.quants.dequantize(data, kind))


def test_a_file_has_the_fields_and_tensors_that_the_package_reads(tmp_path: Path) -> None:
    file = write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    expected, found = gguf.GGUFReader(file), GgufFile(file)
    assert {name: found.get(name) for name in found.fields} == {
        name: field.contents() for name, field in expected.fields.items()
    }
    for tensor in expected.tensors:
        np.testing.assert_array_equal(found.values(tensor.name).numpy(), tensor.data)
        assert found.shape(tensor.name) == tensor.data.shape


def _in_two_parts(folder: Path) -> list[Path]:
    """The first has the metadata, as llama.cpp's own tool splits a file."""
    whole = gguf.GGUFReader(write_gguf(tiny_model("qwen2"), folder / "whole.gguf"))
    parts = [folder / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part, tensors in zip(parts, (whole.tensors[:5], whole.tensors[5:]), strict=True):
        writer = gguf.GGUFWriter(part, "qwen2")
        writer.add_uint16("split.count", 2)
        if part == parts[0]:
            writer.add_block_count(3)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data)
        written(writer, part)
    return parts


@pytest.mark.parametrize("given", [0, 1])
def test_any_part_of_a_file_stands_for_all_of_it(given: int, tmp_path: Path) -> None:
    parts = _in_two_parts(tmp_path)
    whole, found = GgufFile(tmp_path / "whole.gguf"), GgufFile(parts[given])
    assert found.tensors.keys() == whole.tensors.keys()
    assert found.get("qwen2.block_count") == 3
    for name in whole.tensors:
        np.testing.assert_array_equal(found.values(name).numpy(), whole.values(name).numpy())


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    parts = _in_two_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"^tiny-00002-of-00002\.gguf is missing"):
        GgufFile(parts[0])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_file_that_was_cut_is_said_to_end_early(share: float, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    write_tokenizer_gguf(tmp_path / "whole.gguf")
    shutil.copyfile(tmp_path / "whole.gguf", file)
    with file.open("r+b") as opened:
        opened.truncate(int(file.stat().st_size * share))
    with pytest.raises(ModelError, match=r"^cut\.gguf ends early, or is damaged; fetch it again$"):
        GgufFile(file)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a pointer of Git LFS"),
        (b"PK\x03\x04", "another kind of file"),
    ],
)
def test_what_is_no_gguf_file_is_said_to_be_what_it_is(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=rf"^x\.gguf is {kind}, and no GGUF file; fetch the file itself$"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("key", ["token_type", "merges", "tokens"])
def test_a_file_of_an_old_converter_is_told_by_what_it_lacks(key: str, tmp_path: Path) -> None:
    write_tokenizer_gguf(tmp_path / "old.gguf")
    file = GgufFile(tmp_path / "old.gguf")
    del file.fields[f"tokenizer.ggml.{key}"]
    with pytest.raises(
        ModelError, match=rf"^old\.gguf has no tokenizer\.ggml\.{key}: an old converter made it; take a"
    ):
        file.needed(f"tokenizer.ggml.{key}")
