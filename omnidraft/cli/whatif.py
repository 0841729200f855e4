"""`omnidraft whatif`: what other ways to draft would have had accepted of yesterday's answers; `omnidraft costs`."""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from omnidraft.cli.choices import chosen, numbers
from omnidraft.cli.options import MOST_DRAFT_TOKENS, Config, group
from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from omnidraft.whatif.known_costs import MachineCosts

THIS_MACHINE = "this-machine"


def whatif(
    log: Annotated[str | None, typer.Option(help="sqlite:///path, kafka://host:port, or a trace archive.")] = None,
    since: Annotated[str | None, typer.Option(help="Answers of the last 90m, 24h or 7d; or since an ISO time.")] = None,
    until: Annotated[str | None, typer.Option(help="Answers that ended before this ISO time.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    drafter: Annotated[
        str, typer.Option(help="Snapshots: folders, versions or aliases; base; none drafts from memory alone.")
    ] = "base",
    draft_tokens: Annotated[str, typer.Option(help="Drafted tokens per pass at most.")] = "15",
    memory: Annotated[str, typer.Option(help="Suffix memory: on, off, or both.")] = "on",
    costs: Annotated[str, typer.Option(help="this-machine, or a file of `omnidraft costs export`.")] = THIS_MACHINE,
    texts: Annotated[int, typer.Option(min=1, help="Answers that decode at a time.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only answers that the service never learns: learner.held_out_every.")
    ] = False,
    target: Annotated[str | None, typer.Option(help="The target of the pair.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="A file for all figures; a run that was interrupted goes on from it.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the speed-ups into this PNG.")] = None,
    config_path: Config = None,
) -> None:
    """Count what other ways to draft would have had accepted of a log's answers, and predict their speed.

    Several drafters, numbers and memories, with commas between them, are all combined. The target does not run: its
    tokens are in the log, and no draft changes them. Only seconds are predicted, by the measured costs of a machine.
    """
    from omnidraft import config
    from omnidraft.files import require_writable_file
    from omnidraft.throttle import give_way

    drafters, lengths = chosen(drafter), numbers(draft_tokens, "--draft-tokens", MOST_DRAFT_TOKENS)
    memories = [each == "on" for each in chosen(memory, ("on", "off"), "memory")]
    if not (drafters and memories):
        raise RequestError("name at least one --drafter and one --memory")
    require_writable_file(json_path)
    url = log if log and "://" in log else None
    settings = config.load(config_path, models={"target": target}, log={"url": url})
    known = _costs(settings, costs)
    import torch

    from omnidraft import assembly
    from omnidraft.distill.ingest.record_disposition import is_held_out
    from omnidraft.whatif import comparison, log_slice, report
    from omnidraft.whatif.learned_records import LearnedRecords
    from omnidraft.whatif.recorded_texts import recorded_texts

    torch.set_num_threads(1)
    filters = [] if tenant is None else [f"tenant={tenant}"]
    slice_filter = log_slice.parse_filter(since, until, filters)
    tokenizers = assembly.vocabularies(settings)
    found = log_slice.of_pair(log or settings.log.url, settings, tokenizers, slice_filter)
    every, records = settings.learner.held_out_every, found.require()
    records = [each for each in records if is_held_out(each, every)] if held_out else records
    answers, left_out = recorded_texts(records, tokenizers.target.stop_ids)
    if not answers:
        raise RequestError(f"the log has no whole answer of this pair there; left out: {dict(left_out)}")
    manifests = {name: comparison.manifest_of(settings, name) for name in drafters}
    learned = LearnedRecords(found, records, every)
    for name, manifest in manifests.items():
        _warn(name, learned.count(manifest), len(records))
    give_way()
    run = comparison.Comparison(settings, answers, known, num_texts=texts)
    about = {"answers": [each.request_id for each in answers], "costs": known.plain_data(), "texts": texts}
    about["snapshots"] = {name: manifest and manifest.snapshot_id for name, manifest in manifests.items()}
    kept = _Kept(json_path, about)
    plain = run.plain()
    counts = {
        str(each): kept.counts(str(each), partial(run.run, each))
        for each in comparison.choices(drafters, lengths, memories)
    }
    rows = {name: comparison.summary(each, plain) for name, each in counts.items()}
    best = comparison.best_by_group(answers, counts, plain)
    Console().print(report.table(rows, known.about))
    Console().print(report.best_table(best))
    print(f"{len(answers)} answers" + "".join(f", {num} left out: {why}" for why, num in left_out.items()))
    kept.save({"rows": rows, "best": [[*group, *each] for group, each in best.items()], "left_out": dict(left_out)})
    if picture is not None:
        report.draw(rows, picture)


costs_app = group("Measured costs of passes and drafter steps on this machine.")


@costs_app.command()
def export(
    out: Annotated[Path | None, typer.Option(help="The file to write; without it, standard output.")] = None,
    target: Annotated[str | None, typer.Option(help="The target of the pair.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The drafter of the pair.")] = None,
    config_path: Config = None,
) -> None:
    """Measure what a pair's rounds cost here, a minute or two of decoding, and write it for `omnidraft whatif`."""
    from omnidraft import config
    from omnidraft.files import require_writable_file, save_text
    from omnidraft.whatif import round_costs

    require_writable_file(out)
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    text = json.dumps(round_costs.measured(settings).plain_data(), indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        save_text(text, out)


def _costs(settings: Any, source: str) -> "MachineCosts":
    from omnidraft.whatif import round_costs
    from omnidraft.whatif.known_costs import read_costs

    return round_costs.this_machine(settings) if source == THIS_MACHINE else read_costs(Path(source))


class _Kept:
    """The counts of finished choices, in a file from which an interrupted run goes on."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path, self._about = path, about
        self._digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._counts: dict[str, list[list[float]]] = {}
        if path is not None and path.exists() and (stored := json.loads(path.read_text())).get("of") == self._digest:
            self._counts = stored["counts"]

    def counts(self, name: str, run: Any) -> Any:
        """Return the counts of a choice, run unless the file has them."""
        from omnidraft.whatif.replay import Counts

        if name not in self._counts:
            self._counts[name] = [[each.num_tokens, each.num_passes, each.seconds] for each in run()]
            self.save({})
        return [Counts(int(tokens), int(passes), seconds) for tokens, passes, seconds in self._counts[name]]

    def save(self, figures: dict[str, Any]) -> None:
        """Write the file, where there is one."""
        from omnidraft.files import save_json

        if self._path is not None:
            save_json({"of": self._digest, **self._about, "counts": self._counts, **figures}, self._path)


def _warn(name: str, num_learned: int | None, num_records: int) -> None:
    """Say on stderr what the snapshot learned of the records that judge it."""
    if num_learned is None:
        print(f"{name}: cannot tell what it learned of these {num_records} records", file=sys.stderr)
    elif num_learned:
        print(
            f"{name} has learned up to {num_learned} of these {num_records} records, which flatters it; --held-out, "
            "with the service's learner.held_out_every, takes none of them",
            file=sys.stderr,
        )
