"""vLLM's worker with one addition: the proposer learns what each request says about its drafting.

vLLM passes a proposer token ids only. `vllm serve ... --worker-cls omnidraft.hosts.vllm_worker.Worker` lets it read the
extra arguments of the request in each row: `vllm_xargs` of the OpenAI server, `extra_args` of SamplingParams.
"""

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from omnidraft.decode.external.request_options import RequestOptions, read_options
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
            proposer.read_options_from(BatchOptions(self.model_runner).of_row)


class BatchOptions:
    """The options of the requests in a model runner's batch, each read once."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._options: dict[str, RequestOptions] = {}

    def of_row(self, row: int) -> RequestOptions:
        """Return the options of the request in this row."""
        req_id, requests = self._runner.input_batch.req_ids[row], self._runner.requests
        if req_id not in self._options:
            self._options = {known: options for known, options in self._options.items() if known in requests}
            params = requests[req_id].sampling_params
            self._options[req_id] = read_options(None if params is None else params.extra_args)
        return self._options[req_id]
