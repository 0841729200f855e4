"""`omnidraft whatif`: what other ways to draft would have had accepted of yesterday's answers; `omnidraft costs`."""

import hashlib
import json
import sys
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omnidraft.cli.choices import archive_or_url, chosen, numbers
from omnidraft.cli.options import MOST_DRAFT_TOKENS, Config, group, show_stages
from omnidraft.errors import RequestError
from omnidraft.files import require_writable_file, save_json
from omnidraft.pictures import require_format

THIS_MACHINE = "this-machine"


def whatif(
    log: Annotated[str | None, typer.Option(help="sqlite:///path, kafka://host:port, or a trace archive.")] = None,
    since: Annotated[str | None, typer.Option(help="Answers of the last 90m, 24h or 7d; or since an ISO time.")] = None,
    until: Annotated[str | None, typer.Option(help="Answers that ended before this ISO time.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    drafter: Annotated[
        str, typer.Option(help="Snapshots: folders, versions or aliases; base; none drafts from memory alone.")
    ] = "base",
    draft_tokens: Annotated[
        str, typer.Option(help="Most tokens that a drafter drafts for a pass; memory drafts up to 31.")
    ] = "15",
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
    picture: Annotated[Path | None, typer.Option(help="Draw the speed-ups into this file, such as a PNG.")] = None,
    config_path: Config = None,
) -> None:
    """Count what other ways to draft would have had accepted of a log's answers, and predict their speed.

    Several drafters, numbers and memories, with commas between them, are all combined. The target does not run: its
    tokens are in the log, and no draft changes them. Only seconds are predicted, by the measured costs of a machine:
    those of this one are measured first, once, by a minute or two of decoding; after that it waits while anything else
    here decodes.
    """
    from omnidraft import config
    from omnidraft.throttle import give_way

    drafters, lengths = chosen(drafter), numbers(draft_tokens, "--draft-tokens", MOST_DRAFT_TOKENS)
    memories = [each == "on" for each in chosen(memory, ("on", "off"), "memory")]
    if not (drafters and memories):
        raise RequestError("name at least one --drafter and one --memory")
    for path in (json_path, picture):
        require_writable_file(path, makes_folder=False)
    require_format(picture)
    kept = _kept(json_path)
    archive_path, url = archive_or_url(log)
    settings = config.load(config_path, models={"target": target}, log={"url": url})
    import torch

    from omnidraft import assembly
    from omnidraft.distill.ingest.record_disposition import is_held_out
    from omnidraft.whatif import comparison, learned_records, log_slice, report, round_costs
    from omnidraft.whatif.known_costs import read_costs
    from omnidraft.whatif.recorded_texts import recorded_texts

    show_stages()
    slice_filter = log_slice.parse_filter(since, until, [] if tenant is None else [f"tenant={tenant}"])
    known = None if costs == THIS_MACHINE else read_costs(Path(costs))
    if archive_path is None:
        assembly.require_log(settings)
    manifests = {name: comparison.manifest_of(settings, name) for name in drafters}
    tokenizers = assembly.vocabularies(settings)
    found = log_slice.of_pair(archive_path, settings, tokenizers, slice_filter)
    every, records = settings.learner.held_out_every, found.require()
    records = [each for each in records if is_held_out(each, every)] if held_out else records
    answers, left_out = recorded_texts(records, tokenizers.target.stop_ids)
    without = f"; left out: {log_slice.in_words(left_out)}" if left_out else ""
    if not answers:
        held = " that is held out" if held_out else ""
        raise RequestError(f"the log has no whole answer of this pair there{held}{without}")
    learned = {name: learned_records.count(each, found, records, every) for name, each in manifests.items()}
    warnings = [learned_records.note(*each, len(records)) for each in learned.items() if each[1] != 0]
    if known is not None and not known.is_of(settings.models):
        warnings.append(f"{costs}: costs of another pair, {known.of()}: only those of this pair tell its seconds")
    sys.stderr.writelines(f"{each}\n" for each in warnings)
    known = known or round_costs.this_machine(settings, has_learned=any(manifests.values()))
    torch.set_num_threads(1)
    give_way()
    about: dict[str, Any] = {"answers": [each.request_id for each in answers], "costs": asdict(known), "texts": texts}
    about["snapshots"] = {name: manifest and manifest.snapshot_id for name, manifest in manifests.items()}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    figures: dict[str, Any] = {"of": digest, **about, "counts": kept.get(digest, {})}
    run = comparison.Comparison(settings, tokenizers, answers, known, texts)
    counts = dict[str, list[comparison.Counts]]()
    for choice in comparison.choices(drafters, lengths, memories):
        if str(choice) not in figures["counts"]:
            figures["counts"][str(choice)] = [astuple(each) for each in run.run(choice)]
            _save(figures, json_path)
        counts[str(choice)] = [comparison.Counts(*each) for each in figures["counts"][str(choice)]]
    plain = counts[str(comparison.PLAIN)]
    rows = {name: comparison.summary(each, plain) for name, each in counts.items()}
    rows = dict(sorted(rows.items(), key=lambda each: -each[1]["speedup"]))
    best = comparison.best_by_group(answers, counts)
    notes = [
        f"{len(answers)} answers, {settings.models.drafter} -> {settings.models.target}{without}",
        f"Tokens a pass are counted; seconds are those of {known.of()}",
        *warnings,
    ]
    Console().print(report.table(rows))
    print(*notes, sep="\n")
    Console().print(report.best_table(best))
    best_rows = [[*group, *each] for group, each in best.items()]
    _save({**figures, "rows": rows, "best": best_rows, "left_out": dict(left_out), "notes": notes}, json_path)
    if picture is not None:
        report.draw(rows, notes, picture)


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

    require_writable_file(out, makes_folder=False)
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    from omnidraft.whatif import round_costs

    show_stages()
    *_, costs = round_costs.measured(settings)
    found = asdict(costs)
    if out is None:
        print(json.dumps(found, indent=2))
    else:
        save_json(found, out)


def _kept(path: Path | None) -> dict[str, Any]:
    """Return the counts that an interrupted run left in this file, by what they are of. Raises RequestError when it is
    another one's file."""
    if path is None or not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
        return {stored["of"]: stored["counts"]}
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise RequestError(f"{path} is no report of `omnidraft whatif`; name another file") from exc


def _save(figures: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        save_json(figures, path)
