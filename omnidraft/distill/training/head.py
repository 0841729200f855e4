"""The acceptance head learns which drafted tokens were accepted: binary cross-entropy on labels from traces.

The drafter learns from every record, and the head in between, from records of the replay buffer with the drafter frozen
as it is then.
Rejected tokens are fewer than accepted ones and weigh more, so the head's numbers are no probabilities but lower, by
log(REJECTED_WEIGHT) in the logit: chains end earlier.
Shapes: N drafted tokens, H hidden size.
Source: docs/algorithms.md, section 8; the schedule is OmniDraft's, https://arxiv.org/abs/2507.02659, algorithm 4; the
loss is that of SpecDec++, https://arxiv.org/abs/2405.19715, as in its code,
https://github.com/Kaffaljidhmah2/SpecDec_pp.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from omnidraft.distill.examples.collate import join, pack
from omnidraft.distill.examples.targets import AcceptanceTargets, Array
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.resume_tensors import (
    Parameters,
    adam_state,
    check_shapes,
    copy_into,
    load_adam_state,
    master_weights,
)
from omnidraft.distill.training.gradients import GRAD_CLIP
from omnidraft.ports import TrainableDrafter, TrainableHead

logger = logging.getLogger(__name__)


LOSS = "head"
"""The name of the head's loss in a step's report."""
REJECTED_WEIGHT = 6.0
"""The weight of a rejected token relative to an accepted one; SpecDec++'s."""
LEARNING_RATE = 1e-3
_PREFIX = "head."


class HeadTrainer:
    """One head and its optimizer. In a step: `gradients`, then `optimizer.step`."""

    def __init__(self, head: TrainableHead) -> None:
        self._head = head
        self._trained = head.trained()
        self._new = self.serving_tensors()
        self.optimizer = torch.optim.AdamW(self._trained.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def gradients(self, model: TrainableDrafter, examples: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """Compute the gradient of the mean loss with the drafter frozen.

        Returns:
            The loss, {} without drafted tokens, and the norm of the gradient before clipping.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total_weight = sum(float(_weights(each.acceptance.label_N).sum()) for each in examples)
        if not total_weight:
            return {}, 0.0
        total = 0.0
        for batch in pack(examples, model.precision):
            drafted: AcceptanceTargets[Tensor] = join(batch, [each.acceptance for each in batch.examples])
            with torch.no_grad():
                hidden_NH = model.hidden(batch.texts())[drafted.row_N].float()
            logit_N, label_N = self._head.logits(hidden_NH, drafted.log_q_N), drafted.label_N
            loss_N = label_N * softplus(-logit_N) + (_weights(label_N) - label_N) * softplus(logit_N)
            loss = loss_N.sum() / total_weight
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(list(self._trained.values()), GRAD_CLIP).item()
        return {LOSS: total}, norm

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


def _weights(label_N: Array) -> Array:
    """Return the weight of each drafted token: of its accepted and of its rejected part together."""
    return label_N + REJECTED_WEIGHT * (1 - label_N)


def _has_head(state: Mapping[str, Tensor]) -> bool:
    return any(name.startswith(_PREFIX) for name in state)


def load_serving_tensors(drafter: Parameters, head: HeadTrainer | None, tensors: Mapping[str, Tensor]) -> None:
    """Take serving tensors as master weights. Raises ConfigError when they do not fit; then nothing changed."""
    if head:
        head.check_serving(tensors)
    copy_into(drafter, tensors)
    if head:
        head.start_from(tensors)


def load_training_state(
    drafter: Parameters, optimizer: torch.optim.Optimizer, head: HeadTrainer | None, tensors: Mapping[str, Tensor]
) -> None:
    """Take master weights and optimizers. Raises ConfigError when they do not fit; then nothing changed."""
    if head:
        head.check_state(tensors)
    load_adam_state(drafter, optimizer, tensors)
    if head:
        head.load_state(tensors)
