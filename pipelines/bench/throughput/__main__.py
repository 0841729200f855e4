"""Tokens a second under many clients: our server, llama.cpp's own and vLLM's, one after the other on this machine.

`python -m pipelines.bench.throughput --prompts FILE --json OUT`. Each server is a process of its own, driven over HTTP
by the same streaming clients; OUT is written after every row. `scaling` follows from the rows.

tokens_per_s   completion tokens of all clients, by the server's usage, from the first request to the last answer's end
first_token_s  from sending to the first text
gap_s          of each token after that; tokens that came in one event share the time since the event before
"""

import signal
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import assembly, config, prompts
from omnidraft.cli.choices import chosen, numbers
from omnidraft.cli.options import Quantize
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.files import save_json
from omnidraft.hosts import process
from pipelines.bench.throughput import page
from pipelines.bench.throughput.clients import Workload
from pipelines.bench.throughput.measurement import Measurement, ThroughputPlan
from pipelines.bench.throughput.systems import NAMES, SERVERS, ServerSetup
from pipelines.lib import machine


def main(
    prompts_path: Annotated[
        Path, typer.Option("--prompts", help="JSON lines with prompt or question; test split.")
    ] = QUESTIONS,
    clients: Annotated[str, typer.Option(help="Numbers of clients, with commas; '' measures none.")] = "1,2,4,8,16",
    systems: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, with commas.")] = ",".join(SERVERS),
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of a row; at least two for each client.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    snapshot: Annotated[str | None, typer.Option(help="Folder, version or alias; the base drafter without it.")] = None,
    quantize: Quantize = None,
    long_prompt_tokens: Annotated[
        int | None, typer.Option("--long-prompt", min=64, help="Also: a prompt of so many tokens while 4 texts run.")
    ] = None,
    second_turn_tokens: Annotated[
        int | None, typer.Option("--second-turn", min=64, help="Also: a chat's turn after so many tokens of history.")
    ] = None,
    vllm_venv: Annotated[Path, typer.Option(help="The virtual environment of vLLM.")] = Path(".venv-vllm"),
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for rows and figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare servers under many clients.

    \b
    python -m pipelines.bench.throughput --quantize int8 --json runs/throughput.json
    python -m pipelines.bench.throughput --systems omnidraft --clients '' --long-prompt 2000 --second-turn 1000
    """
    names = chosen(systems, NAMES, "system")
    nums_clients = numbers(clients, "--clients") if clients else []
    models = {"target": target, "drafter": drafter, "precision": quantize}
    settings = config.load(config_path, models=models)
    texts = [each.text for each in prompts.read(prompts_path, split="test")]
    plan = ThroughputPlan(
        work=Workload(texts, assembly.vocabularies(settings).target),
        clients=nums_clients,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        long_prompt_tokens=long_prompt_tokens,
        second_turn_tokens=second_turn_tokens,
    )
    settings = _with_slots(settings, plan.num_slots)
    about = {
        "machine": machine.describe(),
        "options": {
            "command": machine.command("pipelines.bench.throughput"),
            "prompts": prompts_path.name,
            "snapshot": snapshot,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
        },
        "settings": settings.model_dump(mode="json"),
    }

    def publish(figures: dict[str, Any]) -> None:
        if json_path is not None:
            save_json(about | figures, json_path)

    with tempfile.TemporaryDirectory(prefix="omnidraft-throughput-") as folder:
        setup = ServerSetup(settings, config_path, snapshot, plan.num_slots, plan.slot_tokens, vllm_venv, Path(folder))
        measurement = Measurement(plan, publish)
        for name in names:
            measurement.measure(name, setup)
    page.show(measurement.figures)


def _with_slots(settings: config.Settings, num_slots: int) -> config.Settings:
    """Return settings with which our server decodes so many texts together, as the others do, unless they say how
    many."""
    if "max_num_seqs" in settings.scheduler.model_fields_set:
        return settings
    scheduler = settings.scheduler.model_copy(update={"max_num_seqs": num_slots})
    return settings.model_copy(update={"scheduler": scheduler})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its servers first
    process.entry("throughput", main)
