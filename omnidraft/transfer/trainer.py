"""The training of a transferred model: steps of gradient descent, and the state to resume from.

The texts of a step depend on the seed and the step's number alone, and nothing else is random, so weights, optimizers
and that number are the whole state: a run that was resumed equals one that was never interrupted, bit for bit.

AdamW moves a number by about its rate in each step, however large the numbers around it are, so a rate that fits
SmolLM2-135M, whose matrices are about .19, ruins Qwen2.5-Coder-0.5B, whose matrices are about .016. One rate for all
weights of a model keeps the multiples for its embeddings and their map what they are.
Source: relative step sizes of Adafactor, https://arxiv.org/abs/1804.04235, section 8.
Rows of embeddings and head learn in two ways: all by a hypernetwork, those that occurred alone too. Adam scales each
gradient to the same size. Ids that do not occur have tiny ones, all of which say "less likely"; taken as they are they
move a hundred thousand rows as far as those that texts teach, away from every text to come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.resume_tensors import adam_state, from_plain_tensor, load_adam_state, plain_tensor
from omnidraft.distill.training.gradients import backward, num_positions
from omnidraft.errors import ConfigError
from omnidraft.ports import TrainableDrafter
from omnidraft.transfer import hidden_loss
from omnidraft.transfer.hidden_loss import HiddenLoss
from omnidraft.transfer.hypernetwork import LinearHypernetwork
from omnidraft.transfer.original_model import OriginalModel
from omnidraft.transfer.settings import TrainingSettings
from omnidraft.transfer.texts import AlignedText

RELATIVE = 1.6e-3
"""The share of a typical matrix's root mean square that it is moved by in a step: 3e-4 for SmolLM2-135M, 6e-5 for
Gemma 3 270M, 2.5e-5 for Qwen2.5-Coder-0.5B. SmolLM2 was ruined by 5e-3; Gemma learned with 2.5e-3, too."""
OF_FACTORS = 1e-4
"""The rate of LoRA factors, half of which begin at zero."""


def highest_rate(matrices: Mapping[str, Tensor], settings: TrainingSettings) -> float:
    """Return the highest learning rate of a run that trains these weights, which have not learned yet, and the rows of
    the tokens."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    sizes = [each.detach().float().square().mean().sqrt().item() for each in matrices.values() if each.ndim > 1]
    return OF_FACTORS if settings.train == "lora" or not sizes else RELATIVE * median(sizes)


_ROWS, _MAP = "rows.", "map."


class RowOptimizer:
    """Belongs to one matrix of rows. In a step: its gradient, then `step`."""

    def __init__(self, rows_TH: nn.Parameter, hypernetwork: LinearHypernetwork) -> None:
        self._rows_TH, self._hypernetwork = rows_TH, hypernetwork
        self._alone = torch.optim.SparseAdam([rows_TH])
        self._alone.state[rows_TH] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(rows_TH),
            "exp_avg_sq": torch.zeros_like(rows_TH),
        }
        self._shared = torch.optim.Adam(hypernetwork.parameters())

    @torch.no_grad()
    def step(self, ids: Tensor, rate: float, map_rate: float) -> None:
        """Learn from the gradient of the rows, which is used up.

        Args:
            ids: the ids that occurred, each once.
        """
        rows_TH, weights = self._rows_TH, list(self._hypernetwork.parameters())
        grad_TH, rows_TH.grad = rows_TH.grad, None
        assert grad_TH is not None
        before = [weight.clone() for weight in weights]
        self._hypernetwork.backward(grad_TH)
        _set_rate(self._shared, map_rate)
        self._shared.step()
        rows_TH.add_(self._hypernetwork(*(weight - old for weight, old in zip(weights, before, strict=True))))
        rows_TH.grad = torch.sparse_coo_tensor(ids[None], grad_TH[ids], rows_TH.shape, check_invariants=True)
        _set_rate(self._alone, rate)
        self._alone.step()
        rows_TH.grad = None

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return rows, hypernetwork and what Adam knows of both, by names that begin with `prefix`; no copies."""
        return adam_state(self._alone_named(), self._alone, prefix + _ROWS) | adam_state(
            self._shared_named(), self._shared, prefix + _MAP
        )

    def load_state(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Continue from where `state` was taken. Raises ConfigError when it belongs to other weights."""
        load_adam_state(self._alone_named(), self._alone, tensors, prefix + _ROWS)
        load_adam_state(self._shared_named(), self._shared, tensors, prefix + _MAP)

    def _alone_named(self) -> dict[str, nn.Parameter]:
        return {"rows": self._rows_TH}

    def _shared_named(self) -> dict[str, nn.Parameter]:
        return dict(self._hypernetwork.named_parameters())


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


CACHED_FLOATS = 1 << 28
"""Numbers of hidden states that are kept for later passes over the texts: 1 GiB. Other texts are read again."""
_STEPS = "num_steps"
_MULTIPLE = "multiple"
"""Of the learning rate, in a group of the optimizer."""


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
        hypernetworks: Sequence[LinearHypernetwork] = (),
    ) -> None:
        """
        Args:
            hypernetworks: one for each matrix of rows, embeddings first; without any, all rows learn as other weights.
        """
        self.num_steps = 0
        self._model, self._original, self._texts, self._settings = model, original, texts, settings
        self._terms = settings.terms()
        rows = {name: each for name, each in model.trained().items() if len(each) == model.vocab_size}
        self._rows = [RowOptimizer(*each) for each in zip(rows.values(), hypernetworks, strict=bool(hypernetworks))]
        self._others = {name: each for name, each in model.trained().items() if not hypernetworks or name not in rows}
        groups = [
            {"params": [each for name, each in self._others.items() if (name in rows) == are_rows], _MULTIPLE: multiple}
            for are_rows, multiple in ((True, settings.embedding_rate), (False, 1.0))
        ]
        layers = {name: each for name, each in self._others.items() if name not in rows}
        self._highest_rate = highest_rate(layers, settings)
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self._highest_rate, weight_decay=0.0, fused=True
        )
        self._hidden = HiddenLoss(settings.hidden_weight)
        self._cache: dict[int, TrainingExample] = {}
        self._num_cached = 0

    def step(self) -> StepResult:
        """Learn once from the next texts. Raises ConfigError when a loss or a gradient is no number."""
        examples = [self._example(index) for index in self._chosen(self.num_steps)]
        rate = self._highest_rate * self._settings.rate_share(self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group[_MULTIPLE]
        losses, norm = self.gradients(examples)
        if not np.isfinite([norm, *losses.values()]).all():
            raise ConfigError(f"step {self.num_steps + 1} came to losses {losses}; try a lower learning rate")
        self._optimizer.step()
        self._step_rows(examples, rate)
        self.num_steps += 1
        return StepResult(losses, rate, sum(len(each.ids_T) - 1 for each in examples))

    def gradients(self, examples: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """Compute the gradients of these examples; return mean losses, and the gradients' norm before clipping."""
        for weights in self._model.trained().values():
            weights.grad = None
        self._hidden.begin(examples)
        nums = num_positions(examples, self._terms)
        on_hidden = self._hidden if self._settings.hidden_weight else None
        sums = backward(self._model, examples, self._terms, nums, on_hidden)
        norm = torch.nn.utils.clip_grad_norm_(list(self._model.trained().values()), self._settings.grad_clip).item()
        losses = {name: total / nums[name] for name, total in sums.items() if nums[name]}
        return losses | ({hidden_loss.LOSS: self._hidden.mean} if on_hidden else {}), norm

    def state(self) -> dict[str, Tensor]:
        """Return weights, optimizer and the number of steps. Write them before the next step: they are no copies."""
        return {
            _STEPS: plain_tensor(self.num_steps),
            **adam_state(self._others, self._optimizer),
            **{
                name: each for number, rows in enumerate(self._rows) for name, each in rows.state(_rows(number)).items()
            },
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from where `state` was taken. Raises ConfigError when it belongs to other weights."""
        load_adam_state(self._others, self._optimizer, tensors)
        for number, rows in enumerate(self._rows):
            rows.load_state(tensors, _rows(number))
        self.num_steps = from_plain_tensor(tensors[_STEPS])

    def _step_rows(self, examples: Sequence[TrainingExample], rate: float) -> None:
        ids = torch.from_numpy(np.unique(np.concatenate([each.ids_T for each in examples])))
        for rows in self._rows:
            rows.step(ids, rate * self._settings.embedding_rate, rate * self._settings.hypernetwork_rate)

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
