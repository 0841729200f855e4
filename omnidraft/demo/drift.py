"""A rehearsal of drift: traffic changes, agreement falls, the controller's alarm goes off, and agreement recovers.

Real: the log, the registry, controller and distiller as processes, and all of a worker but its target.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path

from rich.table import Table

from omnidraft import assembly, config, pictures
from omnidraft.decode.snapshot.tenant_rules import DRIFTED_DRAFT_TOKENS
from omnidraft.demo.recorded import HELD_OUT_EVERY, RECORDED
from omnidraft.demo.recorded_worker import RecordedWorker
from omnidraft.demo.report import COLOR
from omnidraft.demo.screen import console, spinner
from omnidraft.demo.services import run_settings, running_services
from omnidraft.distill.control import DRIFT_HASTE
from omnidraft.fleet.drift import MIN_VALUES, RECOVERED_SHARE
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.ports import Champion, Entry
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord

NUM_BEFORE, NUM_AFTER = 2, 12
"""Questions that are asked again and again before the change and after it: memory soon drafts their answers."""
TIMES_BEFORE = MIN_VALUES // NUM_BEFORE + 3
"""Each answer, of 32 passes or more, is a value of the controller's: these are enough for a level, and some more."""
MOST_TIMES_AFTER = 5
WINDOW = 4
"""Answers whose mean is one figure: 150 to 300 passes, so chance moves it by 0.03."""
NUM_MORE = 2 * WINDOW
"""Answers that are served after the recovery, to see that it lasts."""
CHANGE, ALARM, RECOVERY = "the change", "the alarm", "the recovery"
WHAT_FOLLOWS = {
    ALARM: f"this worker drafts {DRIFTED_DRAFT_TOKENS} tokens at most for this traffic, the distiller compares earlier "
    f"versions on it, and publishes {DRIFT_HASTE} times as often",
    RECOVERY: f"agreement is back at {RECOVERED_SHARE:.0%} of its level or more, so all is as it was before",
}


def rehearse(out: Path, log: str | None) -> None:
    """Rehearse a drift, and end with a table and a picture of it.

    Raises:
        RequestError: `out` cannot be written.
        ServiceFailed: a service ended, or took too long.
    """
    decode = {"policy": "fixed", "num_draft_tokens": 1 + DRIFTED_DRAFT_TOKENS, "threads": 1}
    learner = {"records_per_step": 2, "held_out_every": HELD_OUT_EVERY, "threads": 1}
    settings = run_settings(out, log, decode=decode, learner=learner, worker={"poll_s": 0.01})
    console.print(
        f"{NUM_BEFORE} questions are asked again and again, so that memory drafts for {settings.models.target} beside "
        f"{settings.models.drafter}; then {NUM_AFTER} others are. See how the controller notices, what the fleet does, "
        "and how it recovers.\nThe target's answers are recorded, so it does not run; log, registry, controller and "
        f"distiller are real.\nTwo to five minutes on two cores. Everything, also the services' logs, goes to {out}.",
        soft_wrap=True,
    )
    with running_services(out, settings):
        with spinner("loading the drafter"):
            worker = RecordedWorker(settings)
        with closing(worker):
            rehearsal = Rehearsal(settings, worker)
            records = list(islice(archive.read(RECORDED), NUM_BEFORE + NUM_AFTER))
            before = asked_again(records[:NUM_BEFORE], TIMES_BEFORE)
            rehearsal.run(before, asked_again(records[NUM_BEFORE:], MOST_TIMES_AFTER))
    conclude(rehearsal, out)


def asked_again(records: Sequence[TraceRecord], times: int) -> list[TraceRecord]:
    """Return all records in turn, so many times, each as a request of its own."""
    return [replace(each, request_id=f"{each.request_id}-{number}") for number in range(times) for each in records]


class Rehearsal:
    """Serves both kinds of traffic, and says what happens meanwhile."""

    def __init__(self, settings: config.Settings, worker: RecordedWorker) -> None:
        self._worker, self._control = worker, assembly.control_log(settings, CountingMetrics())
        self.served: Sequence[RequestStats] = worker.served
        self.marks_ms: dict[str, int] = {}
        """The change, the alarm and the recovery, as far as they came, in Unix milliseconds."""

    def run(self, before: Sequence[TraceRecord], after: Sequence[TraceRecord]) -> None:
        """Serve until the recovery has lasted a while, or no answers are left."""
        console.print(f"serving {len(before)} answers; the fleet learns from them ...")
        for record in before:
            self._serve(record)
        self.marks_ms[CHANGE] = time.time_ns() // 1_000_000
        console.print(f"[bold]traffic changes:[/bold] serving up to {len(after)} other answers ...")
        num_more = NUM_MORE
        for record in after:
            self._serve(record)
            num_more -= RECOVERY in self.marks_ms
            if not num_more:
                break

    def _serve(self, record: TraceRecord) -> None:
        """Serve one answer, and say what the control log has by then."""
        self._worker.serve(record)
        for entry in self._control.poll(0.0)[1]:
            self._tell(entry)
        if len(self.served) % WINDOW == 0:
            newest = self.served[-1]
            text = f"agreement {agreement(self.served[-WINDOW:]):.3f}, version {newest.version}"
            console.print(f"{self.seconds(newest.time_ms):4.0f} s  {text}")

    def _tell(self, entry: Entry) -> None:
        if entry.kind == "drift" and CHANGE in self.marks_ms:
            name = RECOVERY if entry.value is None else ALARM
            self.marks_ms[name] = entry.at_ms
            text = f"[bold]{name}:[/bold] {entry.reason}; {WHAT_FOLLOWS[name]}"
        elif isinstance(entry.value, Champion):
            text = f"version {entry.value.version} is the champion: {entry.reason}"
        elif entry.kind in ("drift", "best"):
            text = f"{entry.kind}: {entry.reason}"
        else:
            return
        console.print(f"{self.seconds(entry.at_ms):4.0f} s  {text}", soft_wrap=True)

    def seconds(self, at_ms: int) -> float:
        """Return the seconds since the first answer."""
        return (at_ms - self.served[0].time_ms) / 1000


def agreement(answers: Sequence[RequestStats]) -> float:
    """Return the agreement of the answers as the controller counts it."""
    return sum(each.num_agreed for each in answers) / max(sum(each.num_drafted for each in answers), 1)


def conclude(rehearsal: Rehearsal, out: Path) -> None:
    """Show the table, draw the picture above the folder of the run, and say what did not come."""
    served, marks_ms, path = rehearsal.served, rehearsal.marks_ms, out.parent / "drift.png"
    changed = [each.time_ms for each in served if each.time_ms > marks_ms[CHANGE]][:WINDOW]
    moments = {**marks_ms, f"{WINDOW} answers after the change": changed[-1], "the end": served[-1].time_ms}
    table = Table("at", "second", "agreement", "version served", title=f"The last {WINDOW} answers at each moment")
    for name, at_ms in sorted(moments.items(), key=itemgetter(1)):
        answers = [each for each in served if each.time_ms <= at_ms][-WINDOW:]
        cells = (f"{rehearsal.seconds(at_ms):.0f}", f"{agreement(answers):.3f}", str(answers[-1].version))
        table.add_row(name, *cells)
    console.print(table)
    picture(rehearsal, path)
    if absent := next((name for name in (ALARM, RECOVERY) if name not in marks_ms), None):
        text = f"[bold red]{absent} did not come[/bold red] within the recorded answers; the logs are in {out / 'logs'}"
        console.print(text, soft_wrap=True)
    console.print(f"picture: {path}\nwhat a fleet does, and when: docs/operate.md, Drift", soft_wrap=True)


def picture(rehearsal: Rehearsal, path: Path) -> None:
    """Draw agreement over time, with the change, the alarm, the recovery and the versions that served, as PNG."""
    served, seconds = rehearsal.served, [rehearsal.seconds(each.time_ms) for each in rehearsal.served]
    with pictures.picture(path, figsize=(10, 4.2), layout="tight") as (_, axis):
        axis.plot(seconds, [agreement([each]) for each in served], ".", color=COLOR, alpha=0.4, label="each answer")
        means = [agreement(served[max(0, end - WINDOW) : end]) for end in range(1, len(served) + 1)]
        axis.plot(seconds, means, color=COLOR, label=f"mean of {WINDOW}")
        for number, (name, at_ms) in enumerate(rehearsal.marks_ms.items()):
            at = rehearsal.seconds(at_ms)
            axis.axvline(at, color="black", linewidth=1, linestyle="--")
            axis.annotate(f" {name}, {at:.0f} s", (at, 0.02 + 0.06 * number), xycoords=("data", "axes fraction"))
        for before, answer, at in zip(served, served[1:], seconds[1:], strict=False):
            if before.version != answer.version:
                axis.annotate(f"{answer.version}", (at, 0.95), xycoords=("data", "axes fraction"), color="grey")
        axis.set_title("agreement of served answers; grey: the version from there on")
        axis.set_xlabel("seconds")
        axis.legend(loc="lower left")
