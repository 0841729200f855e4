"""A small model with another tokenizer learns a large one's answers, by one loss after another, with one budget.

`python -m pipelines.large_to_small --answers ARCHIVE --loss "nll + 0.14 ngram" --loss "nll + 0.14 ngram + alm"`. `nll`
and, for the later pieces of merges, `ngram` are fine-tuning on the answers (SFT). Held-out answers judge: what they
cost in bits per byte, and how often the likeliest token is the large model's; and, with `--questions`, how many are
answered with the number that the data set has.
Source of the setting: https://arxiv.org/abs/2503.20083, section 5.2.
"""

import re
from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, prompts, wiring
from omnidraft.distill.training.losses import parse
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.models.hf.trainable_drafter import TransformersTrainable
from omnidraft.progress import bar
from omnidraft.traces import archive
from omnidraft.transfer.bits_per_byte import token_nats
from pipelines.lib import report
from pipelines.lib.learning import TrainingRun, learn, new_run, split_by_request
from pipelines.lib.other_drafters import for_drafter

if TYPE_CHECKING:
    from omnidraft.distill.training.learner import Learner
    from omnidraft.traces.record import TraceRecord
    from omnidraft.wiring import Vocabularies

AS_IT_COMES = "as it comes"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_QUESTIONS_AT_A_TIME = 16


def main(
    answers: Annotated[Path, typer.Option(help="A trace archive of the large model's answers: pipelines.record.")],
    losses: Annotated[list[str], typer.Option("--loss", help="A weighted sum, as 'alm + nll'; more may follow.")],
    target: Annotated[str | None, typer.Option(help="The large model.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The small model.")] = None,
    num_passes: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 1,
    held_out_every: Annotated[int, typer.Option(min=2, help="One answer in so many judges, and is not learned.")] = 8,
    questions: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt and reference, whose last number is the answer.")
    ] = None,
    num_questions: Annotated[int, typer.Option(min=1, help="From the file's test split.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most ids of the small model's answers.")] = 192,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Teach a small model a large one's answers by several losses."""
    for each in losses:
        parse(each)
    models = {"target": target, "drafter": drafter}
    settings = config.load(config_path, models=models)
    tokenizers = wiring.vocabularies(settings)
    asked = [] if questions is None else _asked(questions, num_questions)
    records = for_drafter(list(archive.read(answers)), settings.models.target, settings.models.drafter, tokenizers)
    train, held_out = split_by_request(records, held_out_every)
    rows: dict[str, dict[str, Any]] = {}
    for loss in [None, *losses]:
        chosen, name = config.load(config_path, models=models, learner={"loss": loss}), loss or AS_IT_COMES
        run, learned = new_run(chosen, tokenizers), train if loss else []
        with bar(f"{name}: learning", num_passes * len(learned)) as advance:
            learn(run, learned, held_out, chosen, num_passes=num_passes, advance=advance)
        rows[name] = _figures(run, tokenizers, held_out)
        if asked:
            rows[name] |= _right_answers(run, tokenizers, asked, max_new_tokens, name)
        _print(rows, answers)
        if json_path is not None:
            options = {"answers": str(answers), "train": len(train), "passes": num_passes, "held_out": len(held_out)}
            report.save(options | {"questions": len(asked), "rows": rows}, json_path)


def _asked(path: Path, num: int) -> list[prompts.Prompt]:
    """Return questions that have a number for an answer. Raises RequestError when there are none."""
    asked = [each for each in prompts.read(path, split="test") if _NUMBER.search(each.reference or "")]
    if not asked:
        raise RequestError(f"{path} has no row of the split test whose reference has a number")
    return asked[:num]


def answer_of(text: str) -> float | None:
    """Return the last number of a text, without commas between thousands."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _figures(run: TrainingRun, tokenizers: "Vocabularies", held_out: "Sequence[TraceRecord]") -> dict[str, Any]:
    """Return what a model that has learned makes of the held-out answers."""
    bits = [_bits_per_byte(run.learner, tokenizers, record) for record in held_out]
    return {
        "agreement": run.curve[-1].agreement,
        "bits_per_byte": sum(each for each, _ in bits) / sum(num for _, num in bits),
        "bits_and_bytes": bits,
        "tokens_per_s": run.tokens_per_s,
    }


def _right_answers(
    run: TrainingRun, tokenizers: "Vocabularies", asked: Sequence[prompts.Prompt], max_new_tokens: int, name: str
) -> dict[str, Any]:
    """Return the answers to these questions, and how many have the right number; the run is of no use afterwards."""
    assert isinstance(run.learner.model, TransformersTrainable)
    answers = _answers(run.learner.model, tokenizers, asked, max_new_tokens, name)
    right = [answer_of(each.reference or "") == answer_of(text) for each, text in zip(asked, answers, strict=True)]
    return {"right": sum(right), "questions": len(right), "answers": answers}


def _bits_per_byte(learner: "Learner", tokenizers: "Vocabularies", record: "TraceRecord") -> tuple[float, int]:
    """Return the bits and the bytes of one answer, its end included."""
    example = learner.read(record)
    nats = token_nats(learner.model, example.ids_T)[example.num_context :]
    num_bytes = tokenizers.drafter.vocabulary.num_bytes[example.ids_T[example.num_context + 1 :]].sum()
    return float(nats.sum()) / log(2), int(num_bytes)


@torch.inference_mode()
def _answers(
    model: TransformersTrainable,
    tokenizers: "Vocabularies",
    asked: Sequence[prompts.Prompt],
    max_new_tokens: int,
    name: str,
) -> list[str]:
    """Return the model's likeliest answers; it is of no use for learning afterwards."""
    small, tokenizer = model.into_model().eval(), tokenizers.drafter
    stop_ids, answers = sorted(tokenizer.stop_ids), list[str]()
    with bar(f"{name}: answering", len(asked)) as advance:
        for start in range(0, len(asked), _QUESTIONS_AT_A_TIME):
            part = asked[start : start + _QUESTIONS_AT_A_TIME]
            ids = [tokenizer.chat_prompt_ids([{"role": "user", "content": each.text}]) for each in part]
            width = max(map(len, ids))
            padded = torch.tensor([[stop_ids[0]] * (width - len(each)) + list(each) for each in ids])
            mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids])
            options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": stop_ids}
            out = small.generate(padded, attention_mask=mask, pad_token_id=stop_ids[0], **options)  # type: ignore[operator]
            spelled = [tokenizer.vocabulary.spell(each[width:].tolist()) for each in out]
            answers += [each.decode("utf-8", "replace") for each in spelled]
            advance(len(part))
    return answers


def _print(rows: dict[str, dict[str, Any]], answers: Path) -> None:
    table = Table("loss", "agreement", "bits per byte", "beside the first loss", "right answers", title=str(answers))
    first = list(rows)[min(1, len(rows) - 1)]
    for name, row in rows.items():
        right = f"{row['right']} of {row['questions']}" if "right" in row else "-"
        mean, error = difference(row["bits_and_bytes"], rows[first]["bits_and_bytes"])
        beside = "-" if name == first else f"{mean:+.4f} +- {error:.4f}"
        table.add_row(name, f"{row['agreement']:.3f}", f"{row['bits_per_byte']:.4f}", beside, right)
    Console().print(table)


def difference(mine: Sequence[tuple[float, int]], other: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the mean of the differences of bits per byte of the same answers, and its standard error."""
    each = [a / num - b / num for (a, num), (b, _) in zip(mine, other, strict=True)]
    return fmean(each), stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")


if __name__ == "__main__":
    process.entry("large_to_small", main)
