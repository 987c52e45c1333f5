"""Credentials for Alibaba OSS: where they come from, and how they are renewed when they expire."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from streammega.errors import AccessDeniedError, ConfigError, EndpointError

log = logging.getLogger(__name__)

READ_AGAIN = timedelta(minutes=5)
"""Credentials without an expiry are read again after that: whoever replaces them need not restart
the run.
"""
MARGIN = timedelta(minutes=2)
"""Credentials are read again that long before they expire."""
LEAST_PAUSE = 1.0
"""Seconds between two readings, so that credentials that are never renewed are not asked for with
every request.
"""
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
    """An AccessKey; with a token it is a temporary one, valid until `expires` where
    that is known.
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
        self._lock = threading.Lock()
        self._key: OssKey | None = None
        self._read_at = 0.0

    @classmethod
    def of(cls, bucket: str, options: Mapping[str, Any]) -> OssCredentials | None:
        """Of the options, or else of the environment; None for `anon`. Reads nothing yet.

        Raises ConfigError for options that contradict each other or are half given.
        """
        if options.get("anon"):
            return None
        given = [
            name
            for name in ("key", "credentials_provider", "credentials_file")
            if options.get(name)
        ]
        if len(given) > 1:
            raise ConfigError(
                f"oss://{bucket}: storage_options hold {' and '.join(given)}; give one of them"
            )
        if bool(options.get("key")) != bool(options.get("secret")):
            raise ConfigError(
                f"oss://{bucket}: storage_options need both 'key' and 'secret', or neither; only one of them was given"
            )
        if options.get("key"):
            key = key_of(options, "storage_options")
            return cls(lambda: key, fixed=True)
        if provider := options.get("credentials_provider"):
            return cls(lambda: key_of(_called(provider), "credentials_provider"))
        if path := options.get("credentials_file"):
            return cls(lambda: key_of(_json_file(path), str(path)))
        return cls(lambda: _of_environment(bucket))

    def current(self) -> OssKey:
        """The key in use, read again when it is about to expire.

        Raises AccessDeniedError when there is none.
        """
        with self._lock:
            return self._key if self._key is not None and not self._is_due() else self._read_again()

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
                    f"oss://: the credentials were refused, and cannot be read again ({type(error).__name__}: {error})"
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
        expires = self._key.expires
        return age > READ_AGAIN.total_seconds() or (
            expires is not None and datetime.now(timezone.utc) > expires - MARGIN
        )


def key_of(found: Any, where: str) -> OssKey:
    """A key from what a file, a service, a function or an SDK's provider gives.

    Raises AccessDeniedError.
    """
    if isinstance(found, Mapping):
        inner = found.get("Credentials")  # so does STS answer
        fields = {
            name: _first(inner if isinstance(inner, Mapping) else found, names)
            for name, names in _NAMES.items()
        }
    else:
        fields = {name: _attribute(found, name) for name in ("access_key_id", "access_key_secret")}
        fields["token"] = _attribute(found, "security_token")
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


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((found[name] for name in names if found.get(name)), None)


def _attribute(found: Any, name: str) -> Any:
    getter = getattr(found, f"get_{name}", None)
    return getter() if callable(getter) else getattr(found, name, None)


def _time_of(value: Any, where: str) -> datetime | None:
    """Of a datetime, seconds since the epoch, or ISO 8601 as Alibaba writes it."""
    if not value:
        return None
    try:
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, timezone.utc)
        found = (
            value
            if isinstance(value, datetime)
            else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        )
    except ValueError:
        raise ConfigError(
            f"oss://: {where} says the credentials expire at {value!r}, which is no time"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _called(provider: Any) -> Any:
    """What a function gives, or one of the providers of oss2 and alibabacloud_credentials."""
    for name in ("get_credentials", "get_credential"):
        if callable(method := getattr(provider, name, None)):
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
    for key, secret, tokens in _ENVIRONMENT:
        if os.environ.get(key) and os.environ.get(secret):
            token = next((os.environ[name] for name in tokens if os.environ.get(name)), "")
            return OssKey(
                access_key_id=os.environ[key], access_key_secret=os.environ[secret], token=token
            )
    if uri := os.environ.get(_URI):
        return key_of(_json_at(uri), _URI)
    raise AccessDeniedError(
        f"oss://{bucket}: no credentials found; set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET (and OSS_SESSION_TOKEN for "
        f"temporary ones), or pass storage_options={{'key': ..., 'secret': ...}}, a 'credentials_file' or a "
        f"'credentials_provider' ({{'anon': True}} for a public bucket)"
    )


def _json_at(uri: str) -> Any:
    if not uri.startswith(("http://", "https://")):
        raise ConfigError(f"oss://: {_URI} is no http(s) address")
    try:
        with urllib.request.urlopen(uri, timeout=10) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise AccessDeniedError(f"oss://: {_URI} cannot be read ({type(error).__name__})") from None


def _is_over(key: OssKey) -> bool:
    return key.expires is not None and datetime.now(timezone.utc) >= key.expires
