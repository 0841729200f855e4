"""`omnidraft run`: run one of the services."""

from typing import Annotated

import typer

from omnidraft.cli.options import Config

app = typer.Typer(help="Be one of the services until SIGTERM.", no_args_is_help=True)


@app.command("worker")
def worker_command(
    snapshot: Annotated[
        str | None, typer.Option(help="Serve with this folder, version or alias for good, whatever is champion.")
    ] = None,
    config_path: Config = None,
) -> None:
    """Serve requests over HTTP and record traces."""
    from omnidraft.hosts import process, worker

    raise typer.Exit(process.serve("worker", worker.main, config_path, worker={"snapshot": snapshot}))


@app.command("distiller")
def distiller_command(config_path: Config = None) -> None:
    """Learn from the trace log and publish snapshots."""
    from omnidraft.hosts import distiller, process

    raise typer.Exit(process.serve("distiller", distiller.main, config_path))


@app.command("controller")
def controller_command(config_path: Config = None) -> None:
    """Decide which snapshot serves."""
    from omnidraft.hosts import controller, process

    raise typer.Exit(process.serve("controller", controller.main, config_path))
