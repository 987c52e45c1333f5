"""Secrets are kept out of messages, logs, reports, and files with the places of data.

What a URL or a header carries (a password, a signature, a token) is known by its form: `redact_urls`,
which every error applies to its own message. What `storage_options` carry is known by their names:
`redact`. `redact_answer` does so for the variables of clients too, where the words of a server or
of a library enter a message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
SHORTEST = 4
"""Characters of the shortest value that is hidden. Shorter ones are no secrets, and hiding them would
remove half of a message.
"""

# Repeats are bounded: names in messages come from files, and may look like secrets throughout. A search
# that went on to the end of such a name from each of its places took minutes.
_USER_INFO = re.compile(
    r""":/{2,3}(
        [^/?\#\s]*                          # user:password, up to the last @ of the host, as
                                            # urllib splits it
      | [^/?\#\s\[:@]{1,500}:(?!\d+\b)[^\s@]{0,2000}   # a password with slashes in it; a number would be
                                            # a port
    )@""",
    re.X,
)
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
"""In URLs of these schemes, the text before the @ is the name of a container."""
_SIGNATURES = (
    r"sig|[\w-]{0,64}signature|(?:x-(?:amz|goog|oss)-)?credential|x-(?:amz|goog|oss)-security-token"
    r"|AccountKey|(?:OSS|AWS)AccessKeyId|GoogleAccessId"
)
_SECRET_WORDS = r"token|secret|passw|credential|api-?_?key|access-?_?key|auth|session"
_QUERY = re.compile(
    rf"""((?:(?<![\w-])(?:{_SIGNATURES})
           |(?<=[?&;])(?:[\w.-]{{0,64}}?(?:{_SECRET_WORDS})[\w.-]{{0,64}}|policy|key-pair-id))=)
        [^&;\s'"<>]*[^&;\s'"<>:,.)]""",
    re.I | re.X,
)
_HEADER = re.compile(
    r"""((?:authorization|cookie|x-[\w-]{0,64}-token)['"]?\s*:\s*b?['"]?(?:(?:bearer|basic|oss|aws)\s+)?)
        [^\s'"<>,]+""",
    re.I | re.X,
)
_ELEMENT = re.compile(r"(<\w{0,64}(?:token|secret)[\w-]{0,64}>)[^<]+", re.I)
"""In answers: S3 repeats a token that has expired."""
_PROCESS = re.compile(r"(credentials from custom-process: ).*", re.S)
"""botocore's words for a `credential_process` that failed, before all that it has printed."""
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
"""Fields of a mapping of credentials that are not secret. Some may be names of buckets or projects."""
_CLIENTS = ("AWS_", "OSS_", "ALIBABA_CLOUD_", "AZURE_", "GOOGLE_")
"""Beginnings of the variables that clients of stores read."""
_PLACES = ("_FILE", "_URI", "_URL", "_DIR", "_PATH", "_NAME", "_CREDENTIALS")
"""Ends of variables that name a place, and hold no secret themselves."""
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
"""Values of `token` and `auth` that are not secrets."""


def redact_urls(text: str) -> str:
    """`text` without the passwords, signatures and tokens of URLs and headers in it."""
    # These checks are quick, and most texts have none.
    if "://" in text:
        text = _USER_INFO.sub(_without_user, text)
    if "=" in text:
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
    if ":" in text:
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
    if "<" in text:
        text = _ELEMENT.sub(rf"\1{HIDDEN}", text)
    if "custom-process: " in text:
        text = _PROCESS.sub(rf"\1{HIDDEN}", text)
    return text


def _without_user(match: re.Match[str]) -> str:
    before = match.string[: match.start()]
    if before.endswith(_CONTAINER_SCHEMES) and ":" not in match[1]:
        return match[0]
    return f"://{HIDDEN}@"


def redact(text: str, options: Mapping[str, Any]) -> str:
    """`text` without the secrets of URLs, and without the values of secret options in any spelling."""
    return redaction_of(options)(text)


def redact_answer(text: str, options: Mapping[str, Any]) -> str:
    """`redact`, and without the secrets that the clients of stores take from the environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_CLIENTS) and not name.endswith(_PLACES)
    }
    return redact(text, {**environment, **options})


def redaction_of(options: Mapping[str, Any]) -> Callable[[str], str]:
    """`redact` for many texts and the same options, whose secrets are collected once."""
    forms: list[str] = []
    # Longer ones first: they may contain shorter ones.
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
    """The secret values of options. secret: the options are the value of a secret option."""
    for name, value in options.items():
        is_named_so = bool(_SECRET_NAME.search(str(name)))
        is_part_of_one = secret and name not in _PUBLIC
        yield from _leaves(value, is_named_so or is_part_of_one)


def _leaves(value: Any, secret: bool) -> Iterator[str]:
    """The secret texts within the value of an option. secret: the option is secret."""
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
    """The lines of a secret, without the marks around a key: a message may contain one of them."""
    for line in value.splitlines():
        if line.startswith("-----"):
            continue
        text = line.strip()
        if len(text) >= SHORTEST and text.lower() not in _KEYWORDS:
            yield text


def _forms(value: str) -> set[str]:
    """The spellings of a value: as it is, in URLs, and in JSON."""
    if value.isalnum():
        return {value}  # the same in all spellings
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
    """A URL of http(s) without its query, and the query with its question mark.

    The whole query of a presigned URL is secret: it is used for reading, and never shown.
    """
    if not url.startswith(("http://", "https://")):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def without_queries(text: str) -> str:
    """A text without the queries of http(s) URLs in it."""
    return _WEB_QUERY.sub(r"\1", text)
