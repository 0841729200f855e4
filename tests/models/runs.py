"""A tiny model of a family, decoded as a user would: drafted texts are plain ones, and those of transformers."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from omnidraft import assembly, config
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ModelError
from omnidraft.models.hf.pretrained import causal_lm, write_folder
from omnidraft.models.hf.target import load_target
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.models.native.target import NativeTarget
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.ports import DraftTree, Mode, Sampling, Target
from omnidraft.telemetry.metrics import CountingMetrics
from tests.models.families import OF_TEXT, WITH_IMAGES, make_model

TIE = 0.05
"""Logits that are this close may change places by rounding."""
_PROMPTS = (
    "The river goes to the sea and",
    "def add(first, second):\n    return first",
    "Where does the water go, \u00e9t\u00e9 \u4f60\u597d \U0001f600?",
    "The water of the river goes into the sea, and the river itself stays where it was. Where does it go?",
)
_ARITHMETIC = {"precision": "packed16", "kernels": "portable"}
_DECODE = {"policy": "fixed", "num_draft_tokens": 3, "threads": 1, "suffix_memory": False, "lookup": False}
KERNELS, TRANSFORMERS = "our kernels", "transformers"


@dataclass
class Row:
    """What was seen of a family."""

    family: str
    model_type: str
    computed_by: str = "nothing"
    because: str | None = None
    """Why our kernels do not compute it."""
    modes: list[Mode] = field(default_factory=list)
    drafts: str = "nothing"
    """The shape of what is drafted for it."""
    learns: list[str] = field(default_factory=list)
    """As a drafter."""

    as_dict = asdict


def new_row(family: str) -> Row:
    whole, text = WITH_IMAGES.get(family, (None, family))
    return Row(family, whole or OF_TEXT[text].model_type)


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as transformers loads it for any type of model."""

    folder: Path
    size: int
    end: int

    def save_family(self, name: str, folder: Path) -> Path:
        """Write a family's model with this tokenizer."""
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), self.end)
        make_model(name, vocab_size=self.size, **ids).to(torch.bfloat16).save_pretrained(folder)
        for each in self.folder.glob("*token*"):
            shutil.copy(each, folder)
        return folder


def tokenizer_files(source: Path, folder: Path) -> TokenizerFiles:
    """Write the tokenizer of a model folder into a folder of its own."""
    vocabulary = HfTokenizer(source).vocabulary
    write_folder(make_model("Llama 2"), source, folder)
    return TokenizerFiles(folder, len(vocabulary), vocabulary.roles["eos"])


@dataclass
class Text:
    """A request's answer."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)


class Server:
    """The engine of a pair of models."""

    def __init__(self, target: Path, drafter: Path) -> None:
        names = {"target": str(target), "drafter": str(drafter), **_ARITHMETIC}
        worker = assembly.engine(config.load(None, {}, models=names, decode=_DECODE), CountingMetrics())
        self._engine = worker.engine

    @property
    def target(self) -> Target:
        return self._engine.decoder.target

    def serve(self, folder: Path) -> None:
        """Serve another target with the same tokenizer. Raises ModelError."""
        target = load_target(folder, name=folder.name, **_ARITHMETIC)
        self._engine.decoder = self._engine.decoder.with_target(target, max_num_seqs=8)

    def requests(self, mode: Mode, lengths: Sequence[int]) -> list[GenerationRequest]:
        """Requests for texts of these lengths, or as long as the context; one greedy and one sampled in turns."""
        return [self._request(mode, *each) for each in enumerate(lengths)]

    def _request(self, mode: Mode, number: int, length: int) -> GenerationRequest:
        prompt = _PROMPTS[number // 2 % len(_PROMPTS)]
        ids = tuple(self._engine.pair.target_tokenizer.encode(prompt))
        length = min(length, self.target.context_limit - len(ids))
        sampling = Sampling(temperature=number % 2)
        return GenerationRequest(prompt_ids=ids, max_new_tokens=length, sampling=sampling, seed=number, mode=mode)

    def texts(self, requests: Sequence[GenerationRequest], *, drafted: bool) -> tuple[list[Text], DecodeStats]:
        """Decode these texts together."""
        asked = [request if drafted else replace(request, num_draft_tokens=0) for request in requests]
        texts, stats = {self._engine.add_request(request): Text(request) for request in asked}, DecodeStats()
        while not all(generation.is_over for generation in texts):
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                texts[output.sequence].ids += output.step.emitted
                stats.take(output.step)
        assert drafted or not stats.num_scored
        return list(texts.values()), stats


class Reference:
    """transformers' own pass over whole texts."""

    def __init__(self, folder: Path) -> None:
        self.model = causal_lm(folder, dtype=torch.float32).eval()

    def check(self, texts: Sequence[Text], known: Sequence[Text] = ()) -> None:
        """Require that the model itself says these texts; those that are known need no pass."""
        seen = [text.ids for text in known]
        for text in texts:
            if text.ids not in seen:
                differences = list(self._differences(text))
                assert not differences, (text.request.sampling.temperature, text.request.mode, differences[:3])

    @torch.inference_mode()
    def check_tree(self, target: Target, ids: Sequence[int]) -> None:
        """Require that a tree behind this text is scored as the texts that it holds."""
        tokens, sources = (ids[-1], *ids[:4]), (None, *["drafter"] * 4)
        tree = DraftTree(tokens, (0, 0, 1, 0, 3), sources, (0.0,) * 5)
        scores = target.open(list(ids), 8, "fast").score(tree)
        for score, path in zip(scores, ([], tokens[1:2], tokens[1:3], tokens[3:4], tokens[3:5]), strict=True):
            expected = self.model(input_ids=torch.tensor([[*ids, *path]]), use_cache=False).logits[0, -1].float()
            torch.testing.assert_close(score[: len(expected)], expected, atol=TIE, rtol=TIE)

    @torch.inference_mode()
    def _differences(self, text: Text) -> Iterator[tuple[int, float]]:
        """Yield where the model itself says something else in a text of the request's largest length, and how much
        likelier it finds that, beyond rounding."""
        prompt, request = list(text.request.prompt_ids), text.request
        longest = prompt + text.ids + [0] * ((request.max_new_tokens or 0) - len(text.ids))
        logits_SV = self.model(input_ids=torch.tensor([longest]), use_cache=False).logits[0].double().numpy()
        noise = SeededNoise(request.seed, 0, logits_SV.shape[1])
        for at, token in enumerate(text.ids):
            scores_V = logits_SV[len(prompt) + at - 1]
            if request.sampling.temperature:
                scores_V = scores_V - np.log(noise.exponentials(len(prompt) + at, np.arange(len(scores_V))))
            if (behind := scores_V.max() - scores_V[token]) > TIE:
                yield at, float(behind)


def decode_family(row: Row, folder: Path, others: Sequence[Server], length: int) -> None:
    """Decode with other drafters and with the model itself as drafter; note in the row what was seen.

    Raises:
        ModelError: the model is refused.
    """
    lengths, short = [length] * 2 + [length // 8] * 6, [length // 8] * 8
    for server in others:
        server.serve(folder)
    reference, (server, *_) = Reference(folder), others
    target, drafted = server.target, [(others[0], lengths), *((other, short) for other in others[1:])]
    limits = target.limits("fast")
    row.computed_by = KERNELS if isinstance(target, NativeTarget) else TRANSFORMERS
    row.because = unsupported_reason(reference.model)
    row.drafts = "chains" if limits.num_chains == 1 else "trees"
    plain, _ = server.texts(server.requests("fast", lengths), drafted=False)
    reference.check(plain)
    if limits.num_nodes == 0:
        row.drafts = "nothing"
    elif limits.num_chains is None:
        reference.check_tree(target, plain[0].ids[:40])
    with suppress(ModelError):  # of layers that do not draft
        server = Server(folder, folder)
        drafted.append((server, short))
    for each, some in drafted:
        texts, stats = each.texts(each.requests("fast", some), drafted=True)
        reference.check(texts, plain)
        assert stats.num_scored > 0 or row.drafts == "nothing"
    assert stats.num_agreed or server in others, "its own drafts are never right"
    row.modes.append("fast")
    requests = server.requests("reproducible", [length, length // 2])
    same, _ = server.texts(requests, drafted=False)
    reference.check(same, plain)
    again, _ = server.texts(requests, drafted=True)
    assert [text.ids for text in again] == [text.ids for text in same]
    row.modes.append("reproducible")
