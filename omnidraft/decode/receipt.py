"""Receipts: signed documents that say how an answer was drawn, so that whoever has the model can draw it again.

A receipt is JSON in a DSSE envelope, signed as snapshots are (snapshots/keys.py). It holds all that the ids of a text
depend on in reproducible mode. Drafts are not among it, so the snapshot is named for information only.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnidraft.config.secrets import PublicKeyText
from omnidraft.errors import RequestError, SignatureRefused
from omnidraft.ports import Mode, Request, Sampling
from omnidraft.snapshots.keys import END_MS, PrivateKey, Role, TrustedKeys, envelope, read_envelope
from omnidraft.vocab.thoughts import Phase, ThoughtMarkers, Thoughts

_Signer = TypeVar("_Signer")
PAYLOAD_TYPE = "application/vnd.omnidraft.receipt+json"
SIGNER: Role = "worker"
Ids = tuple[int, ...] | str
"""Ids, or `ids_digest` of them."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelIdentity(_Part):
    """What a text depends on besides its request."""

    name: str
    """The name that its server has for it; others may call it otherwise."""
    weights: str
    """SHA-256 of the weights and the configuration; see models/weights_name.py."""
    kernels: str
    """The number format, the kernels and whatever else their bits depend on: the rest of ports.Target.fingerprint."""
    tokenizer: str
    """Fingerprint of the tokenizer."""

    def differences(self, other: "ModelIdentity") -> list[str]:
        """Return the names of what differs between them; neither computes the other's texts unless it is none."""
        return [name for name in ("weights", "kernels", "tokenizer") if getattr(self, name) != getattr(other, name)]


class ThoughtRules(_Part):
    """See vocab.thoughts.Thoughts, whose markers are the tokenizer's."""

    phase: Phase
    has_grammar: bool
    budget: int | None


class Receipt(_Part):
    """What a server says about an answer."""

    model: ModelIdentity
    snapshot_version: int | None
    """The snapshot that drafted last; no id depends on it. None: the base drafter, or nothing."""
    time_ms: int = Field(ge=0, lt=END_MS)
    """Unix milliseconds at which the answer ended."""
    key: PublicKeyText
    """The server's public key."""
    choice: int = Field(ge=0)
    """The index of the answer in its response."""
    prompt: Ids
    answer: Ids
    seed: int
    """That of this choice, unsigned 64 bit."""
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int = Field(ge=0)
    bad_ids: tuple[tuple[int, ...], ...]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    keeps_stop: bool
    shown_ids: dict[int, str]
    """Special tokens whose text the answer shows."""
    thoughts: ThoughtRules | None

    def ids(self, prompt_ids: Any, answer_ids: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids of prompt and answer, the given ones where the receipt has digests alone.

        Raises:
            SignatureRefused: others are given.
            RequestError: they are needed and not given.
        """
        prompt, answer = _ids("prompt", self.prompt, prompt_ids), _ids("answer", self.answer, answer_ids)
        return prompt, answer

    def request(self, prompt_ids: Sequence[int], markers: ThoughtMarkers | None) -> Request:
        """Return the request that draws the answer again. `markers` are the tokenizer's, where it has some."""
        rules = self.thoughts
        thoughts: Thoughts | None = None
        if rules is not None and markers is not None:
            thoughts = Thoughts(markers, rules.phase, rules.has_grammar, rules.budget)
        return Request(
            tuple(prompt_ids),
            (),
            **{name: getattr(self, name) for name in _SETTINGS},
            stop_strings=tuple(each.encode() for each in self.stop_strings),
            mode="reproducible",
            shown_ids={token: text.encode() for token, text in self.shown_ids.items()},
            thoughts=thoughts,
        )


_SETTINGS = ("seed", "sampling", "max_new_tokens", "min_new_tokens", "bad_ids", "stop_ids", "keeps_stop")
"""The fields that a request has as they are."""


@dataclass(frozen=True, slots=True)
class ReceiptSigner:
    """Makes the receipts of one model that is served."""

    key: PrivateKey
    model: ModelIdentity

    def receipt(
        self,
        request: Request,
        answer_ids: Sequence[int],
        *,
        choice: int = 0,
        snapshot_version: int | None,
        as_digests: bool = False,
    ) -> dict[str, Any]:
        """Return the receipt of a text in reproducible mode that has ended, in its envelope."""
        settings = {name: getattr(request, name) for name in _SETTINGS}
        if (grammar := request.sampling.grammar) is not None:
            settings["sampling"] = replace(request.sampling, grammar=replace(grammar, compiled=None))
        stated = ids_digest if as_digests else tuple
        rules = request.thoughts
        receipt = Receipt(
            model=self.model,
            snapshot_version=snapshot_version,
            time_ms=int(time.time() * 1000),
            key=self.key.public_text(SIGNER),
            choice=choice,
            prompt=stated(request.prompt_ids),
            answer=stated(answer_ids),
            **settings,
            stop_strings=tuple(each.decode() for each in request.stop_strings),
            shown_ids={token: text.decode() for token, text in request.shown_ids.items()},
            thoughts=rules and ThoughtRules(phase=rules.phase, has_grammar=rules.has_grammar, budget=rules.budget),
        )
        return envelope(receipt.model_dump_json().encode(), PAYLOAD_TYPE, self.key)


def read_receipt(document: Mapping[str, Any], trusted: Sequence[str] = ()) -> Receipt:
    """Return the receipt in an envelope that its own key signed, which must be one of the trusted public keys if there
    are any. Raises SignatureRefused."""
    payload, signatures = read_envelope(document, PAYLOAD_TYPE)
    try:
        receipt = Receipt.model_validate_json(payload)
    except ValidationError as exc:
        raise SignatureRefused(f"it is no receipt of this release: {exc.errors()[0]['msg']}") from exc
    if trusted and receipt.key not in trusted:
        raise SignatureRefused(f"its key is not trusted here: {receipt.key}")
    try:
        TrustedKeys([receipt.key]).verify(payload, PAYLOAD_TYPE, signatures, (SIGNER,))
    except SignatureRefused as exc:
        raise SignatureRefused("it is not what its key signed: it was changed") from exc
    return receipt


def ids_digest(ids: Sequence[int]) -> str:
    """Return the SHA-256 of ids as unsigned little-endian numbers of 32 bits, behind the name of the hash."""
    return "sha256:" + hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()


def _ids(name: str, stated: Ids, given: Any) -> Sequence[int]:
    if given is None:
        if not isinstance(stated, str):
            return stated
        raise RequestError(
            f"the receipt has a digest of the {name} alone; give the whole response, asked for with return_token_ids, "
            'or {"receipt": ..., "prompt_token_ids": [...], "token_ids": [...]}'
        )
    try:
        is_same = ids_digest(given) == (stated if isinstance(stated, str) else ids_digest(stated))
        ids = list(map(int, given))
    except (TypeError, ValueError, OverflowError) as exc:
        raise SignatureRefused(f"the ids of the {name} are none: {exc}") from exc
    if not is_same:
        raise SignatureRefused(f"it is of another {name}")
    return ids


def require_reproducible(mode: Mode) -> None:
    """Raise RequestError for a mode whose texts cannot be computed again bit for bit."""
    if mode != "reproducible":
        raise RequestError(
            "receipt: only texts of the reproducible mode can be computed again bit for bit; ask for "
            "mode = 'reproducible', or set decode.mode"
        )


def require_signer(signer: _Signer | None) -> _Signer:
    """Return the signer, or its key. Raises RequestError where this process has none."""
    if signer is None:
        raise RequestError(
            "receipt: there is no key here to sign it with; set worker.receipt_key to the private key that "
            "`omnidraft snapshots new-key --role worker` makes"
        )
    return signer
