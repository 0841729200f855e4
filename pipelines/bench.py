"""Decoding speed, side by side in one process on the same prompts, interleaved.

`python -m pipelines.bench --prompts FILE --json OUT`. Methods: `plain` is our engine with speculation off and unpadded
passes; `omnidraft` the same engine in the chosen mode; `hf-generate` is transformers' own greedy generate in bfloat16.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnidraft import config, prompts, wiring
from omnidraft.decode.engine import Question
from omnidraft.decode.figures import Figures
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.hosts import process
from omnidraft.ports import Mode, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines import report

Method = Callable[[str], Figures]
METHODS = ("plain", "omnidraft", "hf-generate")
DEFAULT_PROMPTS = Path(__file__).parent / "data" / "gsm8k.jsonl"


def main(
    prompts_path: Annotated[
        Path, typer.Option("--prompts", help="JSON lines with prompt or question.")
    ] = DEFAULT_PROMPTS,
    num_prompts: Annotated[int, typer.Option(min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}, with commas.")] = ",".join(METHODS),
    mode: Annotated[str, typer.Option(help="fast or reproducible, for omnidraft.")] = "reproducible",
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the rows go.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare decoding methods."""
    names = [name.strip() for name in methods.split(",")]
    if unknown := sorted(set(names) - set(METHODS)):
        raise RequestError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    if "plain" not in names:
        raise RequestError("--methods needs plain: speed-ups are quoted against it")
    settings = config.load(config_path, models={"target": target, "drafter": drafter}, decode={"mode": mode})
    chosen = _methods(names, settings, max_new_tokens, Sampling(temperature))
    asked = prompts.read(prompts_path, num_prompts)
    runs: dict[str, list[Figures | None]] = {name: [] for name in names}
    for name in names:
        chosen[name](asked[0].text)  # warm-up
    for number, prompt in enumerate(track(asked, "measuring")):
        for name in names if number % 2 == 0 else reversed(names):
            runs[name].append(_guarded(chosen[name], prompt.text, name))
    rows = [_row(name, runs[name], runs["plain"]) for name in names]
    Console().print(_table(rows))
    if json_path is not None:
        machine = {"processor": platform.processor() or platform.machine(), "system": platform.platform()}
        report.save({"machine": machine, "settings": settings.model_dump(mode="json"), "rows": rows}, json_path)


def _methods(names: list[str], settings: config.Settings, max_new_tokens: int, sampling: Sampling) -> dict[str, Method]:
    engine = wiring.engine(settings, CountingMetrics()).engine

    def ours(mode: Mode, num_draft_tokens: int | None) -> Method:
        def run(text: str) -> Figures:
            figures = Figures()
            question = Question(
                messages=[{"role": "user", "content": text}],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seed=0,
                mode=mode,
                num_draft_tokens=num_draft_tokens,
            )
            for step in engine.answer(question).steps:
                figures.take(step)
            return figures

        return run

    made: dict[str, Method] = {"plain": ours("fast", 0), "omnidraft": ours(settings.decode.mode, None)}
    if "hf-generate" in names:
        made["hf-generate"] = _hf_generate(settings, max_new_tokens)
    return made


def _hf_generate(settings: config.Settings, max_new_tokens: int) -> Method:
    from omnidraft.models.hf_generate import HfGenerate

    words = wiring.vocabularies(settings)
    model = HfGenerate(words.target_folder)

    def run(text: str) -> Figures:
        prompt_ids = words.target.chat_prompt_ids([{"role": "user", "content": text}])
        made = model.generate(prompt_ids, max_new_tokens, sorted(words.target.stop_ids))
        num_tokens = len(made.ids)
        return Figures(
            num_tokens=num_tokens, num_passes=num_tokens, num_later_tokens=num_tokens - 1, decode_s=made.decode_s
        )

    return run


def _guarded(method: Method, text: str, name: str) -> Figures | None:
    """None, reported, when the method fails on a prompt."""
    try:
        return method(text)
    except (OmnidraftError, RuntimeError, ValueError) as exc:
        print(f"{name} failed on a prompt: {exc}")
        return None


def _row(name: str, runs: list[Figures | None], plain: list[Figures | None]) -> dict[str, Any]:
    done = [figures for figures in runs if figures]
    pairs = [(mine, base) for mine, base in zip(runs, plain, strict=True) if mine and base]
    total = sum(done, Figures())
    return {
        "method": name,
        "tokens_per_s": total.tokens_per_s,
        "tokens_per_pass": total.tokens_per_pass,
        "speedup": median(mine.tokens_per_s / base.tokens_per_s for mine, base in pairs) if pairs else None,
        "agreement": total.agreement,
        "overhead_share": total.other_s / total.decode_s if total.decode_s else None,
        "failed_prompts": len(runs) - len(done),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method", "tokens/s", "tokens per pass", "speed-up over plain", "failed prompts")
    for row in rows:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        numbers = (f"{row['tokens_per_s']:.2f}", f"{row['tokens_per_pass']:.2f}")
        table.add_row(row["method"], *numbers, speedup, str(row["failed_prompts"]))
    return table


if __name__ == "__main__":
    process.entry("bench", main)
