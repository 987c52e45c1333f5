"""Credentials for Alibaba OSS: where they come from, and how they are renewed when they expire."""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from streammega.errors import AccessDeniedError, ConfigError, EndpointError
from streammega.storage.fork_lock import process_lock

log = logging.getLogger(__name__)

READ_AGAIN = timedelta(minutes=5)
"""Credentials without an expiry are read again after that.

Whoever replaces them need not restart the run.
"""
MARGIN = timedelta(minutes=2)
"""Credentials are read again that long before they expire."""
LEAST_PAUSE = 1.0
"""Seconds between two readings.

Credentials that are never renewed would be asked for with every request.
"""
ANSWER_WITHIN = 10
"""Seconds that a service of credentials is waited for: it is on the machine, or near it."""
_ENVIRONMENT = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", ("OSS_SESSION_TOKEN", "OSS_SECURITY_TOKEN")),
    (
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        ("ALIBABA_CLOUD_SECURITY_TOKEN",),
    ),
)
_URI = "ALIBABA_CLOUD_CREDENTIALS_URI"
_NAMES = {
    "access_key_id": ("key", "access_key_id", "AccessKeyId"),
    "access_key_secret": ("secret", "access_key_secret", "AccessKeySecret"),
    "token": ("token", "security_token", "SecurityToken"),
    "expires": ("expires", "expiration", "Expiration"),
}


@dataclass(frozen=True, kw_only=True)
class OssKey:
    """An AccessKey.

    With a token it is a temporary one, valid until `expires` where that is known.
    """

    access_key_id: str
    access_key_secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires: datetime | None = None


class OssCredentials:
    """A key in use, and how to read it again. May be used from several threads."""

    def __init__(self, read: Callable[[], OssKey], *, fixed: bool = False) -> None:
        self._read = read
        self._fixed = fixed
        self._lock = process_lock()
        self._key: OssKey | None = None
        self._read_at = 0.0

    @classmethod
    def of(cls, bucket: str, options: Mapping[str, Any]) -> OssCredentials | None:
        """Of the options, or else of the environment; None for `anon`. Reads nothing yet.

        Raises ConfigError for options that contradict each other or are half given.
        """
        if options.get("anon"):
            return None
        sources = ("key", "credentials_provider", "credentials_file")
        given = [name for name in sources if options.get(name)]
        if len(given) > 1:
            raise ConfigError(
                f"oss://{bucket}: storage_options hold {' and '.join(given)}; give one of them"
            )
        if bool(options.get("key")) != bool(options.get("secret")):
            raise ConfigError(
                f"oss://{bucket}: storage_options need both 'key' and 'secret', or neither; only "
                f"one of them was given"
            )
        if options.get("key"):
            key = key_of(options, "storage_options")
            return cls(lambda: key, fixed=True)
        provider = options.get("credentials_provider")
        if provider:
            return cls(lambda: key_of(_called(provider), "credentials_provider"))
        path = options.get("credentials_file")
        if path:
            return cls(lambda: key_of(_json_file(path), str(path)))
        return cls(lambda: _of_environment(bucket))

    def current(self) -> OssKey:
        """The key in use, read again when it is about to expire.

        Raises AccessDeniedError when there is none.
        """
        # One thread reads it again; the others wait for what it gets.
        with self._lock:
            if self._key is None or self._is_due():
                return self._read_again()
            return self._key

    def refresh(self) -> None:
        """Read the key again now, before something that cannot be repeated. Raises as `current`."""
        with self._lock:
            if self._key is None or not self._fixed:
                self._read_again()

    def renew(self, refused: OssKey) -> bool:
        """After the server has refused a key: whether there is another one now.

        Raises EndpointError, which is tried again, if that cannot be told: a file may just be
        written anew.
        """
        with self._lock:
            if self._key != refused:
                return True  # another thread has renewed it
            if self._fixed:
                return False
            try:
                self._renew()
            except Exception as error:
                raise EndpointError(
                    f"oss://: the credentials were refused, and cannot be read again "
                    f"({type(error).__name__}: {error})"
                ) from None
            return self._key != refused

    def _read_again(self) -> OssKey:
        """With a key in use that is still valid, a source that is gone for a while is no error."""
        try:
            self._renew()
        except Exception as error:
            if self._key is None or _is_over(self._key):
                raise
            log.warning(
                "the OSS credentials could not be read again (%s); going on with those in use",
                type(error).__name__,
            )
            # As if it had been read: else every request would try.
            self._read_at = time.monotonic()
        assert self._key is not None
        return self._key

    def _renew(self) -> None:
        self._key = self._read()
        self._read_at = time.monotonic()

    def _is_due(self) -> bool:
        assert self._key is not None
        age = time.monotonic() - self._read_at
        if self._fixed or age < LEAST_PAUSE:
            return False
        if age > READ_AGAIN.total_seconds():
            return True
        expires = self._key.expires
        return expires is not None and datetime.now(UTC) > expires - MARGIN


def key_of(given: Any, where: str) -> OssKey:
    """A key from what a file, a service, a function or an SDK's provider gives.

    Raises AccessDeniedError.
    """
    fields: dict[str, Any] = {}
    if isinstance(given, Mapping):
        inner = given.get("Credentials")  # so does STS answer
        answer = inner if isinstance(inner, Mapping) else given
        for field_name, names in _NAMES.items():
            fields[field_name] = _first(answer, names)
    else:
        fields["access_key_id"] = _attribute(given, "access_key_id")
        fields["access_key_secret"] = _attribute(given, "access_key_secret")
        fields["token"] = _attribute(given, "security_token")
    if not fields["access_key_id"] or not fields["access_key_secret"]:
        raise AccessDeniedError(
            f"oss://: {where} gives no credentials; it must hold AccessKeyId and AccessKeySecret"
        )
    return OssKey(
        access_key_id=str(fields["access_key_id"]).strip(),
        access_key_secret=str(fields["access_key_secret"]).strip(),
        token=str(fields["token"] or "").strip(),
        expires=_time_of(fields.get("expires"), where),
    )


def _first(answer: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """What stands under the first of some names that has something."""
    for name in names:
        if answer.get(name):
            return answer[name]
    return None


def _attribute(provided: Any, name: str) -> Any:
    """SDKs have methods or attributes, by version."""
    getter = getattr(provided, f"get_{name}", None)
    if callable(getter):
        return getter()
    return getattr(provided, name, None)


def _time_of(value: Any, where: str) -> datetime | None:
    """Of a datetime, seconds since the epoch, or ISO 8601 as Alibaba writes it."""
    if not value:
        return None
    if isinstance(value, datetime):
        return _in_utc(value)
    try:
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
        return _in_utc(datetime.fromisoformat(str(value)))
    except ValueError:
        raise ConfigError(
            f"oss://: {where} says the credentials expire at {value!r}, which is no time"
        ) from None


def _in_utc(time_of_expiry: datetime) -> datetime:
    """Of UTC, if it does not say of which zone it is."""
    if time_of_expiry.tzinfo is None:
        return time_of_expiry.replace(tzinfo=UTC)
    return time_of_expiry


def _called(provider: Any) -> Any:
    """What a function gives, or one of the providers of oss2 and alibabacloud_credentials."""
    for name in ("get_credentials", "get_credential"):
        method = getattr(provider, name, None)
        if callable(method):
            return method()
    if not callable(provider):
        raise ConfigError(
            "oss://: credentials_provider must be a function, or have a method get_credentials()"
        )
    return provider()


def _json_file(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise AccessDeniedError(
            f"oss://: {path}: the credentials cannot be read ({type(error).__name__})"
        ) from None


def _of_environment(bucket: str) -> OssKey:
    for key_name, secret_name, token_names in _ENVIRONMENT:
        key = os.environ.get(key_name)
        secret = os.environ.get(secret_name)
        if key and secret:
            token = _first(os.environ, token_names) or ""
            return OssKey(access_key_id=key, access_key_secret=secret, token=token)
    uri = os.environ.get(_URI)
    if uri:
        return key_of(_json_at(uri), _URI)
    raise AccessDeniedError(
        f"oss://{bucket}: no credentials found; set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET "
        f"(and OSS_SESSION_TOKEN for temporary ones), or pass storage_options={{'key': ..., "
        f"'secret': ...}}, a 'credentials_file' or a 'credentials_provider' ({{'anon': True}} for "
        f"a public bucket)"
    )


def _json_at(uri: str) -> Any:
    if not uri.startswith(("http://", "https://")):
        raise ConfigError(f"oss://: {_URI} is no http(s) address")
    try:
        with urllib.request.urlopen(uri, timeout=ANSWER_WITHIN) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise AccessDeniedError(f"oss://: {_URI} cannot be read ({type(error).__name__})") from None


def _is_over(key: OssKey) -> bool:
    return key.expires is not None and datetime.now(UTC) >= key.expires
