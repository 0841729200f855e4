"""Pictures of the soak's figures, for its page."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipelines.lib.pictures import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "decode_worker": "#3b6ea5",
    "broker": "#c44e52",
    "registry": "#8172b2",
    "actor": "#55a868",
    "distiller": "#ccb974",
    "controller": "#64b5cd",
}

MEAN_OF = 8
"""The number of requests in a moving mean."""


def draw(parts: Mapping[str, Any], folder: Path, stem: str) -> dict[str, str]:
    """Draw a picture for each part that has one; return part -> file name below `folder`."""
    painters = {"kills": _kills, "broker-down": _speeds, "fuzz": _memory, "throughput": _rates, "drift": _agreement}
    names = {}
    for name, paint in painters.items():
        if not parts.get(name, {}).get("figures"):
            continue
        names[name] = f"{stem}-{name}.png"
        with picture(folder / names[name], figsize=(11, 3.2)) as (_, axis):
            paint(axis, parts[name]["figures"])
    return names


def _kills(axis: "Axes", figures: Mapping[str, Any]) -> None:
    """Draw answers over time, and the kills."""
    answers = figures["answers_per_10s"]
    minutes = [index / 6 for index in range(len(answers))]
    axis.step(minutes, answers, where="post", color="black", linewidth=1, label="answers in 10 s")
    for victim, colour in COLOURS.items():
        at = [second / 60 for second, name in figures["kills_at_s"] if name == victim]
        axis.vlines(at, 0, max(answers, default=1), color=colour, linewidth=1, alpha=0.7, label=f"{victim} killed")
    axis.set_xlabel("minutes")
    axis.set_title(f"{figures['kills']} SIGKILLs, {figures['answers']} answers")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _speeds(axis: "Axes", figures: Mapping[str, Any]) -> None:
    """Draw a bar for each window."""
    windows = figures["windows"]
    names = [f"{window['kind']}\n{index + 1}" for index, window in enumerate(windows)]
    colours = ["#3b6ea5" if window["kind"] == "up" else "#c44e52" for window in windows]
    bars = axis.bar(names, [window["tokens_per_s"] for window in windows], color=colours)
    axis.bar_label(bars, fmt="%.2f")
    axis.margins(y=0.15)
    axis.set_ylabel("tokens/s")
    axis.set_title("Decoding speed, broker up and away")


def _memory(axis: "Axes", figures: Mapping[str, Any]) -> None:
    axis.plot(figures["peaks_rss_mib"], color="#3b6ea5")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("batch")
    axis.set_ylabel("peak memory, MiB")
    axis.set_title(f"{figures['messages']:,} hostile records")


def _rates(axis: "Axes", figures: Mapping[str, Any]) -> None:
    for rate in figures.values():
        size = f"{rate['size_bytes'] // 1000} kB"
        share = [number / rate["asked_per_s"] for number in rate["read_by_second"]]
        axis.plot(share, label=f"{size} read, of {rate['asked_per_s']:,}/s")
    axis.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axis.set_ylim(0, 1.6)
    axis.set_xlabel("second")
    axis.set_ylabel("share of the asked rate")
    axis.set_title("Records through one topic")
    axis.legend(loc="lower right")


def _agreement(axis: "Axes", figures: Mapping[str, Any]) -> None:
    """Draw the agreement of each request, their moving mean, and the announcements of drift."""
    agreements, changed_at = figures["agreements"], figures["changed_at"]
    means = [fmean(agreements[max(0, end - MEAN_OF) : end]) for end in range(1, len(agreements) + 1)]
    axis.plot(agreements, ".", color="#9bb3cd")
    axis.plot(means, color="#3b6ea5", label=f"mean of {MEAN_OF} requests")
    axis.axvline(changed_at, color="black", linewidth=1, linestyle="--", label=" to ".join(figures["tasks"]))
    for name, colour in (("told", "#c44e52"), ("over", "#55a868")):
        if (number := figures[f"{name}_after_requests"]) is not None:
            axis.axvline(changed_at + number, color=colour, linewidth=1, label=f"drift {name}")
    axis.set_xlabel("requests")
    axis.set_ylabel("agreement")
    axis.legend(loc="lower left", fontsize=8)
