"""The picture of one user's days: agreement by learned tokens, and tokens a pass before and after."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.device.curve import CurvePoint
from pipelines.device.user import Stage
from pipelines.lib.pictures import picture


def draw(stages: Sequence[Stage], curve: Sequence[CurvePoint], path: Path) -> None:
    """Draw both panels, with standard errors, as PNG; those of the agreement are of its gain over the first point."""
    with picture(path, ncols=2, figsize=(10, 3.6), width_ratios=(2, 1)) as (figure, (left, right)):
        errors = [point.gain_error or 0.0 for point in curve]
        left.errorbar(
            [point.num_tokens for point in curve], [point.agreement for point in curve], errors, marker="o", capsize=3
        )
        left.set_xlabel("tokens of the target learned")
        left.set_ylabel("agreement on the test answers\n(bars: error of the gain over the first)")
        names = [f"{stage.num_requests}\nrequests" for stage in stages]
        heights, spreads = zip(
            *((stage.tokens_per_pass, stage.tokens_per_pass_error or 0.0) for stage in stages), strict=True
        )
        bars = right.bar(names, heights, yerr=spreads, capsize=3, color="#3b6ea5")
        right.bar_label(bars, fmt="%.2f", label_type="center", color="white")
        right.set_ylabel("tokens per target pass")
        figure.tight_layout()
