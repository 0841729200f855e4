"""A tokenizer from the cache is the one that transformers loads, and a damaged file costs time only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from omnidraft.models.hf.tokenizer import HfTokenizer, load_tokenizer
from omnidraft.models.hf.tokenizer_cache import resolve

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a <|im_end|> b"}]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "tokenizers"


def test_it_renders_and_encodes_as_transformers_does(tiny_models, cache):
    for folder in tiny_models:
        theirs = AutoTokenizer.from_pretrained(folder)
        for _ in range(2):
            ours = resolve(folder, cache)
            assert ours.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
            assert ours.special_tokens == theirs.special_tokens_map
            assert ours.prefix_ids == theirs.encode("", add_special_tokens=True)


def test_what_a_tokenizer_puts_behind_a_text_does_not_stand_before_a_prompt(tiny_models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_models[0])
    first, last = ((text, tokenizer.convert_tokens_to_ids(text)) for text in tokenizer.all_special_tokens[:2])
    template = TemplateProcessing(single=f"{first[0]} $A {last[0]}", special_tokens=[first, last])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "ends")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ends").encode("ab")
    assert theirs[-1] == last[1]
    assert HfTokenizer(tmp_path / "ends").prompt_ids("ab") == theirs[:-1]


def test_a_second_start_gives_an_equal_tokenizer_without_transformers(tiny_models, cache):
    folder = tiny_models[0]
    first, uncached = load_tokenizer(folder, cache), load_tokenizer(folder)
    second = load_tokenizer(folder, cache)
    assert first.fingerprint == second.fingerprint == uncached.fingerprint
    assert second.vocabulary == uncached.vocabulary
    assert second.chat_prompt_ids(CHAT) == uncached.chat_prompt_ids(CHAT)
    code = (
        "import sys; from pathlib import Path; from omnidraft.models.hf.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(len(tokenizer.vocabulary), 'transformers' in sys.modules)"
    )

    ran = subprocess.run([sys.executable, "-c", code, folder, cache], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(len(uncached.vocabulary)), "False"]


@pytest.mark.parametrize("more", [-40, 0, 25])
def test_a_head_may_have_fewer_rows_than_there_are_tokens_or_more(tiny_models, cache, more):
    whole = HfTokenizer(tiny_models[0], cache=cache).vocabulary
    size = len(whole) + more
    sized = HfTokenizer(tiny_models[0], size, cache=cache).vocabulary
    assert sized.token_bytes == (*whole.token_bytes, *[b""] * 25)[:size]
    assert (sized.roles, sized.special_ids) == (whole.roles, whole.special_ids)


@pytest.mark.parametrize("how", ["empty", "truncated", "flipped", "another file's"])
def test_a_damaged_file_is_replaced(tiny_models, cache, how):
    folder = tiny_models[0]
    expected = resolve(folder, cache)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    at = len(content) // 2
    damaged = {
        "empty": b"",
        "truncated": content[:-10],
        "flipped": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        "another file's": b'{"key": 1}\n{}',
    }
    file.write_bytes(damaged[how])
    assert resolve(folder, cache) == expected
    assert file.read_bytes() == content


def test_a_changed_folder_is_read_anew(tiny_models, cache, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_models[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert resolve(folder, cache).chat_template
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert resolve(folder, cache).render(CHAT) == "Be brief."
    os.utime(template)
    assert len(list(cache.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_time_only(tiny_models, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    assert resolve(tiny_models[0], tmp_path / "file") == resolve(tiny_models[0])
    assert "convert the tokenizer" in caplog.text
