"""The acceptance head learns which drafted tokens were accepted: binary cross-entropy on labels from traces.

Three schedules: `joint` adds its loss to the drafter's in every step, and both learn from the sum; its gradient flows
on into the drafter's hidden states, as that of one loss over all weights does. `interleaved` lets the drafter learn
from every record, and the head in between, from records of the replay buffer with the drafter frozen as it is then.
`only` never changes the drafter.
Rejected tokens are fewer than accepted ones and weigh more; with a weight other than 1 the head's numbers are no
probabilities but lower, by log(weight) in the logit.
Shapes: G drafted tokens, N rows of hidden states or targets, H hidden size.
Source: docs/algorithms.md, section 8; the schedules are OmniDraft's, https://arxiv.org/abs/2507.02659, algorithms 3 and
4; the loss is that of SpecDec++, https://arxiv.org/abs/2405.19715, as in its code,
https://github.com/Kaffaljidhmah2/SpecDec_pp.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from omnidraft.distill.examples.collate import PackedBatch, join, pack
from omnidraft.distill.examples.targets import AcceptanceTargets, Array
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.resume_tensors import adam_state, check_shapes, copy_into, load_adam_state, master_weights
from omnidraft.distill.training.gradients import GRAD_CLIP
from omnidraft.ports import TrainableDrafter, TrainableHead

LOSS = "head"
"""The name of the head's loss in a step's report."""
LEARNING_RATE = 1e-3
REJECTED_WEIGHT = 6.0
"""The weight of a rejected guess relative to an accepted one, that of SpecDec++; higher ends chains earlier. With 1 the
head's outputs are calibrated probabilities."""
_PREFIX = "head."

logger = logging.getLogger(__name__)


class HeadTrainer:
    """One head and its optimizer. In a step: `begin`, `backward` for each pass, `finish`, then `optimizer.step`."""

    def __init__(self, head: TrainableHead) -> None:
        self._head = head
        self._trained = head.trained()
        self._new = self.serving_tensors()
        self.optimizer = torch.optim.AdamW(self._trained.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self._total_weight = self._sum = 0.0

    def begin(self, examples: Sequence[TrainingExample]) -> None:
        """Start a step over these examples."""
        self.optimizer.zero_grad(set_to_none=True)
        self._total_weight = sum(float(_weights(each.acceptance.soft_N).sum()) for each in examples)
        self._sum = 0.0

    def backward(self, batch: PackedBatch, row_N: Tensor, hidden_NH: Tensor) -> None:
        """Add the gradient of this batch's share of the loss, to the hidden states too if they require it.

        Args:
            row_N: the rows of the pass that the hidden states belong to, rising; drafted tokens at others are left out.
        """
        drafted: AcceptanceTargets[Tensor] = join(batch, [each.acceptance for each in batch.examples])
        known_G = torch.isin(drafted.row_N, row_N)
        if not known_G.any():
            return
        hidden_GH = hidden_NH[torch.searchsorted(row_N, drafted.row_N[known_G])].float()
        logit_G = self._head.logits(hidden_GH, drafted.log_q_N[known_G])
        label_G = drafted.soft_N[known_G]
        loss_G = label_G * softplus(-logit_G) + (_weights(label_G) - label_G) * softplus(logit_G)
        loss = loss_G.sum() / self._total_weight
        loss.backward()
        self._sum += loss.item()

    def finish(self) -> tuple[dict[str, float], float]:
        """Return the step's loss, {} without drafted tokens, and the norm of the gradient before clipping."""
        if all(parameter.grad is None for parameter in self._trained.values()):
            return {}, 0.0
        norm = torch.nn.utils.clip_grad_norm_(list(self._trained.values()), GRAD_CLIP).item()
        return {LOSS: self._sum}, norm

    def gradients(self, model: TrainableDrafter, examples: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """Compute `begin`, `backward` and `finish` with the drafter frozen."""
        self.begin(examples)
        for batch in pack(examples, model.precision) if self._total_weight else ():
            with torch.no_grad():
                hidden_NH = model.hidden(batch.texts())
            self.backward(batch, torch.arange(len(hidden_NH)), hidden_NH)
        return self.finish()

    def serving_tensors(self) -> dict[str, Tensor]:
        """Return the weights that a snapshot has beside the drafter's."""
        return {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    def start_from(self, serving: Mapping[str, Tensor]) -> None:
        """Take the head of a snapshot; that of one without a head is new. Raises ConfigError when it is of another
        shape."""
        copy_into(self._trained, self._weights_in(serving))

    def check_serving(self, serving: Mapping[str, Tensor]) -> None:
        """Raise ConfigError where `start_from` would."""
        check_shapes(self._trained, self._weights_in(serving))

    def _weights_in(self, serving: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._new if serving.keys().isdisjoint(self._trained) else serving

    def state(self) -> dict[str, Tensor]:
        """Return the weights and the optimizer's state; see Learner.state."""
        return adam_state(self._trained, self.optimizer, _PREFIX)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state`; a head that the snapshot does not have begins. See Learner.load_state."""
        if _has_head(tensors):
            load_adam_state(self._trained, self.optimizer, tensors, _PREFIX)
        else:
            logger.info("the snapshot has no acceptance head; one begins to learn")
            copy_into(self._trained, self._new)
            self.optimizer.state.clear()

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ConfigError where `load_state` would."""
        if _has_head(tensors):
            master_weights(self._trained, tensors, _PREFIX)


def _weights(label_G: Array) -> Array:
    """Return the weight of each drafted token: of its accepted and of its rejected part together."""
    return label_G + REJECTED_WEIGHT * (1 - label_G)


def _has_head(state: Mapping[str, Tensor]) -> bool:
    return any(name.startswith(_PREFIX) for name in state)
