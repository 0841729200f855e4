"""The costs that a start keeps for the next one belong to the models, the machine and the build of the kernels."""

import time

from omnidraft.config import Settings
from omnidraft.testing.toy_models import ToyTable, ToyTarget, ToyTargetSession
from omnidraft.wiring.costs import measured_costs


class Counting(ToyTarget):
    """Counts its passes, which take so long that the machine's noise does not tell one start from the next."""

    num_passes = 0

    def open(self, prompt_ids, max_new_tokens, mode):
        class Session(ToyTargetSession):
            def score(self, tree):
                self.target.num_passes += 1
                time.sleep(0.01)
                return super().score(tree)

        session = Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)
        session.target = self
        return session


def num_passes(kernels: str) -> int:
    target = Counting(ToyTable.random(30, seed=1))
    target.fingerprint = "counting"
    measured_costs(Settings(models={"kernels": kernels}), target)
    return target.num_passes


def test_other_kernels_are_measured_anew_though_their_bits_are_the_same(omnidraft_home, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    first = num_passes("torch")
    assert num_passes("torch") < first
    assert num_passes("portable") == first
    assert num_passes("portable") < first
