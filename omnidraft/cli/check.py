"""`omnidraft check`: prove on one's own models that speculation changes nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omnidraft import config, files
from omnidraft.cli.options import Config, Engine, Quantize, Snapshot, download_bars
from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from omnidraft.config import Settings
    from omnidraft.exactness.check import CheckPlan


def check(
    target: Annotated[str | None, typer.Option(help="The model whose text must not change.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The small model that drafts.")] = None,
    engine: Engine = None,
    quantize: Quantize = None,
    snapshot: Snapshot = None,
    temperature: Annotated[str, typer.Option(help="One, or several with commas: 0,0.7,1.")] = "0,1",
    mode: Annotated[str, typer.Option(help="reproducible, fast, or both with a comma.")] = "reproducible,fast",
    prompts_path: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines with prompt or question. Default: some odd ones.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="The first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Drafted tokens per pass at most.")] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Decode so many texts together; each must be the text that it is alone.")
    ] = 1,
    law_samples: Annotated[int, typer.Option(min=100, help="Seeds that the law is tested with.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the texts, and the first of the law test.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the whole report here.")] = None,
    config_path: Config = None,
) -> None:
    """Decode with and without the drafter and compare; exit code 1 when anything differs without explanation.

    reproducible: not one token may differ. fast: a difference must lie within the rounding measured on this model.
    The first and second token of many seeds must follow the target's own probabilities.
    """
    from omnidraft import prompts
    from omnidraft.exactness.check import CheckPlan
    from omnidraft.files import require_writable_file

    temperatures, modes = _temperatures(temperature), _modes(mode)
    require_writable_file(json_path, makes_folder=False)
    rows = prompts.read(prompts_path, num_prompts) if prompts_path else prompts.built_in(num_prompts)
    models = {"target": target, "drafter": drafter, "engine": engine, "precision": quantize}
    settings = config.load(config_path, models=models)
    plan = CheckPlan([row.text for row in rows], max_new_tokens, num_draft_tokens, seed, law_samples, concurrency)
    result = _run_check(settings, plan, temperatures, modes, snapshot)
    _show(result)
    if json_path is not None:
        files.save_json(result, json_path)
    raise typer.Exit(0 if result["passed"] else 1)


def _temperatures(text: str) -> list[float]:
    from omnidraft.params import MAX_TEMPERATURE

    try:
        given = [float(each) for each in text.split(",")]
    except ValueError as exc:
        raise RequestError(f"temperature must be numbers with commas between them, got {text!r}") from exc
    if any(not 0 <= each <= MAX_TEMPERATURE for each in given):
        raise RequestError(f"temperature must be between 0 and {MAX_TEMPERATURE}, got {text}")
    return given


def _modes(text: str) -> "list[config.Mode]":
    modes: tuple[config.Mode, ...] = get_args(config.Mode)[::-1]
    given = [each for name in text.split(",") for each in modes if each == name.strip()]
    if len(given) < len(text.split(",")):
        raise RequestError(f"mode must be {' or '.join(modes)}, or both with a comma, got {text!r}")
    return given


def _run_check(
    settings: "Settings", plan: "CheckPlan", temperatures: list[float], modes: "list[config.Mode]", snapshot: str | None
) -> dict[str, Any]:
    """Run the whole check under a progress bar; return the report."""
    from omnidraft import assembly
    from omnidraft.exactness.check import ExactnessCheck
    from omnidraft.progress import bar
    from omnidraft.telemetry.metrics import CountingMetrics

    with download_bars() as progress:
        engine = assembly.engine(settings, CountingMetrics(), snapshot=snapshot, progress=progress).engine
    with bar("checking", plan.num_progress_steps(temperatures, modes), transient=True) as advance:
        return ExactnessCheck(engine, plan, advance).report(temperatures, modes)


def _show(result: dict[str, Any]) -> None:
    """Print a row per run, every unexplained difference, and the verdict."""
    console = Console()
    table = Table(title=escape(f"{result['target']} <- {result['drafter']} ({result['snapshot']})"))
    for name in ("mode", "temperature", "texts", "identical", "explained", "unexplained", "tokens per pass", "law"):
        table.add_column(name, justify="left" if name in ("mode", "law") else "right")
    for run in result["runs"]:
        names = ("texts", "identical", "explained", "unexplained", "tokens_per_pass")
        table.add_row(
            run["mode"], f"{run['temperature']:g}", *(f"{run[name]:g}" for name in names), _distribution_text(run)
        )
    console.print(table)
    for run in result["runs"]:
        for each in run["differences"]:
            if not each["is_explained"]:
                console.print(_difference_text(run, each), markup=False, highlight=False)
        for test in run["law_positions"]:
            if not test["passed"]:
                console.print(_distribution_failure(run, test), markup=False, highlight=False)
    if not all(run["scored"] for run in result["runs"]):
        console.print(
            "Nothing was drafted in some runs: drafting loses time on this pair. decode.policy = 'fixed' drafts."
        )
    console.print(_verdict(result), style="bold green" if result["passed"] else "bold red")


def _name(run: dict[str, Any]) -> str:
    return f"{run['mode']}, temperature {run['temperature']:g}"


def _distribution_text(run: dict[str, Any]) -> str:
    test = run["law"]
    sign = "<=" if test["tv"] <= test["tv_limit"] else ">"
    return f"{'passed' if test['passed'] else 'FAILED'}: TV {test['tv']:.3f} {sign} {test['tv_limit']:.3f}"


def _distribution_failure(run: dict[str, Any], test: dict[str, Any]) -> str:
    """Describe a position whose distribution differs from plain decoding's."""
    return (
        f"{_name(run)}: {test['samples']} samples of token {test['position']} of "
        f"the answer to\n  {run['law_prompt']!r}\n"
        f"  total variation from plain decoding's law: {test['tv']:.4f}, chance explains {test['tv_limit']:.4f} "
        f"but for odds of {test['odds']:g}\n"
        f"  impossible tokens: {test['impossible']}\n"
        f"  logits apart from plain decoding's: {test['logit_difference']:.3g}, allowed {test['logit_limit']:.3g}\n"
    )


def _difference_text(run: dict[str, Any], each: dict[str, Any]) -> str:
    return (
        f"{_name(run)}: texts part at token {each['position']} of the answer to\n"
        f"  {each['prompt']!r}\n"
        f"  why:         {each['problem']}\n"
        f"  before:      {each['before']!r}\n"
        f"  plain:       {each['plain_text']!r} (token {each['plain_token']})\n"
        f"  speculation: {each['drafted_text']!r} (token {each['drafted_token']})\n"
    )


def _verdict(result: dict[str, Any]) -> str:
    if not result["passed"]:
        return f"NOT EXACT: {result['unexplained']} of {result['texts']} texts differ without explanation" + (
            "" if result["law"]["passed"] else ", and the law test failed"
        )
    explained = f", {result['explained']} differ within rounding" if result["explained"] else ""
    return f"EXACT: {result['identical']} of {result['texts']} texts are identical{explained}; the law test passed"
