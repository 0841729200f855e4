"""What every part of a request's body shares: no field is ignored, no value converted, and errors are few.

Pydantic tells every error there is, and a client could ask for a hundred thousand of them, a second of work.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_FIELDS = 64
MAX_ENTRIES = 2_000


class StrictModel(BaseModel):
    """A JSON object whose fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields, there are not as many")
        return given


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_ENTRIES:
        raise ValueError(f"{len(given)} entries, at most {MAX_ENTRIES} are taken")
    return given


Few = (BeforeValidator(_few), Field(max_length=MAX_ENTRIES))
"""Of a mapping: refused before its entries are looked at, and documented."""

FewTexts = Annotated[dict[str, str], *Few]
