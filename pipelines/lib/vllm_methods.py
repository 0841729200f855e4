"""vLLM with each way of drafting that is compared: its own, and ours.

vllm              plain decoding
vllm-ngram        what followed the same tokens before in the text
vllm-suffix       suffix decoding; needs `pip install arctic-inference==0.1.1` in vLLM's environment
vllm-tli          a draft model with use_heterogeneous_vocab: our drafter, as it comes
vllm+omnidraft    our proposer
vllm+omnidraft+traces    ... that also records traces into a SQLite log
"""

from pathlib import Path
from typing import Any

from omnidraft.config import Settings
from omnidraft.models.catalog import store
from pipelines.lib.vllm_server import custom_class

PLAIN = "vllm"
NAMES = (PLAIN, "vllm-ngram", "vllm-suffix", "vllm-tli", "vllm+omnidraft", "vllm+omnidraft+traces")
_NGRAM_SIZES = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
_NUM_TOKENS = {"vllm-ngram": 5, "vllm-tli": 5, "vllm-suffix": 32}
"""Draft tokens of vLLM's methods: its documentation's examples, and the depth of its suffix trees."""


def speculation(
    name: str, settings: Settings, folder: Path, *, num_tokens: int, snapshot: str | None = None
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the --speculative-config of a method, and the environment variables of our proposer.

    Args:
        folder: holds log and registry, where a method writes them.
        num_tokens: the maximum of our proposer.
        snapshot: what our proposer drafts with; None is the drafter as it comes.
    """
    match name:
        case "vllm":
            return None, {}
        case "vllm-ngram":
            return {"method": "ngram", "num_speculative_tokens": _NUM_TOKENS[name], **_NGRAM_SIZES}, {}
        case "vllm-suffix":
            return {"method": "suffix", "num_speculative_tokens": _NUM_TOKENS[name]}, {}
        case "vllm-tli":
            drafter = {"model": str(store.resolve(settings.models.drafter)), "use_heterogeneous_vocab": True}
            return {"method": "draft_model", "num_speculative_tokens": _NUM_TOKENS[name], **drafter}, {}
    return custom_class(num_tokens), _environment(name, settings, folder, snapshot)


def _environment(name: str, settings: Settings, folder: Path, snapshot: str | None) -> dict[str, str]:
    environment = {
        "OMNIDRAFT_MODELS__TARGET": settings.models.target,
        "OMNIDRAFT_MODELS__DRAFTER": settings.models.drafter,
        "OMNIDRAFT_RECORDER__ENABLED": str(name.endswith("+traces")).lower(),
        "OMNIDRAFT_LOG": f"sqlite:///{folder / 'log.db'}",
        "MLFLOW_TRACKING_URI": f"directory://{folder / 'registry'}",
    }
    if snapshot is not None:
        environment["OMNIDRAFT_WORKER__SNAPSHOT"] = snapshot
        environment["MLFLOW_TRACKING_URI"] = settings.registry.url
    return environment
