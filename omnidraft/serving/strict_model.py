"""Base of all models in a request's body: no field is ignored, no value converted, and the errors are few.

Pydantic reports every error, and a client could cause a hundred thousand of them, a second of work.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from omnidraft.params import DEFAULTS, MAX_COUNT, MAX_SEED, MIN_SEED, ROWS, UNSAID, Api, Row, SamplingNumbers

MAX_FIELDS = 64
MAX_ENTRIES = 2_000


class StrictModel(BaseModel):
    """A JSON object whose fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields, there are not as many")
        return value


class DirectCaller(StrictModel):
    """The `caller` of a call that the model made itself, as it makes all of them here: there are no programs."""

    type: Literal["direct"]


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
    """Return an annotation that refuses some values for a reason of their own; `{kind}` is the `type` of an object."""

    def check(value: Any) -> Any:
        if is_refused(value):
            raise ValueError(reason.format(kind=repr(kind_of(value))))
        return value

    return BeforeValidator(check)


def kind_of(value: Any) -> str | None:
    """Return the `type` of an object, also of a model; None where it has none."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def one_of(default: str, *others: str) -> Discriminator:
    """Return what tells objects of a union apart by their `type`, which is the tag of each."""
    return Discriminator(lambda value: kind if (kind := kind_of(value)) in others else default)


def refuse_kinds(*kinds: str) -> BeforeValidator:
    """Return an annotation that refuses objects of these types, which are no text."""
    return refuse(lambda value: kind_of(value) in kinds, "the models here read text only, no {kind}")


def _form(value: Any) -> str | None:
    match value:
        case str():
            return "text"
        case list():
            return "list"
        case dict() | BaseModel():
            return "object"
        case bool():
            return None
        case int():
            return "number"
        case _:
            return None


TEXT_OR_LIST = Discriminator(
    _form, custom_error_type="text_or_list", custom_error_message="Input should be a text or a list"
)
"""Tells a union of a text (tag `text`) and a list (tag `list`) apart, so that what is wrong in a list is named."""
TEXT_OR_OBJECT = Discriminator(
    _form, custom_error_type="text_or_object", custom_error_message="Input should be a text or an object"
)
"""The same of a text and an object (tag `object`)."""
TEXT_OR_NUMBER = Discriminator(
    _form, custom_error_type="text_or_number", custom_error_message="Input should be a text or a whole number"
)
"""The same of a text and a whole number (tag `number`)."""
Text = Annotated[str, Tag("text")]
Speculation = Annotated[
    Annotated[Literal["auto", "off"], Tag("text")] | Annotated[int, Field(ge=0, le=MAX_COUNT), Tag("number")],
    TEXT_OR_NUMBER,
]
"""off, or the number of tokens drafted per pass; auto takes the deployment's."""


class RequestFields(StrictModel):
    """Fields of the requests of all APIs, under the same names; those of the table of sampling settings come beside
    them, by `with_sampling`."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    stream: bool | None = None
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    """The same seed gives the same text, whatever drafts."""
    speculation: Speculation = "auto"
    store: bool | None = None
    """False keeps the request out of the traces the drafter learns from."""


_Body = TypeVar("_Body", bound=RequestFields)


def with_sampling(api: Api) -> Callable[[type[_Body]], type[_Body]]:
    """Return a decorator that adds the sampling settings of this API to the body of its requests."""
    kinds: dict[str, Any] = {each.name: each.type for each in fields(SamplingNumbers)}
    return _adding(
        {name: (kinds[name] | None, _field(name, row, api)) for name, row in ROWS.items() if api in row.apis}
    )


def with_null(*names: str) -> Callable[[type[_Body]], type[_Body]]:
    """Return a decorator that adds fields without a counterpart here, which take null only, as it changes nothing."""
    return _adding(dict.fromkeys(names, (None, None)))


def _adding(added: dict[str, Any]) -> Callable[[type[_Body]], type[_Body]]:
    def add(body: type[_Body]) -> type[_Body]:
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return add


def _field(name: str, row: Row, api: Api) -> Any:
    """Return the field of a setting; what turns it off in vLLM does so in OpenAI's APIs."""
    off = row.off if api == "openai" else ()
    limit: Any = {"gt" if row.bounds.excludes_lowest else "ge": min((row.bounds.lowest, *off))}
    notes = [f"{' and '.join(map(str, off))} turn it off."] if off else []
    if (unsaid := getattr(UNSAID, name)) != getattr(DEFAULTS, name):
        notes.append(f"{unsaid:g} when it is not given.")
    return Field(None, le=row.bounds.highest, description=" ".join((row.doc, *notes)), **limit)
