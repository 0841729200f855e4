"""The training of a transferred model: steps of gradient descent, and the state to resume from.

The texts of a step depend on the seed and the step's number alone, and nothing else is random, so weights, optimizers
and that number are the whole state: a run that was resumed equals one that was never interrupted, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.resume_tensors import adam_state, from_plain_tensor, load_adam_state, plain_tensor
from omnidraft.distill.training.gradients import backward, num_positions
from omnidraft.errors import ConfigError
from omnidraft.ports import TrainableDrafter
from omnidraft.transfer import hidden_loss
from omnidraft.transfer.hidden_loss import HiddenLoss
from omnidraft.transfer.hypernetwork import LinearHypernetwork
from omnidraft.transfer.original_model import OriginalModel
from omnidraft.transfer.row_optimizer import RowOptimizer, set_rate
from omnidraft.transfer.settings import EMBEDDING_RATE, GRAD_CLIP, TrainingSettings
from omnidraft.transfer.texts import AlignedText

CACHED_FLOATS = 1 << 28
"""Numbers of hidden states that are kept for later passes over the texts: 1 GiB. Other texts are read again."""
_STEPS = "num_steps"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step."""

    losses: dict[str, float]
    """The mean of each loss over its positions."""
    learning_rate: float
    num_tokens: int
    """New ids that were learned from."""


class Trainer:
    """Trains the model after from the model before. It belongs to one thread."""

    def __init__(
        self,
        model: TrainableDrafter,
        original: OriginalModel,
        texts: Sequence[AlignedText],
        settings: TrainingSettings,
        hypernetworks: Sequence[LinearHypernetwork],
    ) -> None:
        """
        Args:
            hypernetworks: one for each matrix of rows, embeddings first.
        """
        self.num_steps = 0
        self._model, self._original, self._texts, self._settings = model, original, texts, settings
        rows = [each for each in model.trained().values() if len(each) == model.vocab_size]
        self._rows = [RowOptimizer(*each) for each in zip(rows, hypernetworks, strict=True)]
        self._layers = {name: each for name, each in model.trained().items() if len(each) != model.vocab_size}
        self._highest_rate = settings.highest_rate(self._layers)
        self._optimizer = torch.optim.AdamW(self._layers.values(), lr=self._highest_rate, weight_decay=0.0, fused=True)
        self._hidden = HiddenLoss(settings.hidden_weight)
        self._cache: dict[int, TrainingExample] = {}
        self._num_cached = 0

    def step(self) -> StepResult:
        """Learn once from the next texts. Raises ConfigError when a loss or a gradient is no number."""
        examples = [self._example(index) for index in self._chosen(self.num_steps)]
        rate = self._highest_rate * self._settings.rate_share(self.num_steps)
        losses, norm = self.gradients(examples)
        if not np.isfinite([norm, *losses.values()]).all():
            raise ConfigError(f"step {self.num_steps + 1} came to losses {losses}; try a lower learning rate")
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        ids = torch.from_numpy(np.unique(np.concatenate([each.ids_T for each in examples])))
        for rows in self._rows:
            rows.step(ids, EMBEDDING_RATE * rate, rate)
        self.num_steps += 1
        return StepResult(losses, rate, sum(len(each.ids_T) - 1 for each in examples))

    def gradients(self, examples: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """Compute the gradients of these examples; return mean losses, and the gradients' norm before clipping."""
        weights = list(self._model.trained().values())
        for each in weights:
            each.grad = None
        self._hidden.begin(examples)
        terms = self._settings.losses
        nums = num_positions(examples, terms)
        sums = backward(self._model, examples, terms, nums, self._hidden)
        norm = torch.nn.utils.clip_grad_norm_(weights, GRAD_CLIP).item()
        losses = {name: total / nums[name] for name, total in sums.items() if nums[name]}
        return losses | {hidden_loss.LOSS: self._hidden.mean}, norm

    def state(self) -> dict[str, Tensor]:
        """Return weights, optimizers and the number of steps. Write them before the next step: they are no copies."""
        tensors = {_STEPS: plain_tensor(self.num_steps), **adam_state(self._layers, self._optimizer)}
        for number, rows in enumerate(self._rows):
            tensors |= rows.state(_rows(number))
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from where `state` was taken. Raises ConfigError when it belongs to other weights."""
        load_adam_state(self._layers, self._optimizer, tensors)
        for number, rows in enumerate(self._rows):
            rows.load_state(tensors, _rows(number))
        self.num_steps = from_plain_tensor(tensors[_STEPS])

    def _chosen(self, step: int) -> list[int]:
        """Return the texts of a step: each pass over all of them has an order of its own."""
        first = step * self._settings.texts_per_step
        return [self._at(place) for place in range(first, first + self._settings.texts_per_step)]

    def _at(self, place: int) -> int:
        number, index = divmod(place, len(self._texts))
        return int(np.random.default_rng((self._settings.seed, number)).permutation(len(self._texts))[index])

    def _example(self, index: int) -> TrainingExample:
        """Return what a text teaches. The original model reads each text once, as long as there is memory for it."""
        if (known := self._cache.get(index)) is not None:
            return known
        example = self._original.example(self._texts[index])
        num = example.targets[hidden_loss.LOSS].hidden_NH.size  # type: ignore[union-attr]
        if self._num_cached + num <= CACHED_FLOATS:
            self._cache[index] = example
            self._num_cached += num
        return example


def _rows(number: int) -> str:
    """Return what the names of a matrix's state begin with."""
    return f"matrix.{number}."
