"""vLLM's worker with one addition: the proposer learns what each request says about its drafting.

vLLM passes a proposer token ids only. `vllm serve ... --worker-cls omnidraft.hosts.vllm_worker.Worker` lets it read the
extra arguments of the request in each row: `vllm_xargs` of the OpenAI server, `extra_args` of SamplingParams.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from omnidraft.hosts.vllm import VllmProposer

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class Worker(PlatformWorker):
    """The worker of CUDA, ROCm or a processor, which vLLM makes because `--worker-cls` names it."""

    def init_device(self) -> None:
        """Make the model runner, as the platform's worker does, and show its requests to the proposer."""
        super().init_device()
        proposer = getattr(self.model_runner, "drafter", None)
        if isinstance(proposer, VllmProposer):
            proposer.read_options_from(self._arguments)

    def _arguments(self, row: int) -> Mapping[str, Any] | None:
        """Return the extra arguments of the request in this row of the batch."""
        runner: Any = self.model_runner
        params = runner.requests[runner.input_batch.req_ids[row]].sampling_params
        arguments: Mapping[str, Any] | None = None if params is None else params.extra_args
        return arguments
