"""The costs of passes on this machine, kept for the next start."""

import hashlib

from omnidraft.config import Settings
from omnidraft.decode.policy.cost_file import CostFile
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.models.catalog import store
from omnidraft.models.probe.subprocess_trial import processor
from omnidraft.ports import Target


def measured_costs(settings: Settings, loaded_target: Target) -> MeasuredCosts:
    """Measure the costs of the target, at once for the default mode if the policy needs them."""
    models = settings.models
    drafter_name = f"{models.drafter} in {models.drafter_precision}"
    costs = MeasuredCosts(loaded_target, _cost_file(loaded_target), drafter_name)
    if settings.decode.policy == "cost":
        costs.passes(settings.decode.mode)
    return costs


def _cost_file(loaded_target: Target) -> CostFile:
    """Return the file of this target's costs on this machine."""
    import torch

    facts = (loaded_target.fingerprint, torch.get_num_threads(), processor())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return CostFile(store.default_home() / "costs" / f"{name}.json")
