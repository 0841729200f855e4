"""Base of all models in a request's body: no field is ignored, no value converted, and the errors are few.

Pydantic reports every error, and a client could cause a hundred thousand of them, a second of work.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from omnidraft.decode.sampling.validation import MAX_COUNT

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


def refuse_kinds(*kinds: str) -> BeforeValidator:
    """Return an annotation that refuses objects whose `type` is one of these, which are no text, by that name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in kinds:
            raise ValueError(f"the models here read text only, no {kind!r}")
        return value

    return BeforeValidator(check)


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
