"""omnidraft: speculative decoding that works across tokenizers and keeps learning while it serves."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnidraft.llm import LLM, CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Load the Python API when it is first used: importing the package costs nothing."""
    if name in __all__:
        from omnidraft import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
