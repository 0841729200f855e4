"""The acceptance head: what it reads, what it learns, and how it travels."""

import math

import pytest
import torch

from omnidraft.errors import SnapshotCorrupt
from omnidraft.models.acceptance_head import PREFIX, AcceptanceHead
from omnidraft.models.hf.drafter import TorchDrafter, load_drafter
from omnidraft.models.native.drafter import NativeDrafter
from tests.unit.models.tiny import CONFIGS, SHAPE, text, tiny_model

HIDDEN_SIZE = SHAPE["hidden_size"]
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.2}
"""Deviation of the hidden states, relative to their own; see test_llama_drafter.py."""


def trained_head(seed: int = 3) -> AcceptanceHead:
    """Random weights everywhere, so that every hidden state has its own acceptance."""
    head = AcceptanceHead(HIDDEN_SIZE, num_blocks=2, seed=seed)
    with torch.no_grad():
        torch.nn.init.normal_(head.out.weight, generator=torch.Generator().manual_seed(seed))
        head.slope.fill_(0.7)
    return head.requires_grad_(False)


@torch.inference_mode()
def hidden_of(name: str, ids: list[int]) -> torch.Tensor:
    """The input of the head matrix behind the last id, by transformers in one pass. [H]"""
    return tiny_model(name).get_decoder()(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]


def test_an_untrained_head_believes_the_drafter() -> None:
    (acceptance,) = AcceptanceHead(8).acceptance_probabilities(torch.randn(1, 8))
    for q in (0.001, 0.3, 0.9):
        assert acceptance(math.log(q)) == pytest.approx(q, abs=1e-6)


def test_acceptance_is_what_was_trained() -> None:
    head, hidden_NH = trained_head(), torch.randn(5, HIDDEN_SIZE)
    log_q_N = torch.tensor([-30.0, -2.0, -0.5, -1e-4, 0.0])
    served = [
        acceptance(log_q)
        for acceptance, log_q in zip(head.acceptance_probabilities(hidden_NH), log_q_N.tolist(), strict=True)
    ]
    torch.testing.assert_close(torch.tensor(served), head.logits(hidden_NH, log_q_N).sigmoid())


def test_it_learns_what_only_the_hidden_state_tells() -> None:
    """Accepted or not is a corner of two hidden numbers; the drafter is always as sure."""
    draws = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(512, 8, generator=draws)
    label_N = (hidden_NH[:, 0] * hidden_NH[:, 1] > 0).float()
    head, log_q_N = AcceptanceHead(8, num_blocks=2), torch.full((512,), math.log(0.5))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(head.logits(hidden_NH, log_q_N), label_N).backward()
        optimizer.step()
    is_right_N = (head.logits(hidden_NH, log_q_N) > 0) == label_N.bool()
    assert is_right_N.float().mean() > 0.95


@pytest.mark.parametrize("precision", MAX_ERROR)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_native_drafter_reads_transformers_hidden_states(name, precision) -> None:
    """Rows of prefill, of branches (few and many), and of a text that runs along a branch."""
    drafter = NativeDrafter(tiny_model(name), precision, head=trained_head())
    session, ids = drafter.open(), text(70)
    backend = session.backend
    session.prefill_or_extend(0, ids)
    seen = [(backend.hidden_RH, [ids])]
    session.branch([3, 4, 5], [-1, 0, -1])
    seen.append((backend.hidden_RH, [[*ids, 3], [*ids, 3, 4], [*ids, 5]]))
    many = text(9, seed=1)
    session.branch(many, [-1] * 9)
    seen.append((backend.hidden_RH, [[*ids, token] for token in many]))
    for hidden_RH, texts in seen:
        assert hidden_RH.shape == (len(texts), HIDDEN_SIZE)
        for got, each in zip(hidden_RH, texts, strict=True):
            reference = hidden_of(name, each)
            assert (got - reference).std() / reference.std() < MAX_ERROR[precision]


@pytest.mark.parametrize(
    ("kind", "name"), [("native", "llama"), ("native", "qwen2"), *(("transformers", name) for name in CONFIGS)]
)
def test_acceptance_belongs_to_the_rows_of_the_last_call(name, kind) -> None:
    """Also when a text ran along branches, so that nothing was computed."""
    head = trained_head()
    model = tiny_model(name)
    drafter = NativeDrafter(model, "float32", head=head) if kind == "native" else TorchDrafter(model, head)
    session, ids = drafter.open(), text(9)

    def assert_acceptance_of(texts: list[list[int]]) -> None:
        reference = head.acceptance_probabilities(torch.stack([hidden_of(name, each) for each in texts]))
        assert [acceptance(-1.0) for acceptance in session.acceptance_probabilities()] == pytest.approx(
            [acceptance(-1.0) for acceptance in reference], abs=1e-4
        )

    session.prefill_or_extend(0, ids)
    assert_acceptance_of([ids])
    session.branch([5, 6], [-1, 0])
    assert_acceptance_of([[*ids, 5], [*ids, 5, 6]])
    session.branch([7], [1])
    assert_acceptance_of([[*ids, 5, 6, 7]])
    session.prefill_or_extend(9, [5, 6])
    assert_acceptance_of([[*ids, 5, 6]])
    session.prefill_or_extend(11, [8])
    assert_acceptance_of([[*ids, 5, 6, 8]])


def test_without_a_head_there_is_no_acceptance_and_no_hidden_state() -> None:
    for drafter in (NativeDrafter(tiny_model("llama"), "float32"), TorchDrafter(tiny_model("llama"))):
        session = drafter.open()
        session.prefill_or_extend(0, text(5))
        assert not drafter.has_head
        assert session.acceptance_probabilities() is None
        assert not len(session.backend.hidden_RH)


def base_tensors() -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in tiny_model("llama").named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter") / "model"
    tiny_model("llama").save_pretrained(path)
    return path


def test_a_snapshots_head_comes_with_its_drafter(folder) -> None:
    head = trained_head()
    drafter = load_drafter(folder, "float32", base_tensors() | dict(head.trained()), "full")
    session, ids = drafter.open(), text(6)
    session.prefill_or_extend(0, ids)
    (reference,) = head.acceptance_probabilities(hidden_of("llama", ids)[None])
    assert drafter.has_head
    assert session.acceptance_probabilities()[0](-0.5) == pytest.approx(reference(-0.5), abs=1e-4)


def test_half_a_head_or_one_of_another_drafter_is_refused(folder) -> None:
    whole = dict(trained_head().trained())
    halves = [{name: tensor for name, tensor in whole.items() if name != left_out} for left_out in whole]
    wider = dict(AcceptanceHead(HIDDEN_SIZE + 8).trained())
    for wrong in (*halves, wider, {f"{PREFIX}out.weight": torch.zeros(1, HIDDEN_SIZE), **wider}):
        with pytest.raises(SnapshotCorrupt, match="acceptance head"):
            load_drafter(folder, "float32", base_tensors() | wrong, "full")
