"""The proposer inside vLLM: the class that `--speculative-config` names, which vLLM makes in its worker process.

`vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "omnidraft.hosts.vllm.Proposer",
"num_speculative_tokens": 5}'`; settings from the environment and the file that OMNIDRAFT_CONFIG names (docs/vllm.md).
vLLM's own rejection sampler verifies: exact in distribution, with its own noise.
Shapes: N rows of a pass, V vocabulary.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from omnidraft import assembly, config
from omnidraft.config import Settings
from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions
from omnidraft.decode.external.round_scheduler import TRACE_ROWS
from omnidraft.errors import ConfigError
from omnidraft.hosts.process import formatter
from omnidraft.models.probe import choice
from omnidraft.telemetry.exposition import Exposition
from omnidraft.telemetry.metric_definitions import PROPOSER, WORKER
from omnidraft.telemetry.metrics import PrometheusMetrics

SUPPORTED = ("0.32", "0.33")
"""The minor versions of vLLM whose proposer interface this implements; vLLM calls it experimental."""
WORKER_CLASS = "omnidraft.hosts.vllm_worker.Worker"
"""The worker class with which a proposer sees the requests of its rows."""
CONFIG_VARIABLE = "OMNIDRAFT_CONFIG"
_TICK_S = 1.0

logger = logging.getLogger(__name__)


class VllmProposer:
    """vLLM's proposer interface, of which it documents `propose` and calls `load_model` too."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Raises OmnidraftError; vLLM shows its message and stops."""
        require_version(vllm.__version__)
        choice.torch_products()  # before vLLM's own matrix products, which use the same oneDNN
        self._batching: assembly.Batching | None = None
        self._logits = LogitsTap(0)
        self._options_of: Callable[[int], RequestOptions] = lambda row: NO_OPTIONS
        if get_tp_group().rank_in_group != 0:
            return  # vLLM takes the first rank's drafts
        _configure_logging()
        settings = settings_for(vllm_config)
        metrics = PrometheusMetrics({**WORKER, **PROPOSER}, settings.models.targets)
        num_tokens = min(vllm_config.speculative_config.num_speculative_tokens, settings.decode.num_draft_tokens)
        has_tenants = vllm_config.parallel_config.worker_cls == WORKER_CLASS
        self._batching = assembly.batching(settings, metrics, num_tokens=num_tokens, has_tenants=has_tenants)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        if self._batching.producer is not None:
            self._logits = LogitsTap(TRACE_ROWS)
        if (port := settings.metrics.vllm_port) is not None:
            Exposition(metrics.registry, settings.metrics, port, settings.worker.allowed_hosts)
        self._start(settings)
        models, snapshot = settings.models, self._batching.slot.current
        logger.info(
            "drafting up to %d tokens for %s with %s, snapshot %s",
            num_tokens,
            models.target,
            models.drafter,
            snapshot.snapshot_id,
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Called once, after the target is loaded: hook its logits layer, from which traces are made."""
        layer = getattr(target_model, "logits_processor", None)
        if self._logits.max_rows and isinstance(layer, torch.nn.Module):
            layer.register_forward_hook(self._logits.on_forward)
        elif self._logits.max_rows:
            logger.info("%s has no layer for logits: traces have emitted tokens only", type(target_model).__name__)

    def read_options_from(self, options_of: Callable[[int], RequestOptions]) -> None:
        """Draft for each row as its request says, from now on; `vllm_worker.py` calls this."""
        self._options_of = options_of

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafted tokens for every sequence of this pass. Called after the pass, with its emitted tokens."""
        if self._batching is None:
            return [[] for _ in sampled_token_ids]
        with self._lock:
            return self._batching.rounds.next(
                sampled_token_ids,
                lambda row: token_ids_cpu[row, : num_tokens_no_spec[row]],
                self._logits.take,
                self._options_of,
            )

    def close(self) -> None:
        """Record the sequences in progress and stop; called when the process ends."""
        if self._batching is None or self._stop.is_set():
            return
        self._stop.set()
        with self._lock:
            self._batching.rounds.close()
        if self._batching.producer is not None:
            self._batching.producer.close()

    def _start(self, settings: Settings) -> None:
        assert self._batching is not None
        threading.Thread(target=self._tick, name="omnidraft-tick", daemon=True).start()
        if (refresher := self._batching.updater) is not None:
            threading.Thread(target=refresher.run, args=(self._stop,), name="omnidraft-refresher", daemon=True).start()
        Finalize(None, self.close, exitpriority=10)

    def _tick(self) -> None:
        assert self._batching is not None
        while not self._stop.wait(_TICK_S):
            with self._lock:
                self._batching.rounds.tick()


class LogitsTap:
    """Keeps the logits of the last target pass."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._logits_NV: torch.Tensor | None = None
        self._num_passes = 0

    def on_forward(self, _layer: torch.nn.Module, _inputs: Any, logits_NV: torch.Tensor | None) -> None:
        """Copy the logits, since vLLM changes them in place. A forward hook."""
        self._num_passes += 1
        is_first = self._num_passes == 1 and logits_NV is not None and len(logits_NV) <= self.max_rows
        self._logits_NV = logits_NV.detach().clone() if is_first and logits_NV is not None else None

    def take(self, num_rows: Sequence[int]) -> Sequence[torch.Tensor] | None:
        """Return the logits [N, V] of each sequence of the last pass; None when they cannot be attributed: there were
        other passes since the last call, or vLLM scored fewer drafts than it was given."""
        logits_NV, num_passes = self._logits_NV, self._num_passes
        self._logits_NV, self._num_passes = None, 0
        if logits_NV is None or num_passes != 1 or len(logits_NV) != sum(num_rows):
            return None
        return logits_NV.split(list(num_rows))


def require_version(version: str) -> None:
    """Raises ConfigError unless this vLLM has the interface of SUPPORTED."""
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        raise ConfigError(
            f"this omnidraft drafts inside vLLM {' and '.join(SUPPORTED)}, found {version}: pip install "
            f"'vllm=={SUPPORTED[0]}.*', or take the omnidraft that names your version in docs/vllm.md"
        )


def settings_for(vllm_config: VllmConfig) -> Settings:
    """Return the settings of this process. The target is the model that vLLM serves; `models.target` only names it.

    Raises:
        ConfigError: a setting is wrong, or `models.target` has other tokens than what vLLM serves.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    settings = config.load(Path(path) if path else None)
    served, models = str(vllm_config.model_config.tokenizer), settings.models
    name = models.target if "target" in models.model_fields_set else served
    if not _have_same_tokens(name, served):
        raise ConfigError(f"models.target is {name}, but vLLM serves {served}, which has other tokens")
    alone = models.model_copy(update={"target": name, "more_targets": ()})
    return settings.model_copy(update={"models": alone})


def _have_same_tokens(name: str, other: str) -> bool:
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer

    folders = {store.resolve_tokenizer(name), store.resolve_tokenizer(other)}
    return len({load_tokenizer(folder).vocabulary.token_bytes for folder in folders}) == 1


def _configure_logging() -> None:
    """Log beside vLLM, unless a handler is configured already."""
    ours = logging.getLogger("omnidraft")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(formatter("vllm"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


Proposer = VllmProposer
"""The name under which deployed `--speculative-config` settings know it."""
