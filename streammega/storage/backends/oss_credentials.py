"""Credentials for Alibaba OSS: where they come from, and how they are renewed when they expire."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from streammega.config.validate import parse_json
from streammega.errors import AccessDeniedError, ConfigError, EndpointError
from streammega.errors.logs import get_logger
from streammega.errors.redaction import remember_secrets
from streammega.storage.fork_lock import process_lock

log = get_logger(__name__)

READ_AGAIN_S = 300.0
"""Seconds after which a key is read again, so that it can be replaced without a restart."""
MARGIN_S = 120.0
"""Seconds before its expiry at which a key is read again."""
MIN_PAUSE_S = 1.0
"""Least seconds between two readings, for a source that does not renew an expiring key."""
SERVICE_TIMEOUT_S = 10
"""Seconds to wait for a service of credentials, which is on this machine or near it."""
_ENVIRONMENT = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", ("OSS_SESSION_TOKEN", "OSS_SECURITY_TOKEN")),
    (
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        ("ALIBABA_CLOUD_SECURITY_TOKEN",),
    ),
)
_URI = "ALIBABA_CLOUD_CREDENTIALS_URI"
_KEY_NAMES = ("key", "access_key_id", "AccessKeyId")
_SECRET_NAMES = ("secret", "access_key_secret", "AccessKeySecret")
_TOKEN_NAMES = ("token", "security_token", "SecurityToken")
_EXPIRY_NAMES = ("expires", "expiration", "Expiration")


@dataclass(frozen=True, kw_only=True)
class OssKey:
    """An AccessKey. With a token it is temporary: valid until `expires`, if that is known."""

    access_key_id: str
    access_key_secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires: datetime | None = None

    def seconds_left(self) -> float:
        """Seconds until it expires."""
        if self.expires is None:
            return float("inf")
        return (self.expires - datetime.now(UTC)).total_seconds()


class OssCredentials:
    """A key in use, and how to read it again. May be used from several threads.

    is_fixed: whether it is always the same one.
    """

    def __init__(self, read: Callable[[], OssKey], *, is_fixed: bool = False) -> None:
        self.is_fixed = is_fixed
        self._read = read
        self._lock = process_lock()
        self._key: OssKey | None = None
        self._read_next = 0.0

    @classmethod
    def from_options(cls, bucket: str, options: Mapping[str, Any]) -> OssCredentials | None:
        """Credentials of the options, or else of the environment; None for `anon`. Nothing is read yet.

        Raises ConfigError for several sources, or a key without a secret.
        """
        if options.get("anon"):
            return None
        sources = ("key", "credentials_provider", "credentials_file")
        chosen = [name for name in sources if options.get(name)]
        if len(chosen) > 1:
            raise ConfigError(
                f"oss://{bucket}: storage_options hold {' and '.join(chosen)}; give one of them"
            )
        if bool(options.get("key")) != bool(options.get("secret")):
            raise ConfigError(
                f"oss://{bucket}: storage_options need both 'key' and 'secret', or neither; only "
                f"one of them was given"
            )
        if not chosen:
            return cls(lambda: _environment_key(bucket))
        name = chosen[0]
        source = options[name]
        if name == "key":
            return cls(lambda: key_of(options, "storage_options"), is_fixed=True)
        if name == "credentials_provider":
            return cls(lambda: key_of(_call_provider(source), name))
        return cls(lambda: key_of(_load_json(lambda: open(source, "rb"), source), source))

    def current(self, *, read_again: bool = False) -> OssKey:
        """The key in use. It is read again before it expires, now and then, and if `read_again`.

        If the source fails while the key in use is valid, a warning says so. Raises
        AccessDeniedError if there is no valid key.
        """
        # One thread reads it; the others wait for the result.
        with self._lock:
            if self._key is None or read_again or time.monotonic() >= self._read_next:
                try:
                    self._renew()
                except Exception as error:
                    if self._key is None or self._key.seconds_left() <= 0:
                        raise
                    log.warning(
                        "the OSS credentials could not be read again (%s); going on with those in "
                        "use",
                        type(error).__name__,
                    )
                    self._plan_next_read(self._key)
            assert self._key is not None
            return self._key

    def renew(self, refused: OssKey) -> bool:
        """Read the credentials again after the server refused a key. Returns whether they differ.

        Raises EndpointError, which is retried, if the source fails: its file may just be replaced.
        """
        with self._lock:
            # Otherwise another thread has read it.
            if self._key == refused:
                try:
                    self._renew()
                except Exception as error:
                    raise EndpointError(
                        f"oss://: the credentials were refused, and cannot be read again "
                        f"({type(error).__name__}: {error})"
                    ) from None
            return self._key != refused

    def _renew(self) -> None:
        self._key = self._read()
        self._plan_next_read(self._key)

    def _plan_next_read(self, key: OssKey) -> None:
        pause = min(READ_AGAIN_S, key.seconds_left() - MARGIN_S)
        self._read_next = time.monotonic() + max(MIN_PAUSE_S, pause)


def key_of(answer: Any, where: str) -> OssKey:
    """The key in the answer of a file, a service, a function or an SDK's provider.

    Raises AccessDeniedError.
    """
    expires = None
    if isinstance(answer, Mapping):
        if isinstance(answer.get("Credentials"), Mapping):  # as STS answers
            answer = answer["Credentials"]
        expires = _time_of(_field(answer, _EXPIRY_NAMES), where)
    key = _field(answer, _KEY_NAMES)
    secret = _field(answer, _SECRET_NAMES)
    if not key or not secret:
        raise AccessDeniedError(
            f"oss://: {where} gives no credentials; it must hold AccessKeyId and AccessKeySecret"
        )
    current = {
        "access_key_id": str(key).strip(),
        "access_key_secret": str(secret).strip(),
        "token": str(_field(answer, _TOKEN_NAMES) or "").strip(),
    }
    remember_secrets(current)
    return OssKey(**current, expires=expires)


def _field(answer: Any, names: tuple[str, ...]) -> Any:
    """The first field that has a value: an item of a mapping, or a getter or an attribute of an SDK's
    object.
    """
    for name in names:
        if isinstance(answer, Mapping):
            value = answer.get(name)
        else:
            getter = getattr(answer, f"get_{name}", None)
            value = getter() if callable(getter) else getattr(answer, name, None)
        if value:
            return value
    return None


def _time_of(value: Any, where: str) -> datetime | None:
    """The time in a datetime, in seconds since 1970, or in ISO 8601. Without a time zone it is UTC."""
    if not value:
        return None
    try:
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
        time_of_expiry = (
            value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        )
    except ValueError:
        raise ConfigError(
            f"oss://: {where} says the credentials expire at {value!r}, which is no time"
        ) from None
    if time_of_expiry.tzinfo is None:
        return time_of_expiry.replace(tzinfo=UTC)
    return time_of_expiry


def _call_provider(provider: Any) -> Any:
    """The answer of a function, or of a provider of Alibaba's SDKs."""
    for name in ("get_credentials", "get_credential"):
        method = getattr(provider, name, None)
        if callable(method):
            return method()
    if not callable(provider):
        raise ConfigError(
            "oss://: credentials_provider must be a function, or have a method get_credentials()"
        )
    return provider()


def _environment_key(bucket: str) -> OssKey:
    for key_name, secret_name, token_names in _ENVIRONMENT:
        key = os.environ.get(key_name)
        secret = os.environ.get(secret_name)
        if key and secret:
            token = _field(os.environ, token_names) or ""
            return OssKey(access_key_id=key, access_key_secret=secret, token=token)
    uri = os.environ.get(_URI)
    if uri:
        if not uri.startswith(("http://", "https://")):
            raise ConfigError(f"oss://: {_URI} is no http(s) address")
        answer = _load_json(lambda: urllib.request.urlopen(uri, timeout=SERVICE_TIMEOUT_S), _URI)
        return key_of(answer, _URI)
    raise AccessDeniedError(
        f"oss://{bucket}: no credentials found; set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET "
        f"(and OSS_SESSION_TOKEN for temporary ones), or give storage_options={{'key': ..., "
        f"'secret': ...}}, a 'credentials_file' or a 'credentials_provider', to a command by "
        f"--storage-file ({{'anon': True}} for a public bucket)"
    )


def _load_json(open_source: Callable[[], Any], where: str) -> Any:
    try:
        with open_source() as file:
            return parse_json(file.read())
    except (OSError, ValueError) as error:
        raise AccessDeniedError(
            f"oss://: {where}: the credentials cannot be read ({type(error).__name__})"
        ) from None
