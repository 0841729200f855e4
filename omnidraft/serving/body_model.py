"""Base of all models in a request's body: what is not known is ignored and told of, and the errors are few.

Clients send what their vendor's server knows, and more with every month. A field that has no counterpart here is left
out; its name is in the response's header and in the log. With `worker.strict_fields` it is a 400 instead.
Pydantic reports every error, and a client could cause a hundred thousand of them, a second of work.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from omnidraft.params import DEFAULTS, MAX_COUNT, MAX_SEED, MIN_SEED, ROWS, UNSAID, Api, Row, SamplingNumbers

MAX_FIELDS = 64
MAX_ENTRIES = 2_000


_IGNORED: ContextVar[dict[str, None] | None] = ContextVar("ignored", default=None)


@contextmanager
def collecting_ignored(*, is_strict: bool) -> Iterator[Collection[str]]:
    """Inside, `ignore` collects names, which are yielded, or refuses them if `is_strict`."""
    names: dict[str, None] = {}
    token = _IGNORED.set(None if is_strict else names)
    try:
        yield names.keys()
    finally:
        _IGNORED.reset(token)


def ignore(name: str) -> None:
    """Leave out a part of the body with this name. Raises ValueError where nothing may be left out."""
    names = _IGNORED.get()
    if names is None:
        raise ValueError(f"{name[:80]!r} is not known here")
    if len(names) < MAX_FIELDS:
        names[name] = None


class BodyModel(BaseModel):
    """A JSON object in a body."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _leaves_out_what_is_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = _fields_by_name(cls)
        for name in value.keys() - known.keys():
            if value[name] is not None:
                ignore(name)
        required = {name for name, each in known.items() if each.is_required()}  # of another, null is nothing
        return {name: each for name, each in value.items() if each is not None or name in required}


@cache
def _fields_by_name(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a model under all names that a body may have for them."""
    known: dict[str, FieldInfo] = {}
    for name, each in model.model_fields.items():
        alias = each.validation_alias
        names = alias.choices if isinstance(alias, AliasChoices) else [each.alias or name]
        known |= {str(other): each for other in names}
    return known


class ExactModel(BaseModel):
    """A JSON object whose fields all shape the text, so that each has to be known; it has few, and so few errors."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields, there are not as many")
        return value


def _check_num_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value)} entries, at most {MAX_ENTRIES} are taken")
    return value


MAPPING_LIMITS = (BeforeValidator(_check_num_entries), Field(max_length=MAX_ENTRIES))
"""Annotations of a mapping that bound its entries: checked before the entries are, and documented."""

TextMapping = Annotated[dict[str, str], *MAPPING_LIMITS]


def _check_finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as exc:
        raise ValueError("numbers must be finite: JSON has no NaN and no Infinity") from exc
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""An object of whatever JSON can say; Python's parser reads more, and 1e400 as Infinity."""


def refuse(is_refused: Callable[[Any], bool], reason: str) -> BeforeValidator:
    """Return an annotation that refuses some values for a reason of their own."""

    def check(value: Any) -> Any:
        if is_refused(value):
            raise ValueError(reason)
        return value

    return BeforeValidator(check)


def _kind_of(value: Any) -> str | None:
    """Return the `type` of an object; None where it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def only(field: str, *kinds: str | None) -> BeforeValidator:
    """Return an annotation of a list that leaves out objects of other types than these, named after their field."""

    def kept(items: Any) -> Any:
        if not isinstance(items, list):
            return items
        for index, item in enumerate(items):
            if isinstance(item, dict) and _kind_of(item) not in kinds:
                require_text_kind(item)
                ignore(f"{field}.{index} ({_kind_of(item)})")
        return [item for item in items if not isinstance(item, dict) or _kind_of(item) in kinds]

    return BeforeValidator(kept)


def as_list(documented: Any, wrap: Callable[[str], Any] = lambda text: text) -> BeforeValidator:
    """Return an annotation of a list that takes a text for the list of what `wrap` makes of it."""
    return BeforeValidator(
        lambda value: [wrap(value)] if isinstance(value, str) else value, json_schema_input_type=documented
    )


_NO_TEXT = {
    "image", "image_url", "input_image", "audio_url", "input_audio", "video_url", "file", "input_file", "document",
    "search_result", "container_upload",
}  # fmt: skip
_TEXT_FIELDS = ("text", "refusal", "content")
_PART_FIELDS = {"type", *_TEXT_FIELDS}


def require_text_kind(part: Any) -> None:
    """Raise ValueError for a part of a message that is no text."""
    if (kind := _kind_of(part)) in _NO_TEXT:
        raise ValueError(f"the models here read text only, no {kind!r}")


def _text_of(content: Any) -> Any:
    """Return the text of a text, of its parts, or of nothing. Raises ValueError."""
    return "".join(map(_text_of_part, content)) if isinstance(content, list) else "" if content is None else content


def _text_of_part(part: Any) -> str:
    """Return the text of a part, whatever its type is called."""
    require_text_kind(part)
    if not isinstance(part, dict):
        part = {"text": part}
    for name in part.keys() - _PART_FIELDS:
        ignore(name)
    text = next((part[name] for name in _TEXT_FIELDS if part.get(name) is not None), "")
    if not isinstance(text, str):
        raise ValueError("parts of a text are texts")
    return text


Texts = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[JsonObject] | None)]
"""A text, or its parts."""

Speculation = Literal["auto", "off"] | Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""off, or the number of tokens drafted per pass; auto takes the deployment's."""


class RequestFields(BodyModel):
    """Fields of the requests of all APIs, under the same names; those of the table of sampling settings come beside
    them, by `with_sampling`."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    stream: bool | None = None
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    """The same seed gives the same text, whatever drafts."""
    speculation: Speculation = "auto"
    priority: int = Field(0, ge=-MAX_COUNT, le=MAX_COUNT)
    """Of the requests of one client, those with a lower one are served first, as in vLLM."""
    store: bool | None = None
    """False keeps the request out of the traces the drafter learns from."""


_Body = TypeVar("_Body", bound=RequestFields)


def with_sampling(api: Api) -> Callable[[type[_Body]], type[_Body]]:
    """Return a decorator that adds the sampling settings of this API to the body of its requests."""
    kinds: dict[str, Any] = {each.name: each.type for each in fields(SamplingNumbers)}
    added: dict[str, Any] = {
        name: (kinds[name] | None, _field(name, row, api)) for name, row in ROWS.items() if api in row.apis
    }

    def add(body: type[_Body]) -> type[_Body]:
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return add


def _field(name: str, row: Row, api: Api) -> Any:
    """Return the field of a setting; what turns it off in vLLM does so in OpenAI's APIs."""
    off = row.off
    limit: Any = {"gt" if row.bounds.excludes_lowest else "ge": min((row.bounds.lowest, *off))}
    notes = [f"{' and '.join(map(str, off))} turn it off."] if off else []
    if (unsaid := getattr(UNSAID, name)) != getattr(DEFAULTS, name):
        notes.append(f"The model's own when it is not given, else {unsaid:g}.")
    return Field(None, le=row.bounds.highest, description=" ".join((row.doc, *notes)), **limit)
