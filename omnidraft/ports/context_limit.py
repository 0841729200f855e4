"""The check that a text fits into the target's context, the same wherever it is made."""

from collections.abc import Sequence

from omnidraft.errors import ContextExceeded, RequestError


def ids_needed(prompt_ids: Sequence[int], max_new_tokens: int, context_limit: int) -> int:
    """Return the number of ids of prompt and answer together.

    Raises:
        RequestError: the prompt is empty; ContextExceeded: they exceed the context.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token")
    needed = len(prompt_ids) + max_new_tokens
    if needed > context_limit:
        raise ContextExceeded(len(prompt_ids), max_new_tokens, context_limit)
    return needed
