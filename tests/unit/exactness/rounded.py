"""A toy target whose passes round: the logits of a pass depend a little on how many rows it has."""

from collections.abc import Sequence

import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.ports import DraftTree, Mode
from omnidraft.testing.toy_models import ToyTable, ToyTarget, ToyTargetSession
from tests.unit.decode.toys import TABLE, TARGET_TOKENIZER


class RoundedTarget(ToyTarget):
    """Adds up to `error` to each logit, by text and number of rows."""

    def __init__(self, error: float, table: ToyTable = TABLE) -> None:
        super().__init__(table)
        self.error = error

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_RoundedSession":
        return _RoundedSession(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)


class _RoundedSession(ToyTargetSession):
    def _score(self, tree: DraftTree) -> torch.Tensor:
        logits_NV = super()._score(tree)
        target = self._target
        assert isinstance(target, RoundedTarget)
        generator = torch.Generator().manual_seed(1000 * len(self.kept) + len(tree))
        return logits_NV + target.error * (2 * torch.rand(logits_NV.shape, generator=generator) - 1)


def rounded_decoder(error: float, table: ToyTable = TABLE) -> Decoder:
    return Decoder(RoundedTarget(error, table), TARGET_TOKENIZER.vocabulary)
