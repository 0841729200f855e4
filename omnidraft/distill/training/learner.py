"""One drafter and its n-gram cache, learning from records: steps of gradient descent, and the state to resume from.

Randomness depends on the seed and the step's number alone, so master weights, optimizer, replay buffer and tenants'
factors are the whole state, beside the counters, which a manifest has; and a run that was resumed from them equals one
that was never interrupted, bit for bit.

AdamW moves a number by about its rate in each step, however large the numbers around it are: 1e-4 is a step of 1/2,000
for SmolLM2-135M, whose weights are about .2, and of 1/200 for Qwen2.5-Coder-0.5B, whose weights are about .02 and which
forgets by it what it knew. So `auto` is a share of each weight's root mean square, before anything was learned. LoRA
factors, half of which begin at zero, have one rate.
Source: relative step sizes of Adafactor, https://arxiv.org/abs/1804.04235, section 8.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnidraft.config import LearnerSettings
from omnidraft.distill.evaluation import agreement
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.distill.resume_tensors import adam_state, copy_into, from_plain_tensor, plain_tensor
from omnidraft.distill.training.gradients import GRAD_CLIP, backward, num_positions
from omnidraft.distill.training.head import HeadTrainer, load_serving_tensors, load_training_state
from omnidraft.distill.training.losses import parse
from omnidraft.distill.training.replay_buffer import REPLAY_CAPACITY, ReplayBuffer
from omnidraft.distill.training.step_report import Counters, StepReport
from omnidraft.distill.training.tenant_factors import FactorPlan, FactorTrainer
from omnidraft.errors import ConfigError
from omnidraft.ports import TrainableDrafter, TrainableHead
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

logger = logging.getLogger(__name__)

RELATIVE = 5e-4
"""The share of a weight's root mean square that `auto` moves it by in a step."""
LEAST_SIZE = 1e-3
"""The root mean square of smaller weights, as zeros that are to learn too; Adafactor's."""
OF_FACTORS = 1e-4
"""What `auto` is for LoRA factors."""


def parameter_groups(trained: Mapping[str, torch.nn.Parameter], settings: LearnerSettings) -> list[dict[str, Any]]:
    """Return these weights of the base drafter as groups of an optimizer, each with its `lr`."""
    if settings.learning_rate == "auto" and settings.train == "full":
        return [{"params": [weight], "lr": RELATIVE * max(_size(weight), LEAST_SIZE)} for weight in trained.values()]
    rate = OF_FACTORS if settings.learning_rate == "auto" else settings.learning_rate
    return [{"params": list(trained.values()), "lr": rate}]


def _size(weight: torch.Tensor) -> float:
    return weight.detach().square().mean().sqrt().item()


SEED = 0
"""That of new factors and heads, and of what the replay buffer draws."""
_PRECISION = "precision"


class Learner:
    """Trains one drafter. It belongs to one thread."""

    def __init__(
        self,
        model: TrainableDrafter,
        draft_tokenizer: Tokenizer,
        target_vocabulary: Vocabulary,
        alignment: Alignment,
        cache: NgramCache,
        settings: LearnerSettings,
        head: TrainableHead | None = None,
        factor_plan: FactorPlan | None = None,
    ) -> None:
        """Build the optimizers, and the acceptance head's trainer when there is a head.

        Args:
            head: it is trained between the drafter's steps.
            factor_plan: that of tenants' factors; None takes the usual one.

        Raises:
            ConfigError: an unknown loss, a drafter with fewer rows than its vocabulary has ids, or factors for one
                without linear layers.
        """
        if settings.factor_tenants and not model.linear_shapes():
            raise ConfigError("this drafter has no linear layers for tenants' factors: set learner.factor_tenants = 0")
        if model.vocab_size < alignment.num_draft:
            raise ConfigError(f"the drafter has {model.vocab_size} rows, its vocabulary {alignment.num_draft} ids")
        self.model, self.cache, self.alignment = model, cache, alignment
        self.counters = Counters()
        max_tokens = min(settings.max_tokens, model.context_limit)
        self._terms = parse(settings.loss)
        builder = ExampleBuilder(draft_tokenizer, target_vocabulary, alignment, max_tokens=max_tokens)
        self._builder = builder
        self._settings = settings
        self._optimizer = torch.optim.AdamW(parameter_groups(model.trained(), settings), weight_decay=0.0, fused=True)
        self._head = None if head is None else HeadTrainer(head)
        self._replay = ReplayBuffer(
            capacity=REPLAY_CAPACITY,
            per_step=settings.replay_records,
            seed=SEED,
            for_head=settings.records_per_step if head is not None else 0,
            for_tenants=settings.records_per_step if settings.factor_tenants else 0,
        )
        self.factors = FactorTrainer(
            model,
            factor_plan or FactorPlan(),
            SEED,
            self._terms,
            self._replay,
            lambda records: builder.build_readable(records, Counter()),
        )

    def step(self, records: Sequence[TraceRecord]) -> StepReport:
        """Learn once from these records, cache included, and again from earlier ones that the replay buffer draws."""
        started = time.perf_counter()
        skipped = Counter[str]()
        examples = self._builder.build_readable(records, skipped)
        self._count_ngrams(examples)
        number = self.counters.num_steps
        replayed = self._builder.build_readable(self._replay.draw(number), Counter())
        batch = [*examples, *replayed]
        losses, grad_norm, is_update = self._update(*self._gradients(batch), len(batch), skipped)
        self._replay.add(records, number)
        head_losses, _, is_head_update = self._train_head(number, skipped)
        report = StepReport(
            losses=losses | head_losses,
            grad_norm=grad_norm,
            num_records=len(records),
            num_replayed=len(replayed),
            num_tokens=sum(example.num_emitted for example in examples),
            is_update=is_update or is_head_update,
            skipped=dict(skipped),
            duration_s=time.perf_counter() - started,
        )
        self._count(report)
        return report

    def dry_run(self, record: TraceRecord) -> None:
        """Compute the gradients of a step on this record alone, and change nothing."""
        examples = self._builder.build_readable([record], Counter())
        self._gradients(examples)
        if self._head:
            self._head.gradients(self.model, examples)
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)

    def replayed(self) -> list[TraceRecord]:
        """Return the records in the replay buffer."""
        return self._replay.records()

    def drop_replayed(self, is_dropped: Callable[[TraceRecord], bool]) -> int:
        """Drop records from the replay buffer, and return their number."""
        return self._replay.drop(is_dropped)

    def rebuild_cache(self, cache: NgramCache, records: Sequence[TraceRecord]) -> None:
        """Replace the n-gram cache by this one, and count the n-grams of these records in it."""
        self.cache = cache
        self._count_ngrams(self._builder.build_readable(records, Counter()))

    def read(self, record: TraceRecord) -> TrainingExample:
        """Return the training example of a record. Raises VocabularyError, WireError when it cannot be read."""
        return self._builder.build(record)

    def hits(self, records: Sequence[TraceRecord], *, with_cache: bool = False) -> list[np.ndarray]:
        """Return whether each position of each record agrees, bool; a record that cannot be read has no position.

        Args:
            with_cache: merges that the cache does not know do not agree by their pieces; see agreement.py.
        """
        examples = [self._builder.build_readable([record], Counter()) for record in records]
        readable = [example for each in examples for example in each]
        cache = self.cache if with_cache else None
        hits = iter(agreement.first_candidate_matches(self.model, readable, self.alignment, cache))
        return [next(hits) if each else np.zeros(0, bool) for each in examples]

    def agreement(self, records: Sequence[TraceRecord]) -> float | None:
        """Return the share of positions whose first candidate is the emitted token; None without positions."""
        return agreement.share(self.hits(records))

    @contextmanager
    def serving(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the drafter these serving tensors inside the `with` block, and exactly its own weights back after it."""
        trained = self.model.trained()
        masters = {name: parameter.detach().clone() for name, parameter in trained.items()}
        copy_into(trained, tensors)
        try:
            yield
        finally:
            copy_into(trained, masters)

    def serving_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the drafter, and of its acceptance head if one learns."""
        return self.model.serving_tensors() | (self._head.serving_tensors() if self._head else {})

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these serving tensors as master weights. Raises ConfigError when they belong to another drafter or head;
        then nothing changed."""
        load_serving_tensors(self.model.trained(), self._head, tensors)

    def start_afresh_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Do the same with a fresh optimizer, an empty replay buffer and no factors."""
        self.start_from(tensors)
        for optimizer in self._optimizers():
            optimizer.state.clear()
        self._replay.load_state({})
        self.factors.load_state({})

    def count_skipped(self, reasons: Mapping[str, int]) -> None:
        """Add to the counters of skipped records and tokens, by reason."""
        self.counters.skipped = dict(Counter(self.counters.skipped) + Counter(reasons))

    def state(self) -> dict[str, Tensor]:
        """Return master weights, optimizer, the replay buffer and tenants' factors.

        Write them before the next step: they are no copies.
        """
        return {
            _PRECISION: plain_tensor(self.model.precision),
            **adam_state(self.model.trained(), self._optimizer),
            **(self._head.state() if self._head else {}),
            **self._replay.state(),
            **self.factors.state(),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from where `state` was taken, but for the counters; with `learner.precision = "auto"` in the
        precision that it had.

        Raises:
            ConfigError: it belongs to other weights (another drafter, head, rank, or full against LoRA); then nothing
                changed.
            WireError: a record of the replay buffer cannot be read.
        """
        load_training_state(self.model.trained(), self._optimizer, self._head, tensors)
        self._replay.load_state(tensors)
        self.factors.load_state(tensors)
        if self._settings.precision == "auto" and _PRECISION in tensors:
            self.model.compute_in(from_plain_tensor(tensors[_PRECISION]))

    def _count_ngrams(self, examples: Sequence[TrainingExample]) -> None:
        for example in examples:
            for ngram in example.ngrams:
                self.cache.insert(ngram.draft_ids, ngram.target_id)

    def _train_head(self, number: int, skipped: Counter[str]) -> tuple[dict[str, float], float, bool]:
        """Train the head alone between two steps of the drafter, when the replay buffer draws records for it."""
        examples = self._builder.build_readable(self._replay.draw_for_head(number), Counter())
        if self._head is None or not examples:
            return {}, 0.0, False
        losses, norm = self._head.gradients(self.model, examples)
        return self._update(losses, norm, len(examples), skipped)

    def _update(
        self, losses: dict[str, float], grad_norm: float, num_records: int, skipped: Counter[str]
    ) -> tuple[dict[str, float], float, bool]:
        """Step the optimizers unless a number is not finite; a parameter without a gradient stays as it is."""
        if not losses:
            return {}, 0.0, False
        is_finite = bool(np.isfinite([grad_norm, *losses.values()]).all())
        for optimizer in self._optimizers():
            if is_finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            skipped["not_finite"] += num_records
            logger.warning("step skipped: losses %s, gradient norm %s", losses, grad_norm)
        return losses, grad_norm, is_finite

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer, *([self._head.optimizer] if self._head else [])]

    def _gradients(self, examples: Sequence[TrainingExample]) -> tuple[dict[str, float], float]:
        """Return mean losses, none when there is nothing to learn, and the norm of the gradient before clipping."""
        num_by_loss = num_positions(examples, self._terms)
        if not any(num_by_loss.values()):
            return {}, 0.0
        self._optimizer.zero_grad(set_to_none=True)
        sums = backward(self.model, examples, self._terms, num_by_loss)
        parameters = list(self.model.trained().values())
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP).item()
        return {name: total / num_by_loss[name] for name, total in sums.items() if num_by_loss[name]}, grad_norm

    def _count(self, report: StepReport) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.num_records += report.num_records
        counters.num_tokens += report.num_tokens
        self.count_skipped(report.skipped)
