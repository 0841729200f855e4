"""Low-rank factors of single tenants, learned from each tenant's records only while the drafter's weights stay.

Factors go on from where they were with the snapshot before, on the weights of the one that is being made, with a fresh
optimizer; so they depend on those weights, the factors before, the tenant's records in the replay buffer, the seed and
the number of the step, and a resumed run makes the same ones.
Shapes: N output channels, K input channels, R rank.
Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.ingest.record_disposition import hash_64
from omnidraft.distill.training.gradients import GRAD_CLIP, Terms, backward, num_positions
from omnidraft.distill.training.replay_buffer import ReplayBuffer
from omnidraft.ports import TrainableDrafter
from omnidraft.snapshots.low_rank import A, B
from omnidraft.snapshots.tenant_factors import FACTORS, FittedFactors, from_tensor, tensor_name, to_tensor
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

ReadExamples = Callable[[Sequence[TraceRecord]], Sequence[TrainingExample]]
"""Returns the training examples of the records that can be read."""


@dataclass(frozen=True)
class FactorPlan:
    """The plan by which factors are fitted."""

    rank: int = 8
    """Higher learns more of a tenant, and takes memory and time of drafter steps in proportion."""
    steps: int = 8
    """Steps for each tenant with every snapshot, which waits for all of them."""
    learning_rate: float = 1e-3


class FactorTrainer:
    """The factors of all tenants that have some; they learn only when `fit` is called. One thread."""

    def __init__(
        self,
        model: TrainableDrafter,
        plan: FactorPlan,
        seed: int,
        terms: Terms,
        replay: ReplayBuffer,
        examples: ReadExamples,
    ) -> None:
        self._model, self._terms, self._replay, self._examples = model, terms, replay, examples
        self.plan, self._seed = plan, seed
        self._fitted: dict[str, FittedFactors] = {}

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have factors."""
        return frozenset(self._fitted)

    def num_kept(self) -> dict[str, int]:
        """Return the number of records that the factors of each tenant can learn from."""
        return self._replay.num_records()

    def fit(self, tenant: str, step: int) -> FittedFactors:
        """Let a tenant's factors learn on the weights that the model has now; return them in float32.

        Args:
            step: the number of the learner's step, which decides what is drawn.
        """
        before = self._fitted.get(tenant)
        first = self._initial(tenant) if before is None else before.tensors
        # in one order, on which the last bits of the gradient's norm depend
        factors = {name: nn.Parameter(first[name].detach().clone()) for name in sorted(first)}
        times_ms = [] if before is None else [before.since_ms]
        optimizer = torch.optim.AdamW(factors.values(), lr=self.plan.learning_rate, weight_decay=0.0)
        with self._model.factored(factors):
            for number in range(self.plan.steps):
                records = self._replay.draw_of(tenant, step, number)
                times_ms += [record.time_ms for record in records]
                self._step(factors, optimizer, self._examples(records))
        version = 1 if before is None else before.version + 1
        fitted = FittedFactors(tenant, version, min(times_ms, default=0), _values(factors))
        self._fitted[tenant] = fitted
        return fitted

    def drop(self, is_dropped: Callable[[str, int], bool]) -> int:
        """Drop the factors of tenants (name, time of the oldest record), and return their number."""
        kept = {name: each for name, each in self._fitted.items() if not is_dropped(name, each.since_ms)}
        num_dropped = len(self._fitted) - len(kept)
        self._fitted = kept
        return num_dropped

    def state(self) -> dict[str, Tensor]:
        """Return the factors as tensors of a snapshot's resume part."""
        ordered = sorted(self._fitted.values(), key=lambda each: each.tenant)
        return {tensor_name(number): to_tensor(each) for number, each in enumerate(ordered)}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from where `state` was taken; factors of another rank or model begin anew. Raises
        SnapshotCorrupt."""
        found = [from_tensor(tensor) for name, tensor in tensors.items() if name.startswith(FACTORS)]
        shapes = {name: tensor.shape for name, tensor in self._initial("").items()}
        self._fitted = {
            each.tenant: each
            for each in found
            if {name: tensor.shape for name, tensor in each.tensors.items()} == shapes
        }

    def _step(
        self, factors: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, examples: Sequence[TrainingExample]
    ) -> None:
        num_by_loss = num_positions(examples, self._terms)
        if not any(num_by_loss.values()):
            return
        optimizer.zero_grad(set_to_none=True)
        backward(self._model, examples, self._terms, num_by_loss)
        norm = nn.utils.clip_grad_norm_(factors.values(), GRAD_CLIP)
        if norm.isfinite():
            optimizer.step()
        else:
            logger.warning("a step of a tenant's factors is skipped: its gradient is not finite")

    def _initial(self, tenant: str) -> dict[str, Tensor]:
        """Return factors whose product is zero; they depend on the seed and the tenant."""
        generator = torch.Generator().manual_seed(hash_64(f"{self._seed} {tenant}"))
        rank, factors = self.plan.rank, {}
        for name, (channels, inputs) in sorted(self._model.linear_shapes().items()):
            uniform_RK = torch.rand(rank, inputs, generator=generator, dtype=torch.float32)
            factors[name + A] = (2 * uniform_RK - 1) / sqrt(inputs)
            factors[name + B] = torch.zeros(channels, rank, dtype=torch.float32)
        return factors


def serving_factors(fitted: FittedFactors) -> FittedFactors:
    """Return the factors as workers get them, in bfloat16."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in fitted.tensors.items()}
    return FittedFactors(fitted.tenant, fitted.version, fitted.since_ms, rounded)


def _values(factors: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in factors.items()}
