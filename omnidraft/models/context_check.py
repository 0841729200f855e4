"""Check that a request fits into a target's context; every engine uses this check."""

from collections.abc import Sequence

from omnidraft.errors import RequestError


def ids_needed(prompt_ids: Sequence[int], max_new_tokens: int, context_limit: int) -> int:
    """Return the number of ids of prompt and answer together.

    Raises:
        RequestError: the prompt is empty, or they exceed the context.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token")
    needed = len(prompt_ids) + max_new_tokens
    if needed > context_limit:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens and {max_new_tokens} more were asked for, but the target's "
            f"context holds {context_limit}; shorten the prompt or lower max_new_tokens"
        )
    return needed
