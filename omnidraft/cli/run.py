"""`omnidraft serve` and `omnidraft run`: run one of the services until SIGTERM.

`serve` puts OpenAI's and Anthropic's APIs in front of a target, given two model names; `run` takes everything from the
settings.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.cli.options import Config, Engine, Mode, Quantize, download_bars, group
from omnidraft.progress import stages

if TYPE_CHECKING:
    from omnidraft.config import Settings

app = group("Be one of the services until SIGTERM.")


def serve(
    target: Annotated[str | None, typer.Option(help="The model whose text you get: a name, folder or hub id.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Small model that drafts; any tokenizer, or none.")] = None,
    more_targets: Annotated[
        list[str] | None, typer.Option("--more-target", help="Serve this one too; may be given again.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; 127.0.0.1 unless the settings say more.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="8000 unless the settings say more; 0: any free one.")
    ] = None,
    engine: Engine = None,
    quantize: Quantize = None,
    mode: Annotated[Mode | None, typer.Option(help="How texts are decoded, unless a request says it.")] = None,
    snapshot: Annotated[
        str | None, typer.Option(help="Draft with this version, alias or snapshot folder for good.")
    ] = None,
    record: Annotated[
        bool | None, typer.Option("--record/--no-record", help="Whether a learner may see the requests.")
    ] = None,
    config_path: Config = None,
) -> None:
    """Serve OpenAI's API (chat, completions, Responses), Anthropic's Messages, /tokenize and a page until SIGTERM.

    Needs nothing beside it: traces go to an SQLite file in runs/omnidraft, and the drafter serves as it comes. It
    learns where `omnidraft run distiller` and `omnidraft run controller` run in the same folder for the same pair,
    which they take from --config or OMNIDRAFT_MODELS__TARGET and OMNIDRAFT_MODELS__DRAFTER.

    \b
    omnidraft serve --target qwen2.5-coder-1.5b --drafter smollm2-135m
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "What is 12 * 17?"}]}'

    API keys: OMNIDRAFT_WORKER__API_KEYS='[{"key": "...", "tenant": "team-a"}]'. All of it: docs/http-api.md.
    """
    from omnidraft.hosts import process

    models = {"target": target, "drafter": drafter, "engine": engine, "precision": quantize}
    overrides = {
        "models": models | {"more_targets": tuple(more_targets) if more_targets else None},
        "worker": {"host": host, "port": port, "snapshot": snapshot},
        "decode": {"mode": mode},
        "recorder": {"enabled": record},
    }
    process.serve_and_exit("serve", _main, config_path, **overrides)


def _main(settings: "Settings") -> int:
    """Pull missing models with a progress bar, then run the worker."""
    from omnidraft import extras
    from omnidraft.hosts import process
    from omnidraft.models.catalog import store

    extras.require("serve", "omnidraft serve")
    models = settings.models
    with download_bars() as progress:
        for name in models.names:
            if models.engine == "llamacpp" and name != models.drafter:
                store.resolve_tokenizer(name, converts_weights=False, progress=progress)
            else:
                store.resolve(name, progress=progress)
    return process.run_worker(settings)


@app.command("worker")
def worker_command(
    snapshot: Annotated[
        str | None, typer.Option(help="Serve with this folder, version or alias for good, whatever is champion.")
    ] = None,
    config_path: Config = None,
) -> None:
    """Serve requests over HTTP and record traces."""
    from omnidraft.hosts import process

    process.serve_and_exit("worker", process.run_worker, config_path, worker={"snapshot": snapshot})


@app.command("distiller")
def distiller_command(config_path: Config = None) -> None:
    """Learn from the trace log and publish snapshots."""
    from omnidraft.hosts import process
    from omnidraft.throttle import start_session

    start_session()
    process.serve_and_exit("distiller", _run_distiller, config_path)


@app.command("controller")
def controller_command(config_path: Config = None) -> None:
    """Decide which snapshot serves."""
    from omnidraft.hosts import process

    process.serve_and_exit("controller", _run_controller, config_path)


def _run_distiller(settings: "Settings") -> int:
    stages.info("loading libraries")
    from omnidraft.hosts import distiller

    return distiller.main(settings)


def _run_controller(settings: "Settings") -> int:
    stages.info("loading libraries")
    from omnidraft.hosts import controller

    return controller.main(settings)
