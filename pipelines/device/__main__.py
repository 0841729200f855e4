"""One user's requests through `LLM(learn=True)`: memory, processor time, tokens a pass, agreement by learned tokens.

`python -m pipelines.device --prompts FILE --split train --home runs/device/home --json runs/device/report.json`. The
requests are asked one after another, and learned from in the pauses between them. After 50 and 200 of them
(`--at`) the process closes its LLM, as at the end of a day, opens it again, and answers the test prompts, which are
never learned. At the end each snapshot is judged on the target's own answers to them. The report is written after
every stage and after every snapshot judged.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, prompts
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.progress import bar
from pipelines.device.curve import CurvePoint, agreement_curve
from pipelines.device.pictures import draw
from pipelines.device.user import DeviceUser, Stage
from pipelines.lib import machine, report
from pipelines.lib.choices import numbers


def main(
    prompts_path: Annotated[Path, typer.Option("--prompts", help="JSON lines with prompt or question, of one user.")],
    home: Annotated[Path, typer.Option(help="The folder of the user's drafter; it must not exist.")],
    at: Annotated[str, typer.Option(help="Numbers of requests after which is measured, with commas.")] = "50,200",
    num_test: Annotated[int, typer.Option(min=2, help="Prompts after the last request that are only measured.")] = 16,
    split: Annotated[str | None, typer.Option(help="Only rows of this split, for example train.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The limit of each answer.")] = 256,
    pause_every: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests between two pauses. One pause lasts until all that was asked is learned, the next one is "
            "cut short in the middle of it.",
        ),
    ] = 4,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    quantize: Annotated[str | None, typer.Option(help="The target's precision, such as int8.")] = None,
    train: Annotated[str | None, typer.Option(help="full, or lora; without it as the API has it.")] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A PNG of the curve and of the tokens a pass.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Measure what a drafter learns from one user on one device, and what that costs."""
    if home.exists():
        raise RequestError(f"{home} exists; the figures are those of a drafter that begins anew")
    stages = sorted(numbers(at, "--at"))
    rows = prompts.read(prompts_path, stages[-1] + num_test, split=split)
    if len(rows) < stages[-1] + 2:
        raise RequestError(f"{prompts_path} has {len(rows)} prompts, too few for {stages[-1]} requests and a test")
    asked, test = rows[: stages[-1]], rows[stages[-1] :]
    models = {"target": target, "drafter": drafter, "precision": quantize}
    learner = {"train": train, "learning_rate": learning_rate}
    settings = config.load(config_path, models=models, learner=learner)
    user = DeviceUser(settings, home, max_new_tokens=max_new_tokens, pause_every=pause_every)
    options = {
        "prompts": str(prompts_path),
        "split": split,
        "at": stages,
        "num_test": len(test),
        "max_new_tokens": max_new_tokens,
        "pause_every": pause_every,
    }
    measured, curve = list[Stage](), list[CurvePoint]()

    def save() -> None:
        if json_path is not None:
            about = machine.made_by("pipelines.device") | {"options": options}
            report.save(about | _figures(user, measured, curve), json_path)

    with bar("asking", len(asked) + len(test) * (1 + len(stages))) as advance:
        for stage in user.live(asked, test, stages, advance):
            measured.append(stage)
            save()
    save()  # the costs of all days are known now
    with bar("judging snapshots", len(user.snapshots)) as advance:
        for point in agreement_curve(user.settings, user.snapshots, test, user.answers):
            curve.append(point)
            save()
            advance()
    _print(measured, curve, user.costs)
    if picture is not None:
        draw(measured, curve, picture)


def _figures(user: DeviceUser, measured: list[Stage], curve: list[CurvePoint]) -> dict[str, Any]:
    """Return the fields of the report that are known so far."""
    return {
        "settings": user.settings.model_dump(mode="json", include={"models", "decode", "learner", "cache"}),
        "costs": user.costs,
        "stages": [each.plain_data() for each in measured],
        "curve": [each.plain_data() for each in curve],
        "answers": user.answers,
    }


def _print(stages: list[Stage], curve: list[CurvePoint], costs: dict[str, Any]) -> None:
    table = Table("requests", "tokens a pass", "tokens/s", "CPU s a token", "snapshot", title="On the test prompts")
    for each in stages:
        error = "" if each.tokens_per_pass_error is None else f" +- {each.tokens_per_pass_error:.2f}"
        cells = (f"{each.tokens_per_pass:.2f}{error}", f"{each.tokens_per_s:.1f}", f"{each.cpu_s_per_token:.3f}")
        table.add_row(str(each.num_requests), *cells, str(each.serving_version))
    console = Console()
    console.print(table)
    for point in curve:
        error = "" if point.gain_error is None else f" +- {point.gain_error:.4f}"
        console.print(
            f"{point.num_tokens} tokens learned: agreement {point.agreement:.4f}, gain {point.gain:+.4f}{error}"
        )
    console.print(*(f"{name}: {value}" for name, value in costs.items()), sep="\n")


if __name__ == "__main__":
    process.entry("device", main)
