"""A vocabulary pair, a drafter and records, all tiny and real: BPE tokenizers, a random Llama, the n-gram cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from omnidraft.config import LearnerSettings
from omnidraft.distill.training.learner import SEED, Learner
from omnidraft.distill.training.tenant_factors import FactorPlan
from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.traces.record import Rounds, TargetLogprobs, TraceRecord, fields_of
from omnidraft.traces.request_ids import request_of
from omnidraft.vocab.alignment import Alignment, align
from omnidraft.vocab.ngram_cache import NgramCache
from tests.trace_records import make_record

TEXTS = (
    "The water of the river goes into the sea, and the river itself stays where it was. ",
    "def add(first, second):\n    return first + second  # 12 + 30 = 42\n",
    "Where does the river go? Into the water, of course; the sea stays.\n",
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
K = 6


def save_tokenizer(folder: Path, vocab_size: int, texts: tuple[str, ...]) -> HfTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    ).save_pretrained(folder)
    return HfTokenizer(folder)


def save_model(folder: Path, vocab_size: int, *, tied: bool, spread: float = 0.02) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=spread,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@dataclass(frozen=True)
class Pair:
    """A drafter's folder and two vocabularies."""

    folder: Path
    draft: HfTokenizer
    target: HfTokenizer
    alignment: Alignment

    def cache(self) -> NgramCache:
        return NgramCache(self.alignment.fingerprint, self.draft.vocabulary, self.target.vocabulary, capacity=500)

    def load_cache(self, arrays: dict[str, np.ndarray]) -> NgramCache:
        """Without arrays a new one."""
        if not arrays:
            return self.cache()
        return NgramCache.from_arrays(
            arrays, self.alignment.fingerprint, self.draft.vocabulary, self.target.vocabulary, capacity=500
        )

    def learner(
        self, *, head: bool = False, head_blocks: int = 1, factor_plan: FactorPlan | None = None, **settings
    ) -> Learner:
        chosen = LearnerSettings(**{"learning_rate": 3e-3, "max_tokens": 128, "precision": "float32", **settings})
        model = load_trainable(self.folder, train=chosen.train, rank=4, seed=SEED, precision=chosen.precision)
        made = AcceptanceHead(model.hidden_size, num_blocks=head_blocks) if head else None
        words = (self.draft, self.target.vocabulary, self.alignment)
        return Learner(model, *words, self.cache(), chosen, made, factor_plan)

    def record(
        self,
        request_id: str = "r",
        text: str = TEXTS[0],
        *,
        seed: int = 0,
        emitted: list[int] | None = None,
        **changes,
    ) -> TraceRecord:
        """A finished answer whose tokens the target believed in with p = 0.7, drafted half right."""
        emitted = emitted or [*self.target.encode(text), self.target.vocabulary.roles["eos"]]
        beliefs = make_beliefs(emitted, len(self.target.vocabulary), seed)
        known = {
            "alignment": self.alignment.fingerprint,
            "drafter_prompt_ids": np.array(self.draft.encode("Where? "), np.uint32),
            "prompt_ids": np.array(self.target.encode(f"Who is {request_of(request_id)}? "), np.uint32),
            "before_ids": np.zeros(0, np.uint32),
            "emitted_ids": np.array(emitted, np.uint32),
            "beliefs": beliefs,
            "rounds": make_rounds(emitted, beliefs),
            "finish_reason": "stop",
        }
        return make_record(request_id, **(known | changes))


def make_rounds(emitted: list[int], beliefs: TargetLogprobs) -> Rounds:
    """Two emitted tokens a round: the first was drafted, beside another; in the place of the second stood two others,
    one with a child. An odd last token had nothing drafted."""
    num_whole = len(emitted) // 2
    num_rounds = num_whole + len(emitted) % 2
    nodes = [
        (emitted[at], beliefs.top_ids_EK[at, 1], *beliefs.top_ids_EK[at + 1, 1:3], emitted[at])
        for at in range(0, 2 * num_whole, 2)
    ]
    is_whole_R = np.arange(num_rounds) < num_whole
    columns = {
        "num_nodes_R": 5 * is_whole_R,
        "num_accepted_R": is_whole_R,
        "num_emitted_R": 1 + is_whole_R,
        "num_draft_ids_R": np.zeros(num_rounds),
        "node_ids_M": np.array(nodes).ravel(),
        "parents_M": np.tile([0, 0, 1, 1, 3], num_whole),
        "sources_M": np.zeros(5 * num_whole),
        "log_q_M": np.zeros(5 * num_whole),
        "accepted_M": np.tile([1, 0, 0, 0, 0], num_whole),
        "draft_ids_D": np.zeros(0),
        "draft_s_R": np.zeros(num_rounds),
        "target_s_R": np.zeros(num_rounds),
    }
    return Rounds(**{field.name: columns[field.name].astype(field.kind) for field in fields_of(Rounds)})


def make_beliefs(emitted: list[int], vocab_size: int, seed: int) -> TargetLogprobs:
    draws = np.random.default_rng(seed)
    others_EK = np.stack(
        [draws.choice(np.setdiff1d(np.arange(vocab_size), [t]), K - 1, replace=False) for t in emitted]
    )
    p_K = np.array([0.7, 0.1, 0.06, 0.04, 0.03, 0.02])
    log_p_EK = np.tile(np.log(p_K), (len(emitted), 1))
    return TargetLogprobs(
        top_ids_EK=np.concatenate([np.array(emitted)[:, None], others_EK], axis=1).astype(np.uint32),
        top_log_p_EK=log_p_EK.astype(np.float16),
        emitted_log_p_E=log_p_EK[:, 0].astype(np.float16),
        tail_log_p_E=np.full(len(emitted), np.log(0.05), np.float16),
    )


def make_pair(root: Path, *, tied: bool, spread: float = 0.02) -> Pair:
    """With a higher `spread` of its weights the drafter changes more with a change of them."""
    draft = save_tokenizer(root / "drafter", 300, TEXTS[2:])
    target = save_tokenizer(root / "target", 340, TEXTS[:2])
    save_model(root / "drafter", len(draft.vocabulary), tied=tied, spread=spread)
    return Pair(root / "drafter", draft, target, align(draft, target))


def records_of(pair, num: int, first: int = 0) -> list:
    texts = ["The river goes into the sea. ", "Where does the water go?", "def add(first, second): return first"]
    return [pair.record(f"r{n}", texts[n % 3], seed=n) for n in range(first, first + num)]


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
