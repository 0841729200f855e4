"""Our speculator of V2's kind, on the tensors that the V2 model runner keeps."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm


@dataclass
class OnDevice:
    """Stands for vLLM's StagedWriteTensor."""

    gpu: torch.Tensor


@dataclass
class Requests:
    """The part of vLLM's RequestState that is read: four slots."""

    all_token_ids: OnDevice
    total_len: OnDevice


@dataclass
class Batch:
    """The part of vLLM's InputBatch that is read."""

    idx_mapping_np: np.ndarray
    num_reqs: int


@dataclass
class Counting:
    """Proposes what would count on, for as many texts as emitted anything."""

    seen: list[Any] = field(default_factory=list)

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any) -> list[list[int]]:
        texts = [ids[:length].tolist() for ids, length in zip(token_ids_cpu, num_tokens_no_spec, strict=True)]
        self.seen.append((sampled_token_ids, texts))
        return [[emitted[-1] + 1, emitted[-1] + 2] if emitted else [] for emitted in sampled_token_ids]


def test_every_request_gets_its_drafts_and_the_last_token_where_there_are_fewer() -> None:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from omnidraft.hosts.vllm_v2 import Speculator

    ids = torch.zeros(4, 8, dtype=torch.int32)
    ids[2, :4], ids[0, :3] = torch.tensor([1, 2, 10, 11]), torch.tensor([5, 6, 7])
    requests = Requests(OnDevice(ids), OnDevice(torch.tensor([3, 0, 4, 0], dtype=torch.int32)))
    proposer = Counting()
    speculator = Speculator(proposer, requests, num_tokens=3, max_num_reqs=4, device=torch.device("cpu"))
    assert isinstance(speculator, BaseSpeculator)
    batch = Batch(np.array([2, 0]), 2)
    named = dict.fromkeys(list(inspect.signature(BaseSpeculator.propose).parameters)[2:])
    named |= {"num_sampled": torch.tensor([2, 0]), "dummy_run": False}
    positional = [named[name] for name in list(named)[:9]]
    for arguments, more in (([], named), (positional, {"num_speculative_tokens": 3})):
        drafts = speculator.propose(batch, *arguments, **more)
        assert drafts.tolist() == [[12, 13, 11], [7, 7, 7]]
    assert proposer.seen == 2 * [([[10, 11], []], [[1, 2, 10, 11], [5, 6, 7]])]
    assert speculator.propose(batch, dummy_run=True).shape == (2, 3)
    assert len(proposer.seen) == 2
