"""The acceptance head learns which guesses were accepted: binary cross-entropy on labels from traces.

When: `joint` adds its loss to the drafter's in every step, and both learn from the sum; its gradient goes on into the
drafter's hidden states, as one loss over all weights does. `interleaved` lets the drafter learn from every record, and
the head in between, from records of the replay buffer with the drafter frozen as it is then. `only` never changes the
drafter.
Rejected guesses are fewer than accepted ones and weigh more; with a weight other than 1 the head's numbers are no
chances but lower, by log(weight) in the logit.
Shapes: G guesses, N rows of hidden states, H hidden size.
Source: the ways are named after OmniDraft's, https://arxiv.org/abs/2507.02659, algorithms 3 and 4; the loss is that of
SpecDec++, https://arxiv.org/abs/2405.19715, as in its code, https://github.com/Kaffaljidhmah2/SpecDec_pp.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from omnidraft.config import LearnerSettings
from omnidraft.distill.examples.acceptance_labels import AcceptanceExamples
from omnidraft.distill.examples.collate import PackedBatch, hidden_rows, pack
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.optimizer_state import adam_state, copy_into, load_adam_state
from omnidraft.ports import TrainableDrafter, TrainableHead

LOSS = "head"
"""Its name among the losses of a step."""
_PREFIX = "head."

logger = logging.getLogger(__name__)


class HeadTrainer:
    """One head and its optimizer. In a step: `begin`, `backward` for each pass, `finish`, then `optimizer.step`."""

    def __init__(self, head: TrainableHead, settings: LearnerSettings) -> None:
        self._head, self._settings = head, settings
        self._trained = head.trained()
        self.optimizer = torch.optim.AdamW(
            self._trained.values(), lr=settings.head_learning_rate, weight_decay=0.0, fused=True
        )
        self._total_weight = self._sum = 0.0

    def begin(self, records: Sequence[TrainingExample]) -> None:
        """The records of this step."""
        self.optimizer.zero_grad(set_to_none=True)
        self._total_weight = sum(float(self._weights(record.guesses).sum()) for record in records)
        self._sum = 0.0

    def backward(self, group: PackedBatch, row_N: Tensor, hidden_NH: Tensor) -> None:
        """Add the gradient of these records' share of the loss, to the hidden states too if they ask for one.

        Args:
            row_N: which rows of the pass the hidden states are, rising; guesses behind others are left out.
        """
        row_G = torch.cat([group.rows(place, record.guesses.at_G) for place, record in enumerate(group.records)])
        log_q_G, label_G, weight_G = (
            torch.from_numpy(np.concatenate([pick(record.guesses) for record in group.records]))
            for pick in (lambda guesses: guesses.log_q_G, self._labels, self._weights)
        )
        known_G = torch.isin(row_G, row_N)
        if not known_G.any():
            return
        hidden_GH = hidden_NH[torch.searchsorted(row_N, row_G[known_G])]
        logit_G = self._head.logits(hidden_GH, log_q_G[known_G])
        loss_G = label_G[known_G] * softplus(-logit_G) + (weight_G - label_G)[known_G] * softplus(logit_G)
        loss = loss_G.sum() / self._total_weight
        loss.backward()
        self._sum += loss.item()

    def finish(self) -> tuple[dict[str, float], float]:
        """The step's loss, {} without guesses, and the norm of the gradient before it was clipped."""
        if all(parameter.grad is None for parameter in self._trained.values()):
            return {}, 0.0
        norm = torch.nn.utils.clip_grad_norm_(list(self._trained.values()), self._settings.grad_clip).item()
        return {LOSS: self._sum}, norm

    def gradients(self, model: TrainableDrafter, records: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """`begin`, `backward` and `finish` with the drafter frozen."""
        self.begin(records)
        for group in pack(records) if self._total_weight else ():
            with torch.no_grad():
                hidden_NH = hidden_rows(model, group)
            self.backward(group, torch.arange(len(hidden_NH)), hidden_NH)
        return self.finish()

    def serving_tensors(self) -> dict[str, Tensor]:
        """Beside the drafter's in a snapshot."""
        return {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    def start_from(self, serving: Mapping[str, Tensor]) -> None:
        """Take the head of a snapshot that has one. Raises ConfigError when it is of another shape."""
        if not serving.keys().isdisjoint(self._trained):
            copy_into(self._trained, serving)

    def state(self) -> dict[str, Tensor]:
        """See Learner.state."""
        return adam_state(self._trained, self.optimizer, _PREFIX)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See Learner.load_state; where there was no head yet, this one begins."""
        if any(name.startswith(_PREFIX) for name in tensors):
            load_adam_state(self._trained, self.optimizer, tensors, _PREFIX)
        else:
            logger.info("the snapshot has no acceptance head; one begins to learn")

    def _labels(self, guesses: AcceptanceExamples) -> np.ndarray:
        return guesses.soft_G if self._settings.head_labels == "soft" else guesses.right_G

    def _weights(self, guesses: AcceptanceExamples) -> np.ndarray:
        """Of each guess as far as it was accepted, and as far as it was rejected, together."""
        label_G = self._labels(guesses)
        weight_G: np.ndarray = label_G + np.float32(self._settings.head_rejected_weight) * (1 - label_G)
        return weight_G
