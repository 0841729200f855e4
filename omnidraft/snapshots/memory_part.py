"""The part `memory` of a snapshot: one file an owner of texts, a tenant or a group of tenants.

The names tell nobody whose a file is: an encrypted one has the opaque id of its key, a plain one a hash. It is a part
of its own, as `resume` is, so that it can be deleted from old snapshots while their weights stay.
"""

import hashlib

MEMORY = "memory/"
RESUME = "resume/"
"""The part with users' records: held-out ones and those that are learned again."""
WORKER_PARTS = ("serving", "memory")
"""The parts that a worker reads."""
PRUNED_PARTS = ("resume", "memory")
"""The parts with users' text, which only the newest snapshots and the champion keep."""
ALL_PARTS = ("serving", *PRUNED_PARTS)
_PLAIN, _ENCRYPTED = ".safetensors", ".encrypted"
_HASH_CHARACTERS = 32


def setting_of(part: str) -> str:
    """Return the name of the setting that says how many snapshots keep this part."""
    return "registry.keep_serving" if part == "serving" else "registry.keep_resume"


def plain_name(kind: str, owner: str) -> str:
    """Return the name of a file that is not encrypted."""
    digest = hashlib.sha256(f"{kind}\n{owner}".encode()).hexdigest()
    return f"{kind}-{digest[:_HASH_CHARACTERS]}{_PLAIN}"


def encrypted_name(kind: str, key_id: str) -> str:
    """Return the name of a file that is encrypted with the key of this id."""
    return f"{kind}-{key_id}{_ENCRYPTED}"


def key_id_of(name: str) -> str | None:
    """Return the id of the key that a file of this name is encrypted with; None: it is plain."""
    return name.removesuffix(_ENCRYPTED).rpartition("-")[2] if name.endswith(_ENCRYPTED) else None


def is_private(name: str) -> bool:
    """Return whether a snapshot's file, by its relative name, has users' text that anybody could read."""
    return name.startswith(RESUME) or (name.startswith(MEMORY) and key_id_of(name) is None)
