"""The fast gradient is that of one position after the other, whatever passes and stretches of rows it was cut into."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from omnidraft.distill.examples import collate as packing
from omnidraft.distill.examples.chunks import AlmSettings
from omnidraft.distill.examples.collate import collate
from omnidraft.distill.examples.targets import BucketTargets, ChunkTargets
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.distill.training import gradients as fast
from omnidraft.distill.training.losses import LOSSES
from omnidraft.ports import PackedTexts

TEXTS = (
    "The river goes into the sea. ",
    "Where does the water go?",
    "def add(first, second): return first",
    "The water of the river goes. Where does the river itself go? into the sea",
)
SUM = tuple((name, 0.1 + 0.2 * index) for index, name in enumerate(LOSSES))
"""All of them, each with its own weight."""


def examples_of(pair, alm: AlmSettings) -> list[TrainingExample]:
    """Several records with beliefs of unlike width, one of them without any."""
    builder = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=60, alm=alm)
    records = [pair.record(f"r{n}", text, seed=n) for n, text in enumerate(TEXTS)]
    narrow = replace(
        records[1].beliefs,
        top_ids_EK=records[1].beliefs.top_ids_EK[:, :3],
        top_log_p_EK=records[1].beliefs.top_log_p_EK[:, :3],
    )
    records[1] = replace(records[1], beliefs=narrow)
    records[2] = replace(records[2], beliefs=None)
    return [builder.build(record) for record in records]


def slow_losses(model, example: TrainingExample, name: str) -> list[Tensor]:
    """One forward over the example alone, and every target by itself."""
    logits_TV = all_logits(model, example)
    kind = LOSSES[name].positions
    if kind not in example.targets:
        return []
    targets = example.targets[kind]
    if kind == "chunk":
        return slow_chunks(logits_TV, targets)
    if name in ("nll", "ngram"):
        rows = zip(targets.row_N, targets.ids_NS[:, 0], strict=True)
        return [-logits_TV[at].log_softmax(dim=-1)[token] for at, token in rows]
    return [one(LOSSES[name], logits_TV, targets, number) for number in range(len(targets))]


def all_logits(model, example: TrainingExample) -> Tensor:
    """At every id; what stands before the first position is context, and 0 here."""
    num_context = int(min(example.at_P.min(), example.piece_at_M.min(initial=len(example.ids_T))))
    ids_T = torch.from_numpy(example.ids_T)
    texts = PackedTexts(ids_T, torch.zeros_like(ids_T), torch.arange(len(ids_T)), num_context)
    logits_NV = model.logits(model.hidden(texts))
    return torch.cat([torch.zeros(num_context, logits_NV.shape[1]), logits_NV])


def one(loss, logits_TV: Tensor, targets: BucketTargets, number: int) -> Tensor:
    """Without padding: only the buckets that are real."""
    real = torch.from_numpy(targets.real_NS[number])
    single = BucketTargets(
        torch.tensor([0]),
        torch.from_numpy(targets.ids_NS[number])[real][None],
        torch.from_numpy(targets.log_p_NS[number])[real][None],
        real[real][None],
        torch.tensor([targets.log_p_rest_N[number]]),
        None if targets.rest_V is None else torch.from_numpy(targets.rest_V),
    )
    return loss.per_position(logits_TV[targets.row_N[number]][None], single)[0]


def slow_chunks(logits_TV: Tensor, chunks: ChunkTargets) -> list[Tensor]:
    log_q_TV = logits_TV.log_softmax(dim=-1)
    losses = []
    for at, ids, num, log_p in zip(chunks.row_N, chunks.ids_NL, chunks.num_ids_N, chunks.log_p_N, strict=True):
        log_q = sum(log_q_TV[at + n, ids[n]] for n in range(num))
        if chunks.starts_V is not None:
            log_q = log_q + log_q_TV[at + num][torch.from_numpy(chunks.starts_V)].exp().sum().log()
        p, q = torch.tensor(log_p / chunks.tau - 1e-6).exp(), (log_q / chunks.tau - 1e-6).exp()
        kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        losses.append(chunks.tau * kl)
    return losses


@pytest.mark.parametrize(("pass_rows", "logit_rows"), [(256, 256), (80, 7), (1, 1)])
@pytest.mark.parametrize("debias", [True, False])
def test_the_gradient_of_all_losses_at_once_is_the_naive_one(
    pair, monkeypatch, pass_rows: int, logit_rows: int, debias: bool
) -> None:
    """With 7 rows a stretch most chunks are cut by its end."""
    monkeypatch.setattr(packing, "PASS_ROWS", pass_rows)
    monkeypatch.setattr(fast, "LOGIT_ROWS", logit_rows)
    model = pair.learner().model
    examples = examples_of(pair, AlmSettings(tau=5.0, debias=debias, merge_below=0.5))
    num_by_loss = fast.num_positions(examples, SUM)
    sums = fast.backward(model, examples, SUM, num_by_loss)
    fast_gradient = {name: parameter.grad.clone() for name, parameter in model.trained().items()}
    for parameter in model.trained().values():
        parameter.grad = None
    slow = {name: [loss for example in examples for loss in slow_losses(model, example, name)] for name, _ in SUM}
    assert num_by_loss == {name: len(losses) for name, losses in slow.items()}
    assert all(num > 0 for num in num_by_loss.values())
    num_positions = max(len(losses) for losses in slow.values())
    total = sum(weight * torch.stack(slow[name]).sum() for name, weight in SUM) / num_positions
    total.backward()
    for name, parameter in model.trained().items():
        torch.testing.assert_close(fast_gradient[name], parameter.grad, atol=2e-5, rtol=2e-3)
    assert sums == pytest.approx({name: sum(losses).item() for name, losses in slow.items()}, rel=2e-3)


def test_only_rows_that_a_loss_looks_at_are_computed(pair) -> None:
    (batch,) = packing.pack(examples_of(pair, AlmSettings())[:1], "float32")
    (example,) = batch.examples
    pieces, positions = (batch.rows(0, at).tolist() for at in (example.piece_at_M, example.at_P))
    rows_N, _ = collate(batch, ["piece"])
    assert rows_N.tolist() == pieces
    rows_N, targets_of = collate(batch, ["piece", "emitted"])
    assert rows_N.tolist() == sorted({*pieces, *positions})
    assert rows_N[targets_of["piece"].row_N].tolist() == pieces
