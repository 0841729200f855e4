"""Serve's request router for decode replicas: the turns of a conversation go to the replica that holds its keys.

Ray Serve calls `choose_replicas` in the process of the ingress. The replica of a conversation is the one with the
highest hash (rendezvous hashing): all ingresses agree on it without a table, and a replica that comes or goes moves
only its own share of conversations. A request of no conversation, or one whose replica is full, gone or far busier than
another, goes where Serve's power of two choices, its default, sends it, and its prompt is read again there.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from omnidraft.hosts.asgi_bridge import HttpCall

MOST_AHEAD = 4
"""Requests by which the replica of a conversation may be busier than the least busy one."""
_PROMPT_CHARS = 256
"""Characters at the beginning of a prompt without messages that tell conversations apart."""

_Replica = TypeVar("_Replica")


class ConversationRouter(PowerOfTwoChoicesRequestRouter):
    """Prefers the replica of the conversation that the handle names as `session_id`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See RequestRouter. The first rank is tried first; what does not accept the request is passed over at once."""
        others = await super().choose_replicas(candidate_replicas, pending_request)
        conversation = pending_request.metadata.session_id if pending_request is not None else ""
        known = self.replica_queue_len_cache
        lengths = {each: known.get(each.replica_id) or 0 for each in candidate_replicas}
        preferred = replica_of(conversation, lengths, lambda each: each.replica_id.unique_id)
        return others if preferred is None else [[preferred], *others]


def replica_of(conversation: str, lengths: Mapping[_Replica, int], name: Callable[[_Replica], str]) -> _Replica | None:
    """Return the replica of a conversation; None for no conversation, or when another replica is far less busy.

    Args:
        lengths: the number of requests that each replica had when the router last heard of it.
        name: a replica -> what tells it apart from all others, on all ingresses the same.
    """
    if not conversation or not lengths:
        return None
    preferred = max(lengths, key=lambda each: _hash(conversation, name(each)))
    return preferred if lengths[preferred] <= min(lengths.values()) + MOST_AHEAD else None


def conversation_of(call: HttpCall) -> str:
    """Return what identifies the conversation of a request: its client, and the messages up to the first of the user,
    which all its turns begin with. "" for what is no request for text."""
    try:
        body = json.loads(call.body)
        told = json.dumps([body.get("model"), body.get("cache_salt"), body.get("system"), _beginning(body)])
    except (ValueError, TypeError, LookupError, AttributeError):  # the replica says what is wrong with it
        return ""
    return _hash(_client(call), told)


def _beginning(body: dict[str, Any]) -> object:
    """Return what all turns of a conversation begin with: messages, a response's input, or a prompt."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        return _first_messages(messages)
    return (body["prompt"] if messages is None else messages)[:_PROMPT_CHARS]


def _first_messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    roles = [message["role"] for message in messages]
    return messages[: roles.index("user") + 1]


def _client(call: HttpCall) -> str:
    """Return the key of the client, or its address, so that nobody's requests follow those of another."""
    headers = dict(call.headers)
    key = (headers.get(b"authorization") or headers.get(b"x-api-key") or b"").decode("latin-1")
    return key or (call.client[0] if call.client else "")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
