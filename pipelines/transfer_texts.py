"""Choose the texts that teach a transfer most: those with many words that the new tokenizer cuts otherwise.

`python -m pipelines.transfer_texts MODEL --tokenizer OTHER --data FILE --out CHOSEN`. Where both tokenizers cut a word
in different places, the model before never said its first new piece there, nor the next one after it. Such words are
few, and half of what a transfer left of articles was in them. Each text is worth the ones that few chosen texts have,
beside its length; short texts, as entries of a dictionary, are joined.
"""

import heapq
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.json_report import save_text
from omnidraft.output_files import require_writable_file
from omnidraft.progress import bar
from omnidraft.transfer.texts import AlignedText, align_text, read_texts
from omnidraft.wiring.transfer_models import load_pair
from pipelines.lib.chunk_costs import num_pieces

if TYPE_CHECKING:
    from omnidraft.wiring.transfer_models import TokenizerPair

Word = tuple[int, ...]
"""The new ids of a chunk that has several."""
LEAST_TOKENS: Final = 8
"""Of a text that may be chosen."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    text: str
    words: frozenset[Word]
    num_tokens: int


def main(
    model: Annotated[str, typer.Argument(help="The model before: a name, folder or hub id.")],
    tokenizer: Annotated[str, typer.Option(help="The model, or a folder, whose tokenizer it gets.")],
    data: Annotated[list[Path], typer.Option(help="JSON lines with texts, none that measure; may be given again.")],
    out: Annotated[Path, typer.Option(help="A file for the chosen texts, in random order.")],
    num_tokens: Annotated[int, typer.Option(min=1, help="Stop at so many new tokens.")] = 300_000,
    max_tokens: Annotated[int, typer.Option(min=16, help="The most tokens of a text, joined ones too.")] = 384,
    times: Annotated[int, typer.Option(min=1, help="A word counts until so many chosen texts have it.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the order.")] = 0,
) -> None:
    """Choose the texts that teach a transfer most."""
    require_writable_file(out)
    candidates = _candidates(data, load_pair(model, tokenizer), max_tokens)
    kept = _chosen(candidates, num_tokens, times)
    random.Random(seed).shuffle(kept)
    texts = _joined(kept, max_tokens)
    save_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts), out)
    num, words = sum(each.num_tokens for each in kept), {word for each in kept for word in each.words}
    Console(stderr=True).print(f"{len(kept)} of {len(candidates)} texts, {num} tokens, {len(words)} words: {out}")


def split_words(text: AlignedText) -> list[Word]:
    """Return the words, or parts of words, that the new tokenizer spells in several tokens and not where the old one
    ends one."""
    ends_P, ids_T = text.new_at_P, text.new_ids_T
    return [tuple(ids_T[ends_P[at] + 1 : ends_P[at + 1] + 1].tolist()) for at in (num_pieces(text) > 1).nonzero()[0]]


def _candidates(files: Iterable[Path], pair: "TokenizerPair", max_tokens: int) -> list[_Candidate]:
    found = []
    for path in files:
        texts = read_texts(path, pair.new.vocabulary)
        with bar(f"tokenising {path.name}", len(texts), transient=True) as advance:
            for text in texts:
                aligned = align_text(text, pair.old, pair.new, max_tokens)
                words = frozenset(split_words(aligned))
                if words and len(aligned.new_ids_T) > LEAST_TOKENS:
                    found.append(_Candidate(text, words, len(aligned.new_ids_T) - 1))
                advance()
    if not found:
        raise RequestError("no text has a word that the two tokenizers cut in different places")
    return found


def _chosen(candidates: Sequence[_Candidate], num_tokens: int, times: int) -> list[_Candidate]:
    """Return the texts of the most words for their length, each chosen for what those before it lack."""
    count: Counter[Word] = Counter()

    def value(each: _Candidate) -> float:
        return sum(count[word] < times for word in each.words) / each.num_tokens

    heap = [(-value(each), number) for number, each in enumerate(candidates)]
    heapq.heapify(heap)
    kept: list[_Candidate] = []
    with bar("choosing", num_tokens, transient=True) as advance:
        while heap and num_tokens > 0:
            best, number = heapq.heappop(heap)
            each = candidates[number]
            if (now := value(each)) < -best:
                heapq.heappush(heap, (-now, number))
            elif not now:
                break
            else:
                kept.append(each)
                count.update(each.words)
                num_tokens -= each.num_tokens
                advance(each.num_tokens)
    return kept


def _joined(chosen: Iterable[_Candidate], max_tokens: int) -> list[str]:
    """Return texts of at most so many tokens, a line for each chosen one."""
    texts: list[str] = []
    room = 0
    for each in chosen:
        if each.num_tokens < room:
            texts[-1] += "\n" + each.text
        else:
            texts.append(each.text)
            room = max_tokens
        room -= each.num_tokens + 1
    return texts


if __name__ == "__main__":
    process.entry("transfer_texts", main)
