"""The fast gradient is that of one position after the other, whatever passes and stretches of rows it was cut into."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from omnidraft.config import AlmSettings
from omnidraft.distill.examples import collate as packing
from omnidraft.distill.examples.buckets import Buckets
from omnidraft.distill.examples.collate import collate
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


def positions_of(pair, alm: AlmSettings) -> list[TrainingExample]:
    """Several records with beliefs of unlike width, one of them without any."""
    reader = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=60, alm=alm)
    records = [pair.record(f"r{n}", text, seed=n) for n, text in enumerate(TEXTS)]
    narrow = replace(
        records[1].beliefs,
        top_ids_EK=records[1].beliefs.top_ids_EK[:, :3],
        top_log_p_EK=records[1].beliefs.top_log_p_EK[:, :3],
    )
    records[1] = replace(records[1], beliefs=narrow)
    records[2] = replace(records[2], beliefs=None)
    return [reader.build(record) for record in records]


def slow_losses(model, record: TrainingExample, name: str) -> list[Tensor]:
    """One forward over the record alone, and every position by itself."""
    logits_TV = all_logits(model, record)
    loss = LOSSES[name]
    if loss.positions in ("emitted", "piece"):
        kind = loss.positions
        ats = record.at_P[record.is_draftable_P] if kind == "emitted" else record.piece_at_M
        ids = record.draft_P[record.is_draftable_P] if kind == "emitted" else record.piece_ids_M
        return [-logits_TV[at].log_softmax(dim=-1)[token] for at, token in zip(ats, ids, strict=True)]
    if record.distribution is None:
        return []
    believed = record.distribution
    match loss.positions:
        case "boundary":
            return [
                one(loss, logits_TV[at], believed.buckets, n, record.draft_P[n]) for n, at in enumerate(record.at_P)
            ]
        case "direct":
            rest_V = torch.from_numpy(believed.is_direct_D)
            return [one(loss, logits_TV[at], believed.direct, n, 0, rest_V) for n, at in enumerate(record.at_P)]
        case "rejected":
            ats = record.at_P[believed.rejected_row_N]
            return [one(loss, logits_TV[at], believed.rejected, n, 0) for n, at in enumerate(ats)]
        case "believed piece":
            return [
                -math.exp(believed.log_p_P[row]) * logits_TV[at].log_softmax(dim=-1)[token]
                for at, token, row in zip(record.piece_at_M, record.piece_ids_M, record.piece_row_M, strict=True)
            ]
        case _:
            return slow_chunks(name, logits_TV, record)


def all_logits(model, record: TrainingExample) -> Tensor:
    """At every id; what stands before the first position is context, and 0 here."""
    num_context = int(min(record.at_P.min(), record.piece_at_M.min(initial=len(record.ids_T))))
    ids_T = torch.from_numpy(record.ids_T)
    texts = PackedTexts(ids_T, torch.zeros_like(ids_T), torch.arange(len(ids_T)), num_context)
    logits_NV = model.logits(model.hidden(texts))
    return torch.cat([torch.zeros(num_context, logits_NV.shape[1]), logits_NV])


def one(loss, logits_V: Tensor, buckets, row: int, emitted: int, rest_V: Tensor | None = None) -> Tensor:
    """Without padding: only the buckets that are real."""
    real = torch.from_numpy(buckets.real_PS[row])
    asked = Buckets(
        torch.from_numpy(buckets.ids_PS[row])[real][None],
        torch.from_numpy(buckets.log_p_PS[row])[real][None],
        real[real][None],
        torch.tensor([buckets.log_p_rest_P[row]]),
        torch.tensor([emitted]),
        rest_V,
    )
    return loss.per_position(logits_V[None], asked)[0]


def slow_chunks(name: str, logits_TV: Tensor, record: TrainingExample) -> list[Tensor]:
    chunks = record.distribution.chunks
    log_q_TV = logits_TV.log_softmax(dim=-1)
    losses = []
    for at, num, log_p in zip(chunks.at_C, chunks.num_ids_C, chunks.log_p_C, strict=True):
        log_q = sum(log_q_TV[row, record.ids_T[row + 1]] for row in range(at, at + num))
        if chunks.starts_D is not None:
            log_q = log_q + log_q_TV[at + num][torch.from_numpy(chunks.starts_D)].exp().sum().log()
        p, q = torch.tensor(log_p / chunks.tau - 1e-6).exp(), (log_q / chunks.tau - 1e-6).exp()
        kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        losses.append(chunks.tau * (kl if name == "alm" else (p - q).abs()))
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
    records = positions_of(pair, AlmSettings(tau=5.0, debias=debias, merge_below=0.5))
    num_by_loss = fast.num_positions(records, SUM)
    sums = fast.backward(model, records, SUM, num_by_loss)
    found = {name: parameter.grad.clone() for name, parameter in model.trained().items()}
    for parameter in model.trained().values():
        parameter.grad = None
    slow = {name: [loss for record in records for loss in slow_losses(model, record, name)] for name, _ in SUM}
    assert num_by_loss == {name: len(losses) for name, losses in slow.items()}
    assert all(num > 0 for num in num_by_loss.values())
    total = sum(weight * torch.stack(slow[name]).mean() for name, weight in SUM)
    total.backward()
    for name, parameter in model.trained().items():
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-5, rtol=2e-3)
    assert sums == pytest.approx({name: sum(losses).item() for name, losses in slow.items()}, rel=2e-3)


def test_only_rows_that_a_loss_looks_at_are_asked_for(pair) -> None:
    (group,) = packing.pack(positions_of(pair, AlmSettings())[:1])
    (record,) = group.records
    pieces, positions = (group.rows(0, at).tolist() for at in (record.piece_at_M, record.at_P))
    rows_N, _ = collate(group, ["piece"])
    assert rows_N.tolist() == pieces
    rows_N, what = collate(group, ["piece", "emitted"])
    assert rows_N.tolist() == sorted({*pieces, *positions})
    assert rows_N[what["piece"].first_row_N].tolist() == pieces
