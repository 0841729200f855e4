"""One drafter and its n-gram cache, learning from records: a step of gradient descent, and what a resumed run needs.

Shapes: R rows of a pass, H hidden size, N chosen rows, V the drafter's vocabulary, S buckets.
What is random depends on the seed and the step's number alone, so master weights, optimizer, counters and the replay
buffer are the whole state, and a run that was resumed from them equals one that was never interrupted, bit for bit.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from omnidraft.config import LearnerSettings
from omnidraft.distill.evaluation import agreement
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.distill.training.gradients import backward, num_positions
from omnidraft.distill.training.head import HeadTrainer
from omnidraft.distill.training.losses import parse
from omnidraft.distill.training.optimizer_state import adam_state, copy_into, load_adam_state
from omnidraft.distill.training.replay_buffer import ReplayBuffer
from omnidraft.distill.training.step_report import Counters, StepReport
from omnidraft.errors import ConfigError, VocabularyError, WireError
from omnidraft.ports import TrainableDrafter, TrainableHead
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

logger = logging.getLogger(__name__)

_COUNTERS = "counters"


class Learner:
    """Not for several threads."""

    def __init__(
        self,
        model: TrainableDrafter,
        draft_tokenizer: Tokenizer,
        target_vocabulary: Vocabulary,
        alignment: Alignment,
        cache: NgramCache,
        settings: LearnerSettings,
        head: TrainableHead | None = None,
    ) -> None:
        """
        Args:
            head: learns too, as `learner.head` says.

        Raises:
            ConfigError: an unknown loss, or a drafter with fewer rows than its vocabulary has ids.
        """
        if model.vocab_size < alignment.num_draft:
            raise ConfigError(f"the drafter has {model.vocab_size} rows, its vocabulary {alignment.num_draft} ids")
        self.model, self.cache, self.alignment = model, cache, alignment
        self.counters = Counters()
        max_tokens = min(settings.max_tokens, model.context_limit)
        self._reader = ExampleBuilder(
            draft_tokenizer, target_vocabulary, alignment, max_tokens=max_tokens, alm=settings.alm
        )
        self._terms = parse(settings.loss)
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            model.trained().values(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self._head = None if head is None else HeadTrainer(head, settings)
        self._replay = ReplayBuffer(
            capacity=settings.replay_capacity,
            per_step=settings.replay_records,
            seed=settings.seed,
            for_head=settings.records_per_step if settings.head == "interleaved" else 0,
        )

    def step(self, records: Sequence[TraceRecord]) -> StepReport:
        """Learn once from these records, of which the cache learns too, and again from what replay draws of those
        before.
        """
        started = time.perf_counter()
        skipped = Counter[str]()
        readable = self._readable(records, skipped)
        for positions in readable:
            for ngram in positions.ngrams:
                self.cache.insert(ngram.draft_ids, ngram.target_id)
        number = self.counters.num_steps
        replayed = self._readable(self._replay.draw(number), Counter())
        learned = [*readable, *replayed]
        losses, grad_norm, is_update = self._update(*self._gradients(learned), len(learned), skipped)
        self._replay.keep(records, number)
        heads_losses, _, is_heads_update = self._practise_head(number, skipped)
        report = StepReport(
            losses=losses | heads_losses,
            grad_norm=grad_norm,
            num_records=len(records),
            num_replayed=len(replayed),
            num_tokens=sum(positions.num_emitted for positions in readable),
            is_update=is_update or is_heads_update,
            skipped=dict(skipped),
            duration_s=time.perf_counter() - started,
        )
        self._count(report)
        return report

    def dry_run(self, record: TraceRecord) -> None:
        """Compute what a step would from this record alone, and change nothing."""
        readable = self._readable([record], Counter())
        self._gradients(readable)
        if self._head:
            self._head.gradients(self.model, readable)
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)

    def read(self, record: TraceRecord) -> TrainingExample:
        """What this record teaches. Raises VocabularyError, WireError when it is none that can be read."""
        return self._reader.build(record)

    def hits(self, records: Sequence[TraceRecord], *, with_cache: bool = False) -> list[np.ndarray]:
        """Which positions of each record agree, bool, none of one that cannot be read; agreement.py says what agrees.

        `with_cache` asks it for merges.
        """
        cache = self.cache if with_cache else None
        readable = [self._readable([record], Counter()) for record in records]
        found = iter(
            agreement.first_candidate_matches(
                self.model, [one for each in readable for one in each], self.alignment, cache
            )
        )
        return [next(found) if each else np.zeros(0, bool) for each in readable]

    def agreement(self, records: Sequence[TraceRecord]) -> float | None:
        """Share of scored positions whose first candidate is the emitted token; None when there are none."""
        return agreement.share(self.hits(records))

    @contextmanager
    def serving(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the drafter has these serving tensors; afterwards exactly what it had before."""
        trained = self.model.trained()
        masters = {name: parameter.detach().clone() for name, parameter in trained.items()}
        copy_into(trained, tensors)
        try:
            yield
        finally:
            copy_into(trained, masters)

    def serving_tensors(self) -> dict[str, Tensor]:
        """Of the drafter, and of its acceptance head if one learns."""
        return self.model.serving_tensors() | (self._head.serving_tensors() if self._head else {})

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these serving tensors as master weights. Raises ConfigError when they are of another drafter."""
        copy_into(self.model.trained(), tensors)
        if self._head:
            self._head.start_from(tensors)

    def count_skipped(self, reasons: Mapping[str, int]) -> None:
        """Records that never reached a step, by reason."""
        self.counters.skipped = dict(Counter(self.counters.skipped) + Counter(reasons))

    def state(self) -> dict[str, Tensor]:
        """Master weights, optimizer, counters and the replay buffer. Write them before the next step: they are no
        copies.
        """
        return {
            _COUNTERS: _json_tensor(asdict(self.counters)),
            **adam_state(self.model.trained(), self._optimizer),
            **(self._head.state() if self._head else {}),
            **self._replay.state(),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: it is of other weights (another drafter, rank, or full against LoRA).
            WireError: a record of the replay buffer cannot be read.
        """
        load_adam_state(self.model.trained(), self._optimizer, tensors)
        if self._head:
            self._head.load_state(tensors)
        self._replay.load_state(tensors)
        self.counters = Counters(**_of_json_tensor(tensors[_COUNTERS]))

    def _readable(self, records: Sequence[TraceRecord], skipped: Counter[str]) -> list[TrainingExample]:
        readable = []
        for record in records:
            try:
                readable.append(self._reader.build(record))
            except (VocabularyError, WireError) as exc:
                logger.warning("record %s of request %s skipped: %s", record.segment, record.request_id, exc)
                skipped["unreadable_text"] += 1
        for positions in readable:
            skipped.update(positions.skipped)
            skipped["without_beliefs"] += positions.buckets is None
        return readable

    def _practise_head(self, number: int, skipped: Counter[str]) -> tuple[dict[str, float], float, bool]:
        """Between two steps of the drafter the head learns alone, where they are interleaved."""
        records = self._readable(self._replay.draw_for_head(number), Counter())
        if self._head is None or not records:
            return {}, 0.0, False
        losses, norm = self._head.gradients(self.model, records)
        return self._update(losses, [norm], len(records), skipped)

    def _update(
        self, losses: dict[str, float], grad_norms: Sequence[float], num_records: int, skipped: Counter[str]
    ) -> tuple[dict[str, float], float, bool]:
        """Whoever has no gradient stays as it is."""
        if not losses:
            return {}, 0.0, False
        is_finite = bool(np.isfinite([*grad_norms, *losses.values()]).all())
        for optimizer in self._optimizers():
            if is_finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            skipped["not_finite"] += num_records
            logger.warning("step skipped: losses %s, gradient norms %s", losses, grad_norms)
        return losses, grad_norms[0], is_finite

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer, *([self._head.optimizer] if self._head else [])]

    def _gradients(self, readable: Sequence[TrainingExample]) -> tuple[dict[str, float], list[float]]:
        """Mean losses, none when there is nothing to learn, and norms of the gradients before they were clipped."""
        if self._head and self._settings.head == "only":
            losses, norm = self._head.gradients(self.model, readable)
            return losses, [norm]
        joint = self._head if self._settings.head == "joint" else None
        losses, norm = self._drafters_gradients(readable, joint)
        if joint is None or not losses:
            return losses, [norm]
        heads_losses, heads_norm = joint.finish()
        return losses | heads_losses, [norm, heads_norm]

    def _drafters_gradients(
        self, readable: Sequence[TrainingExample], joint: HeadTrainer | None
    ) -> tuple[dict[str, float], float]:
        num_by_loss = num_positions(readable, self._terms)
        if not any(num_by_loss.values()):
            return {}, 0.0
        self._optimizer.zero_grad(set_to_none=True)
        if joint:
            joint.begin(readable)
        sums = backward(self.model, readable, self._terms, num_by_loss, joint)
        parameters = list(self.model.trained().values())
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.grad_clip).item()
        return {name: total / num_by_loss[name] for name, total in sums.items() if num_by_loss[name]}, grad_norm

    def _count(self, report: StepReport) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.num_records += report.num_records
        counters.num_tokens += report.num_tokens
        self.count_skipped(report.skipped)


def _json_tensor(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, sort_keys=True).encode()), dtype=torch.uint8)


def _of_json_tensor(tensor: Tensor) -> dict:
    return json.loads(bytes(tensor.tolist()))
