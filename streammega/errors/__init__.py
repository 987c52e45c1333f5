"""Every error that streammega raises on purpose.

    StreammegaError
    ├── ConfigError                  a setting that cannot work, found before any data is read
    ├── StorageError                 bytes that could not be read or written
    │   ├── ObjectNotFoundError      no such object, bucket or file
    │   │   └── MissingShardsError   some shards of a numbered set are not there
    │   ├── AccessDeniedError        the endpoint refused the credentials, or forbids it
    │   ├── EndpointError            the endpoint refused, timed out or failed
    │   ├── ShortReadError           other bytes arrived than were asked for
    │   ├── UnsupportedOperation     this storage cannot do that
    │   └── ObjectChangedError       the object is not the one that was opened
    ├── FormatError                  an .idx, .bin or other file of another content than its format
    ├── CacheError                   the local cache cannot hold what it must
    ├── StateError                   a checkpoint's data state that does not fit this run
    ├── ConvertError                 a corpus that could not be converted
    └── GradientError                a gradient that is not finite

Messages say what happened, where, and how to mend it. They never hold credentials, which are taken
out here (`redaction.redact`): code that raises one may repeat what a library says. `ConfigError` and
`FormatError` are also `ValueError`s, and `ObjectNotFoundError` is also a `FileNotFoundError`, so that
code written for the standard errors keeps working.
"""

from streammega.errors.redaction import redact
from streammega.errors.words import without_controls

__all__ = [
    "AccessDeniedError",
    "CacheError",
    "ConfigError",
    "ConvertError",
    "EndpointError",
    "FormatError",
    "GradientError",
    "MissingShardsError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "ShortReadError",
    "StateError",
    "StorageError",
    "StreammegaError",
    "UnsupportedOperation",
]


class StreammegaError(Exception):
    """The root: catch this to catch everything below."""

    def __init__(self, *args: object) -> None:
        # Every error passes here. A message may easily contain a URL with a password, or a name
        # with control characters.
        super().__init__(
            *(without_controls(redact(arg)) if isinstance(arg, str) else arg for arg in args)
        )


class ConfigError(StreammegaError, ValueError):
    """A setting that cannot work; raised before any data is read."""


class StorageError(StreammegaError):
    """Bytes could not be read from a store, or written to it."""

    transient = False
    """Trying again may help."""
    throttled = False
    """The endpoint asked for fewer requests."""
    silent = False
    """No server answered, so the endpoint may not exist."""
    upload_refused = False
    """Credentials have expired within an upload, or the clock jumped. It cannot go on, but another may."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No such object, bucket or file."""


class MissingShardsError(ObjectNotFoundError):
    """Some shards of a numbered set do not exist."""


class AccessDeniedError(StorageError):
    """The endpoint refused the credentials, or there were none."""

    has_expired = False
    """Whether the credentials were valid for a time that is over. Renewed ones may be accepted."""


class EndpointError(StorageError):
    """The endpoint could not be reached, timed out, or failed."""

    transient = True


class ShortReadError(StorageError):
    """A read returned other bytes, or another number of them, than were asked for."""

    transient = True


class UnsupportedOperation(StorageError):
    """This storage cannot do that; other storages can."""


class ObjectChangedError(StorageError):
    """An object is not the one that was opened: its ETag or size differs."""


class FormatError(StreammegaError, ValueError):
    """A file does not hold what its format says."""

    sample: tuple[int, int] | None = None
    """Which of how many samples has the first id outside of the vocabulary."""


class CacheError(StreammegaError):
    """The local cache cannot be written (a full or read-only disk), or may hold forged files."""


class StateError(StreammegaError):
    """A loader state that belongs to another dataset, seed or order."""


class ConvertError(StreammegaError):
    """A corpus that could not be converted; names the file and line."""


class GradientError(StreammegaError):
    """A gradient that is not finite; names the rank and the bucket, or the parameter."""
