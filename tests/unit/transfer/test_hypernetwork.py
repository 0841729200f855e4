"""The map of all rows, beside its formula, and what it teaches rows that no text has."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from omnidraft.errors import ConfigError
from omnidraft.transfer.hypernetwork import MOST_PIECES, LinearHypernetwork, load_hypernetworks, save_hypernetworks
from omnidraft.transfer.row_optimizer import RowOptimizer
from omnidraft.vocab.alignment import PackedLists

SIZE = 6
PIECES = [(3,), (0, 1), (), (2, 2, 4), (4, 3, 2, 1, 0), (1, 0)]


def make_network(pieces: list[tuple[int, ...]] = PIECES, num_old: int = 5) -> LinearHypernetwork:
    torch.manual_seed(0)
    return LinearHypernetwork(torch.randn(num_old, SIZE), PackedLists.of(pieces))


def by_formula(old_DH: Tensor, maps_FHH: Tensor, numbers_LH: Tensor, pieces: tuple[int, ...]) -> Tensor:
    row_H = numbers_LH[min(len(pieces), MOST_PIECES)]
    if not pieces:
        return row_H
    mean_H = old_DH[list(pieces)].mean(dim=0)
    return row_H + mean_H @ maps_FHH[0] + old_DH[pieces[0]] @ maps_FHH[1] + old_DH[pieces[-1]] @ maps_FHH[2]


def test_it_adds_nothing_at_first_and_then_what_the_formula_says() -> None:
    network = make_network()
    assert not network(*network.parameters()).any()
    maps_FHH, numbers_LH = torch.randn(3, SIZE, SIZE), torch.randn(MOST_PIECES + 1, SIZE)
    expected_TH = torch.stack([by_formula(network._old_DH, maps_FHH, numbers_LH, each) for each in PIECES])
    torch.testing.assert_close(network(maps_FHH, numbers_LH), expected_TH)


def test_its_gradient_is_that_of_the_formula() -> None:
    network, grad_TH = make_network(), torch.randn(len(PIECES), SIZE)
    network.backward(grad_TH)
    weights = [each.detach().clone().requires_grad_() for each in network.parameters()]
    expected_TH = torch.stack([by_formula(network._old_DH, *weights, each) for each in PIECES])
    for weight, expected in zip(network.parameters(), torch.autograd.grad(expected_TH, weights, grad_TH), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, expected)


def test_rows_that_occurred_take_the_steps_of_adam_and_the_others_stay_without_a_map() -> None:
    rows = nn.Parameter(torch.randn(len(PIECES), SIZE))
    start_TH = rows.detach().clone()
    plain = nn.Parameter(start_TH.clone())
    optimizer, adam = RowOptimizer(rows, make_network()), torch.optim.Adam([plain], lr=0.1)
    ids = torch.tensor([1, 4])
    for _ in range(3):
        rows.grad = torch.randn_like(rows)
        plain.grad = rows.grad.clone()
        optimizer.step(ids, rate=0.1, map_rate=0.0)
        adam.step()
    torch.testing.assert_close(rows[ids], plain[ids], rtol=1e-3, atol=1e-4)  # eps is added elsewhere
    others = [0, 2, 3, 5]
    assert torch.equal(rows[others], start_TH[others])


@pytest.mark.parametrize("with_map", [True, False])
def test_rows_that_no_text_has_learn_by_the_map_alone(with_map: bool) -> None:
    """Right rows are a linear function of the old ones; the ids of one half of the rows never occur."""
    rng = np.random.default_rng(1)
    pieces = [tuple(rng.integers(0, 40, rng.integers(1, 4)).tolist()) for _ in range(200)]
    network = make_network(pieces, num_old=40)
    right_TH = network(torch.randn(3, SIZE, SIZE), torch.randn(MOST_PIECES + 1, SIZE))
    rows, occurring = nn.Parameter(torch.zeros(200, SIZE)), torch.arange(100)
    optimizer = RowOptimizer(rows, network)
    for _ in range(300):
        grad_TH = torch.zeros(200, SIZE)
        grad_TH[occurring] = rows.detach()[occurring] - right_TH.detach()[occurring]
        rows.grad = grad_TH
        optimizer.step(occurring, rate=1e-4, map_rate=0.03 if with_map else 0.0)
    error = ((rows - right_TH)[100:].norm() / right_TH[100:].norm()).item()
    assert error < 0.1 if with_map else error == 1.0


def test_saved_weights_make_the_rows_of_any_pieces(tmp_path: Path) -> None:
    saved, other = make_network(), make_network([(4,), (1, 3)])
    with torch.no_grad():
        saved.maps_FHH.normal_()
        saved.numbers_LH.normal_()
    save_hypernetworks([saved], tmp_path / "below" / "weights.safetensors")
    load_hypernetworks([other], tmp_path / "below" / "weights.safetensors")
    expected_TH = [by_formula(saved._old_DH, *saved.parameters(), each) for each in ((4,), (1, 3))]
    torch.testing.assert_close(other.added(), torch.stack(expected_TH).detach())


@pytest.mark.parametrize("damage", ["absent", "no tensors", "another number", "another size"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    file, network = tmp_path / "weights.safetensors", make_network()
    if damage == "no tensors":
        file.write_text("nothing")
    if damage == "another number":
        save_hypernetworks([network, make_network()], file)
    if damage == "another size":
        save_hypernetworks([LinearHypernetwork(torch.randn(5, SIZE + 1), PackedLists.of(PIECES))], file)
    with pytest.raises(ConfigError, match="no hypernetwork of this model"):
        load_hypernetworks([network], file)
