"""Every error this package raises on purpose.

OmnidraftError
|- ConfigError            a setting is missing or contradicts another; fix the settings
|  |- SettingsUnreadable  the settings file is missing or not TOML; correct --config, or the file
|  |- ModeRefused         a target cannot serve a mode; set another one
|  `- ExtraMissing        an optional part of the package is not installed; run the command that the message names
|- RequestError           a request asks for what cannot be served; fix the request (HTTP 4xx)
|  `- ContextExceeded     ... since its prompt leaves the answer no room in the context; shorten it
|- ModelError             a model cannot be obtained or used
|  |- ModelUnknown        no such name, folder or repository; see `omnidraft models list`
|  |- KernelsUnavailable  our kernels cannot be compiled, or do not work here; see `omnidraft doctor`
|  |- ModelDownloadError  network, disk or registry failed; try again, or free space
|  `- ModelCorrupt        the file is not the one the catalog names; pull again, report if it persists
|- VocabularyError        two vocabularies, caches or records do not belong together; never combine them
|- ContractError          a backend broke a promise of ports; fix the backend
|- WireError              bytes from outside are not a record we can read; dead-letter them
|  |- UnknownSchema       ... because another schema version wrote them
|  |- UnknownKey          ... because no key of log.encryption_keys opens them; add the key, then redrive
|  |- RecordForgotten     ... because their tenant was forgotten; count them, they are no dead letters
|  |- SignatureRefused    ... because nobody of registry.trusted_keys signed them, or they are old; see docs/security.md
|  `- RecordTooLarge      a record is larger than a log takes; shorten prompts, or live without their traces
|- BusError               the log refused or timed out; the caller may retry
|  |- KeyStoreError       the key store does not answer; wait, and skip nothing
|  |- MessageTooLarge     the topic does not take a message of this size; drop or cut it, or raise `max.message.bytes`
|  `- OffsetOutOfRange    the log does not hold what is to be read next; compare with its first and end offsets
|     `- LogTruncated     ... and lost messages that were read; its offsets name others, so go on only where told
|- LogReplaced            the log is not the one that was learned from; decide with `omnidraft learning restart`
`- SnapshotError
   |- SnapshotNotFound    the registry has no such version or alias
   |- SnapshotCorrupt     a file's checksum does not match the manifest; never load it
   |- SnapshotStale       older than, or not a child of, the one in place; keep the one in place
   |- StorageError        a disk takes no files of snapshots; free space, the caller may retry
   `- RegistryError       the registry refused or cannot be reached; the caller may retry
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class OmnidraftError(Exception):
    """The base of all errors raised on purpose; the message says what to do."""


class ConfigError(OmnidraftError):
    """A setting is missing or contradicts another."""


class SettingsUnreadable(ConfigError):
    """The settings file is missing, cannot be read, or is not TOML."""


class ModeRefused(ConfigError):
    """A target cannot serve a mode. The advice is for who chooses the settings, which a client does not."""

    def __init__(self, reason: str, advice: str = "set decode.mode = 'fast'") -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice

    def __str__(self) -> str:
        return f"{self.reason}: {self.advice}"


class ExtraMissing(ConfigError):
    """An optional part of the package is not installed."""


class RequestError(OmnidraftError, ValueError):
    """A request cannot be served as it is."""


class ContextExceeded(RequestError):
    """A prompt and the least answer do not fit into the context; the message has the words that clients look for."""

    def __init__(
        self, num_prompt_tokens: int, num_new_tokens: int, context_limit: int, *, is_read: bool = True
    ) -> None:
        """With `is_read=False` a prompt has at least so many tokens, by its bytes."""
        least = "" if is_read else "at least "
        super().__init__(
            f"This model's maximum context length is {context_limit} tokens. However, your request has {least}"
            f"{num_prompt_tokens} tokens, and {num_new_tokens} more for the answer; shorten the prompt"
        )
        self.num_prompt_tokens, self.most_prompt_tokens = num_prompt_tokens, context_limit - num_new_tokens


def cannot_write(path: Path, error: OSError, instead: str = "another file") -> RequestError:
    """Return the error of a command whose output cannot be written; name what to give `instead`."""
    return RequestError(f"cannot write {path}: {error.strerror}; name {instead}, or make it writable")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question to add to an unknown name's problem, which names what comes close to it; else nothing."""
    close = difflib.get_close_matches(name.lower(), names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class ModelError(OmnidraftError):
    """A model cannot be obtained or used."""


@contextmanager
def model_errors(problem: str) -> Iterator[None]:
    """Raise ModelError, with the first line of what it says, for whatever another library raises about a model."""
    try:
        yield
    except OmnidraftError:
        raise
    except Exception as exc:  # not our code: it may raise anything
        text = str(exc).strip().partition("\n")[0]
        if "trust_remote_code" in str(exc):
            text = "it needs code that lies in its folder, and no such code is run"
        elif type(exc).__name__ == "SafetensorError":
            text = f"a file of its weights is cut short, or a pointer of Git LFS; fetch it again ({text})"
        elif not isinstance(exc, OSError | ValueError | ImportError | RuntimeError):
            text = f"{type(exc).__name__}: {text}"
        raise ModelError(f"{problem}: {text}") from exc


class ModelUnknown(ModelError):
    """No such name, folder or repository."""


class KernelsUnavailable(ModelError):
    """Our kernels cannot be compiled, or fail on this processor."""


class ModelDownloadError(ModelError):
    """Network, disk or package registry failed."""


class ModelCorrupt(ModelError):
    """A file is not the one the catalog names."""


class VocabularyError(OmnidraftError):
    """Two vocabularies, caches or records do not belong together."""


class ContractError(OmnidraftError):
    """A backend broke a promise of ports."""


class WireError(OmnidraftError):
    """Bytes from outside are not a readable record."""


class UnknownSchema(WireError):
    """Bytes were written by a schema version this reader does not know."""


class UnknownKey(WireError):
    """Bytes were encrypted with a key that this reader does not have."""


class RecordForgotten(WireError):
    """The tenant of a record was forgotten: its key is destroyed, or its content deleted."""


class SignatureRefused(WireError):
    """Bytes lack the signature of a trusted key whose role it is, or were superseded."""


class RecordTooLarge(WireError):
    """A record exceeds the log's maximal message size."""


class BusError(OmnidraftError):
    """The log refused or timed out."""


class KeyStoreError(BusError):
    """The key store refused or timed out."""


class MessageTooLarge(BusError):
    """The topic does not take a message of this size."""


class OffsetOutOfRange(BusError):
    """The log does not hold the next offset to read."""


class LogTruncated(OffsetOutOfRange):
    """The log lost messages before the next offset to read."""


class LogReplaced(OmnidraftError):
    """The log is not the one that the snapshot learned from, or has lost its end."""


class LeaseLost(OmnidraftError):
    """Another controller decides for the pair."""


class SnapshotError(OmnidraftError):
    """A snapshot cannot be obtained, read or loaded."""


class SnapshotNotFound(SnapshotError):
    """The registry has no such version or alias."""


class SnapshotCorrupt(SnapshotError):
    """A file's checksum does not match the manifest."""


class SnapshotStale(SnapshotError):
    """The snapshot is older than, or not a child of, the one in place."""


class StorageError(SnapshotError):
    """A disk refuses files of snapshots."""


class RegistryError(SnapshotError):
    """The registry refused or cannot be reached."""


class StoreLibraryMissing(RegistryError, ConfigError):
    """The library of an artifact store is not installed in this process, which waiting does not change."""
