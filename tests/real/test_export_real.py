"""SmolLM2-135M, exported, drafts for a real target in transformers and in llama.cpp's own server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft import config
from omnidraft.assembly.export import export_snapshot
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.models.catalog.store import gguf_path, resolve
from omnidraft.system import default_home
from pipelines.lib.llama_build import VERSION, LlamaPrograms

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TARGET, DRAFTER = "qwen2.5-coder-0.5b", "smollm2-135m"
PROMPT = "def greatest_common_divisor(first, second):\n"
NUM_TOKENS = 16
START_S = 300.0
SETTINGS = config.load(None, {}, models={"target": TARGET, "drafter": DRAFTER})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    export_snapshot(SETTINGS, "base", "hf", root / "hf")
    export_snapshot(SETTINGS, "base", "gguf", root / "gguf")
    export_snapshot(SETTINGS, "base", "gguf-target-vocab", root / "draft")
    return root


def test_transformers_text_is_the_targets_whoever_assists(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(TARGET))
    own = AutoTokenizer.from_pretrained(exported / "hf")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (resolve(TARGET), exported / "hf")
    )
    asked = tokenizer(PROMPT, return_tensors="pt")
    limits: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "repetition_penalty": 1.0}
    plain = target.generate(**asked, **limits)
    universal = {"assistant_model": drafter, "tokenizer": tokenizer, "assistant_tokenizer": own}
    assert target.generate(**asked, **limits, **universal).tolist() == plain.tolist()
    likeliest = {"do_sample": True, "top_k": 1, "top_p": 1.0, "temperature": 1.0}  # token-level intersection
    assert target.generate(**asked, **(limits | likeliest), **universal).tolist() == plain.tolist()


def test_a_gguf_file_keeps_the_tokenizer_and_the_settings_of_the_makers(exported: Path) -> None:
    base, made = (gguf.GGUFReader(path) for path in (gguf_path(DRAFTER), exported / "gguf" / "gguf.gguf"))
    changed = {"GGUF.kv_count", "GGUF.tensor_count", "general.file_type"}
    names = base.fields.keys() - changed
    assert made.fields.keys() - changed == names
    assert all(made.fields[name].contents() == base.fields[name].contents() for name in names)


def test_llama_cpps_server_runs_the_gguf_file_and_drafts_with_the_one_in_the_targets_vocabulary(
    exported: Path, tmp_path: Path
) -> None:
    programs = LlamaPrograms(default_home() / "llama-server" / VERSION / "bin")
    if not programs.server.exists():
        pytest.skip(f"llama.cpp's server was not built: there is no {programs.server}")
    target = ("--model", gguf_path(TARGET))
    draft = ("--model-draft", exported / "draft" / "draft.gguf", "--spec-type", "draft-simple")
    plain, drafted, own = (
        completion(programs, tmp_path / name, arguments)
        for name, arguments in (
            ("plain", target),
            ("drafted", (*target, *draft)),
            ("own", ("--model", exported / "gguf" / "gguf.gguf")),
        )
    )
    print(json.dumps(drafted["timings"]), own["content"])
    assert drafted["content"] == plain["content"]
    assert drafted["timings"]["draft_n"] > 0
    tokenizer = AutoTokenizer.from_pretrained(exported / "hf")
    drafter = AutoModelForCausalLM.from_pretrained(exported / "hf", dtype=torch.float32)
    asked = tokenizer(PROMPT, return_tensors="pt")
    ids = drafter.generate(**asked, do_sample=False, max_new_tokens=NUM_TOKENS)[0, asked["input_ids"].shape[1] :]
    assert own["content"] == tokenizer.decode(ids)


def completion(programs: LlamaPrograms, folder: Path, arguments: tuple[object, ...]) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": NUM_TOKENS, "temperature": 0}
    with llama_server(programs, folder, arguments) as url:
        answer: dict[str, Any] = httpx.post(f"{url}/completion", json=body, timeout=300).raise_for_status().json()
    return answer


@contextmanager
def llama_server(programs: LlamaPrograms, folder: Path, arguments: tuple[object, ...]) -> Iterator[str]:
    """Its URL."""
    folder.mkdir()
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ["--host", "127.0.0.1", "--port", port, "--no-ui", "--ctx-size", 512, "--parallel", 1, "--threads", 1]
    command = [str(each) for each in (programs.server, *options, *arguments)]
    with LocalCluster(folder) as cluster:
        cluster.start("llama-server", command)
        cluster.wait_for(lambda: is_serving(url, "/health"), "serving llama-server", START_S)
        yield url
