"""The report of a transfer: a JSON file, and a picture of losses, learning rate and bits per byte."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnidraft.pictures import picture

JSON_FILE, PICTURE_FILE = "transfer.json", "transfer.png"


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write both files into a folder."""
    (folder / JSON_FILE).write_text(json.dumps(report, indent=2) + "\n")
    _draw(report, folder / PICTURE_FILE)


def _draw(report: Mapping[str, Any], path: Path) -> None:
    curve, before = report["curve"], report["bits_per_byte"]["original"]
    with picture(path, ncols=2, figsize=(11, 3.6), layout="tight") as (_, (left, right)):
        steps = [point["step"] for point in curve]
        left.plot(steps, [point["bits_per_byte"] for point in curve], marker="o", label="with the new tokenizer")
        left.axhline(before, color="black", linewidth=1, linestyle="--", label="the original model")
        left.set(xlabel="steps", ylabel="bits per byte, held-out texts")
        left.legend()
        learned = [point for point in curve if point["losses"]]
        for name in learned[0]["losses"] if learned else ():
            right.plot([point["step"] for point in learned], [point["losses"][name] for point in learned], label=name)
        right.set(xlabel="steps", ylabel="mean loss", yscale="log" if learned else "linear")
        rates = right.twinx()
        rates.plot(
            steps, [point["learning_rate"] for point in curve], color="grey", linestyle=":", label="learning rate"
        )
        rates.set_ylabel("learning rate")
        if learned:
            right.legend(loc="upper right")
