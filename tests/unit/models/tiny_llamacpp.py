"""The tiny Qwen2 in llama.cpp; a test that uses it is skipped where llama-cpp-python is not installed."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from omnidraft.models.llamacpp.context import LlamaModel
from omnidraft.models.llamacpp.target import LlamaCppTarget
from tests.tiny_gguf import write_gguf
from tests.unit.models.tiny import tiny_model


def require_llamacpp() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; `make test-llamacpp` builds it")


@lru_cache(maxsize=1)
def tiny_llamacpp_model() -> LlamaModel:
    """In float32. The file may go once it is mapped."""
    require_llamacpp()
    with TemporaryDirectory() as folder:
        return LlamaModel(write_gguf(tiny_model("qwen2"), Path(folder) / "tiny.gguf"))


def tiny_llamacpp_target() -> LlamaCppTarget:
    """With keys in float32, so that its logits can be compared with those of transformers."""
    return LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4, bits=32)
