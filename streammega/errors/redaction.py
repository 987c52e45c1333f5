"""Secrets kept out of what people read: messages, logs, reports, and files that say where data
lies.

What a URL carries (a password, a signature, a token) is known by its form: `redact_urls`, which
every error applies to its own message. What `storage_options` carry is known by their names:
`redact`, where a library's words enter a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
SHORTEST = 4
"""Characters from which on a value is looked for: shorter ones would blank out half of a message,
and are no secrets.
"""

_USER_INFO = re.compile(
    r""":/{2,3}(
        [^/?\#\s]*                          # user:password, up to the last @ of the host, as
                                            # urllib splits it
      | [^/?\#\s\[:@]+:(?!\d+\b)[^\s@]*     # a password with slashes in it; a number would be
                                            # a port
    )@""",
    re.X,
)
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
"""Of these, what stands before the @ is a container's name."""
_SIGNATURES = (
    r"sig|[\w-]*signature|x-(?:amz|goog|oss)-(?:credential|security-token)"
    r"|AccountKey|(?:OSS|AWS)AccessKeyId|GoogleAccessId"
)
_SECRET_WORDS = r"token|secret|passw|credential|api-?_?key|access-?_?key|auth|session"
_QUERY = re.compile(
    rf"""((?:(?<![\w-])(?:{_SIGNATURES})
           |(?<=[?&;])(?:[\w.-]*(?:{_SECRET_WORDS})[\w.-]*|policy|key-pair-id))=)
        [^&;\s'"<>]*[^&;\s'"<>:,.)]""",
    re.I | re.X,
)
_WEB_QUERY = re.compile(r"""(https?://[^\s?'"<>]+)\?[^\s'"<>)\]]*""")
_SECRET_NAME = re.compile(
    rf"{_SECRET_WORDS}|signature|account_key|private_key|passphrase|pwd|cookie"
    r"|connection_string|\bsas\b|sas_|_sas|^key$",
    re.I,
)
_PUBLIC = frozenset(
    (
        "type",
        "project_id",
        "client_email",
        "client_id",
        "universe_domain",
        "token_uri",
        "auth_uri",
        "quota_project_id",
    )
)
"""Of a mapping of credentials, what is none itself and may well be a bucket's or project's name."""
_KEYWORDS = frozenset(
    (
        "anon",
        "anonymous",
        "cloud",
        "cache",
        "browser",
        "google_default",
        "default",
        "true",
        "false",
        "none",
    )
)
"""What `token` and `auth` may say instead of a secret."""


def redact_urls(text: str) -> str:
    """`text` without the passwords, signatures and tokens of URLs in it."""
    # asked first, which is quick: most texts have neither
    if "://" in text:
        text = _USER_INFO.sub(_without_user, text)
    if "=" in text:
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
    return text


def _without_user(found: re.Match[str]) -> str:
    before = found.string[: found.start()]
    if before.endswith(_CONTAINER_SCHEMES) and ":" not in found[1]:
        return found[0]
    return f"://{HIDDEN}@"


def redact(text: str, options: Mapping[str, Any]) -> str:
    """`text` without secrets of URLs in it, and without the values of secret options, however they
    are written.
    """
    return redaction_of(options)(text)


def redaction_of(options: Mapping[str, Any]) -> Callable[[str], str]:
    """`redact` for many texts and the same options, whose secrets are looked for once."""
    forms: list[str] = []
    # a longer one may contain a shorter one
    for value in sorted(set(_secrets(options)), key=len, reverse=True):
        forms += _forms(value)

    def redacted(text: str) -> str:
        """A text without secrets."""
        text = redact_urls(text)
        for form in forms:
            text = text.replace(form, HIDDEN)
        return text

    return redacted


def _secrets(options: Mapping[Any, Any], secret: bool = False) -> Iterator[str]:
    """Secret values of options; `secret`: the options are themselves the value of a secret one."""
    for name, value in options.items():
        is_named_so = bool(_SECRET_NAME.search(str(name)))
        is_part_of_one = secret and name not in _PUBLIC
        yield from _leaves(value, is_named_so or is_part_of_one)


def _leaves(value: Any, secret: bool) -> Iterator[str]:
    """Secret texts within the value of an option; `secret`: those that no mapping says more of."""
    if isinstance(value, Mapping):
        yield from _secrets(value, secret)
    elif isinstance(value, (bytes, bytearray)):
        yield from _leaves(bytes(value).decode(errors="replace"), secret)
    elif isinstance(value, str):
        if secret:
            yield from _secret_lines(value)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _leaves(item, secret)


def _secret_lines(value: str) -> Iterator[str]:
    """The lines of a secret, of which a message may show one: those of a key, without the marks
    around it.
    """
    for line in value.splitlines():
        if line.startswith("-----"):
            continue
        text = line.strip()
        if len(text) >= SHORTEST and text.lower() not in _KEYWORDS:
            yield text


def _forms(value: str) -> set[str]:
    """As it is, as URLs spell it, and as JSON does."""
    if value.isalnum():
        return {value}  # which all of them leave as it is
    in_json = json.dumps(value).removeprefix('"').removesuffix('"')
    return {value, quote(value), quote(value, safe=""), quote_plus(value), in_json}


def redacted_repr(settings: Any) -> str:
    """The repr of a dataclass, without the secrets of URLs in its fields."""
    shown: list[str] = []
    for item in fields(settings):
        if item.repr:
            shown.append(f"{item.name}={getattr(settings, item.name)!r}")
    return redact_urls(f"{type(settings).__name__}({', '.join(shown)})")


def split_query(url: str) -> tuple[str, str]:
    """A URL without its query, and the query with its question mark; of http(s) only.

    The query of a presigned URL is a secret as a whole: it is for reading, and never shown.
    """
    if not url.startswith(("http://", "https://")):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def without_queries(text: str) -> str:
    """A text without the queries of http(s) URLs in it."""
    return _WEB_QUERY.sub(r"\1", text)
