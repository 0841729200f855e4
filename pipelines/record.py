"""Record a target's own answers as a trace archive, so that learning can start before there is traffic.

`python -m pipelines.record --prompts FILE --out traces.avro`. An answer that the file already knows (`answer_ids`) is
only a draft: the target draws every token itself, so each record is what serving would have written. An interrupted
run goes on after the last complete answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from omnidraft import config, prompts, wiring
from omnidraft.decode.costs import Costs
from omnidraft.decode.loop import Decoder
from omnidraft.decode.tracing import Origin, Tracer
from omnidraft.hosts import process
from omnidraft.ports import DraftTree, Noise, Proposer, ProposerSession, Request, Source, TreeLimits
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord


class KnownAnswer:
    """Drafts from a known answer while the target follows it, then asks another proposer. Implements ports.Proposer."""

    def __init__(self, answer_ids: Sequence[int], after: Proposer) -> None:
        self._answer_ids = tuple(answer_ids)
        self._after = after

    def open(self, request: Request) -> "_Session":
        """See ports.Proposer."""
        return _Session(self._answer_ids, self._after.open(request), request.prompt_ids[-1])


class _Session:
    """Implements ports.ProposerSession."""

    def __init__(self, answer_ids: tuple[int, ...], after: ProposerSession, root: int) -> None:
        self._left = answer_ids
        self._after = after
        self._root = root

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        if not self._left:
            return self._after.propose(position, limits, noise)
        ids = self._left[: min(limits.num_nodes, limits.depth or limits.num_nodes)]
        return DraftTree.chain(self._root, ids, [Source.LOOKUP] * len(ids), [0.0] * len(ids))

    def observe(self, emitted: Sequence[int]) -> None:
        self._after.observe(emitted)
        self._root = emitted[-1]
        follows = tuple(emitted) == self._left[: len(emitted)]
        self._left = self._left[len(emitted) :] if follows else ()


def main(
    prompts_path: Annotated[Path, typer.Option("--prompts", help="JSON lines with prompt or question.")],
    out: Annotated[Path, typer.Option(help="The archive to write.")],
    num_prompts: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 400,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Record answers at temperature 0."""
    settings = config.load(config_path)
    asked = prompts.read(prompts_path, num_prompts)
    parts = out.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    words = wiring.vocabularies(settings)
    target = wiring.target(settings, words)
    drafter = wiring.snapshot_loader(settings, words, Costs(target))(None, None).proposer
    decoder = Decoder(target, words.target.vocabulary, trace_top_k=settings.recorder.top_k)
    for number, prompt in enumerate(track(asked, "recording")):
        part = parts / f"{number:06d}.avro"
        if not part.exists():
            request = _request(prompt, words, settings, max_new_tokens)
            origin = Origin(
                f"recorded-{number:06d}",
                "recorded",
                "pipelines.record",
                settings.models.target,
                settings.models.drafter,
                None,
                words.alignment.fingerprint,
            )
            records: list[TraceRecord] = []
            tracer = Tracer(request, origin, settings.recorder, records.append)
            for step in decoder.decode(request, KnownAnswer(prompt.answer_ids, drafter)):
                tracer.take(step)
            aside = part.with_suffix(".partial")
            archive.write(aside, records)
            aside.rename(part)
    archive.write(out, (record for part in sorted(parts.glob("*.avro")) for record in archive.read(part)))
    print(f"{len(asked)} answers in {out}, {out.stat().st_size / 1e6:.1f} MB")


def _request(
    prompt: prompts.Prompt, words: wiring.Vocabularies, settings: config.Settings, max_new_tokens: int
) -> Request:
    messages = [{"role": "user", "content": prompt.text}]
    return Request(
        prompt_ids=tuple(words.target.chat_prompt_ids(messages)),
        drafter_prompt_ids=tuple(words.drafter.chat_prompt_ids(messages)),
        max_new_tokens=max_new_tokens,
        stop_ids=words.target.stop_ids,
        mode=settings.decode.mode,
        num_draft_tokens=settings.decode.num_draft_tokens,
    )


if __name__ == "__main__":
    process.entry("record", main)
