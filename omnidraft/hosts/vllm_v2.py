"""Our proposer inside vLLM's V2 model runner, as a speculator of its own kind.

V2 makes its speculators by a fixed list of methods, and `custom_class` is none of them. So vLLM
is told `ngram_gpu`, whose speculator needs nothing, and this worker puts ours into its place:
`--speculative-config '{"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
--worker-cls omnidraft.hosts.vllm_v2.Worker`. V2 scores so many drafts for every request in every pass: where we propose
fewer, the last token fills the row. Not run on an accelerator here; V2 needs Triton, which processors lack.
Shapes: R requests of a pass, S slots of requests, L longest text, K drafts of a request.
"""

from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

from omnidraft.errors import ConfigError
from omnidraft.hosts.vllm import VllmProposer


class V1Proposer(Protocol):
    """A proposer as V1 calls it."""

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any) -> list[list[int]]:
        """See VllmProposer."""


class Speculator(BaseSpeculator):
    """Implements V2's interface over a proposer of V1. It reads emitted tokens on the processor, so a round waits for
    the pass before it."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, proposer: V1Proposer, req_states: Any, *, num_tokens: int, max_num_reqs: int, device: torch.device
    ) -> None:
        """Propose `num_tokens` for each request. `req_states` are the model runner's."""
        self._proposer = proposer
        self._req_states = req_states
        self._drafts_SK = torch.zeros(max_num_reqs, num_tokens, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """See BaseSpeculator: there is nothing to capture."""

    def capture(self) -> None:
        """See BaseSpeculator."""

    @torch.inference_mode()
    def propose(  # type: ignore[override]
        self,
        input_batch: Any,
        attn_metadata: Any = None,
        slot_mappings: Any = None,
        last_hidden_states: Any = None,
        aux_hidden_states: Any = None,
        num_sampled: torch.Tensor | None = None,
        *model_inputs: Any,
        dummy_run: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Return the drafts [R, K] of this batch; called after the pass, with its emitted tokens in `req_states`. What
        a model of vLLM's own would read is ignored."""
        drafts_RK = self._drafts_SK[: input_batch.num_reqs]
        if dummy_run or num_sampled is None:
            return drafts_RK
        slots_R = input_batch.idx_mapping_np[: input_batch.num_reqs]
        lengths_R = self._req_states.total_len.gpu.cpu().numpy()[slots_R]
        ids_RL = self._req_states.all_token_ids.gpu[slots_R, : int(lengths_R.max())].cpu().numpy()
        rows = zip(ids_RL, lengths_R, num_sampled.cpu().numpy(), strict=True)
        emitted = [ids[length - num : length].tolist() for ids, length, num in rows]
        drafts = self._proposer.propose(emitted, lengths_R, ids_RL)
        drafts_RK.copy_(torch.from_numpy(_filled(drafts, ids_RL[np.arange(len(slots_R)), lengths_R - 1], drafts_RK)))
        return drafts_RK


class Worker(PlatformWorker):
    """vLLM's worker, whose V2 model runner drafts with our proposer."""

    def init_device(self) -> None:
        """Make the model runner, and give it our speculator. Raises ConfigError where it has none to replace."""
        super().init_device()
        runner: Any = self.model_runner
        speculation = self.vllm_config.speculative_config
        if not self.use_v2_model_runner or speculation is None or speculation.method != "ngram_gpu":
            raise ConfigError("omnidraft.hosts.vllm_v2.Worker is for the V2 model runner with method 'ngram_gpu'")
        runner.speculator = Speculator(
            VllmProposer(self.vllm_config),
            runner.req_states,
            num_tokens=speculation.num_speculative_tokens,
            max_num_reqs=runner.max_num_reqs,
            device=runner.device,
        )


def _filled(drafts: list[list[int]], last_R: np.ndarray, drafts_RK: torch.Tensor) -> np.ndarray:
    """Return the drafts as rows of one length, filled with the last token of each text."""
    filled_RK = np.repeat(last_R[:, None].astype(np.int64), drafts_RK.shape[1], axis=1)
    for row, tokens in zip(filled_RK, drafts, strict=True):
        row[: len(tokens)] = tokens
    return filled_RK
