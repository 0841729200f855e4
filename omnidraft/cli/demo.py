"""`omnidraft demo`: watch a drafter learn and get faster, or traffic drift away from it and the fleet recover."""

import time
from pathlib import Path
from typing import Annotated

import typer

from omnidraft.demo.recorded import NUM_TEST


def demo(
    drift: Annotated[
        bool,
        typer.Option(
            "--drift",
            help="Rehearse an alarm instead, in two to five minutes: traffic changes, agreement falls, the "
            "controller notices, and the fleet recovers. Ends with a table and a picture over time. Of the other "
            "options it takes --log and --out.",
        ),
    ] = False,
    log: Annotated[
        str | None, typer.Option(help="sqlite:///path or kafka://host:port; a fresh SQLite file if absent.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for everything that this run writes.")] = Path("runs/demo"),
    num_questions: Annotated[int, typer.Option(min=1, max=NUM_TEST, help="Questions to measure on.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per measured answer.")] = 30,
    num_recorded: Annotated[
        int, typer.Option(min=1, help="Recorded answers replayed before live traffic, at most.")
    ] = 96,
    num_live: Annotated[int, typer.Option(min=0, max=40, help="Questions served as live traffic.")] = 3,
    num_snapshots: Annotated[int, typer.Option(min=1, help="Snapshots to learn.")] = 2,
) -> None:
    """Watch a drafter with another vocabulary learn from a target's traffic and speed it up.

    Some minutes on two cores, and 1.2 GB of models the first time. Ends with a picture, and with how to serve what was
    learned.
    """
    print("loading omnidraft", flush=True)
    run = out / time.strftime("%Y%m%d-%H%M%S")
    if drift:
        from omnidraft.demo.drift import rehearse

        return rehearse(run, log)
    from omnidraft.demo.run import DemoPlan, run_demo

    plan = DemoPlan(run, num_questions, max_tokens, num_recorded, num_live, num_snapshots)
    run_demo(plan, log)
