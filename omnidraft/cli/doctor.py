"""`omnidraft doctor`: problems of this installation and its services, with advice."""

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from omnidraft.cli.options import AsJson, Config, printable, show_stages
from omnidraft.doctor.finding import Finding, Verdict, is_fatal

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}


def doctor(config_path: Config = None, as_json: AsJson = False) -> None:
    """Check settings, libraries, models, log, registry, disk, memory, clock and port; exit code 1 on a problem."""
    from omnidraft.doctor.all_checks import examine

    show_stages()
    console, findings = Console(), []
    for finding in examine(config_path):
        findings.append(finding)
        if not as_json:
            console.print(_line(finding), soft_wrap=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(1 if is_fatal(findings) else 0)


def _line(finding: Finding) -> Text:
    line = Text(f"{finding.verdict:8}", style=STYLES[finding.verdict])
    line.append(printable(f"{finding.check}: {finding.told}"), style="default")
    if finding.advice:
        line.append(printable(f" -> {finding.advice}"), style="italic")
    return line
