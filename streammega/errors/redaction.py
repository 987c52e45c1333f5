"""Secrets are kept out of messages, logs, reports, and files with the places of data.

What a URL or a header carries (a password, a signature, a token) is known by its form: `redact_urls`,
for names that are written to files and shown by objects. Other secrets are known by their value:
every StorageConfig remembers those of its options, every source of credentials those that it gives,
and those of the environment are read when a message is made. `redact` takes out both kinds, where
messages are made and shown: errors, records of logs, reports of commands. Other code need not call it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
SHORTEST = 4
"""Characters of the shortest value that is hidden. Shorter ones are no secrets, and hiding them would
remove half of a message.
"""
LONG = 8
"""Characters from which on a value is hidden within words too. A shorter one may well be a part of
other words.
"""
MAX_KNOWN = 4096
"""Spellings of secrets that are remembered, the newest: some MB at most, in a process that renews its
credentials for weeks. A failed request remembers those of its options again.
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
_CLIENTS = ("AWS_", "OSS_", "ALIBABA_CLOUD_", "AZURE_", "GOOGLE_", "HF_")
"""Beginnings of the variables that clients of stores read."""
_PLACES = (
    *("_FILE", "_URI", "_URL", "_DIR", "_PATH", "_NAME", "_CREDENTIALS"),
    *("_HOST", "_MODE", "_PREFERENCE"),
)
"""Ends of variables that name a place or a choice, and hold no secret themselves."""
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
        "test",
        "testing",
    )
)
"""Values of `token` and `auth` that are not secrets, and the public keys of LocalStack and moto: these
are names of buckets and folders too.
"""
_known: list[str] = []
"""Spellings of the secrets of this process, the oldest first. A forked child has its parent's. Calls of
a list are atomic, so no lock could be held while a process forks.
"""
_environment: dict[Any, Any] = {}
"""The environment whose secrets are remembered."""


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


def redact(text: str) -> str:
    """`text` without the secrets of URLs, and without the known ones in any spelling.

    For messages, never for a name that is used: a secret may be a part of it.
    """
    global _environment
    # Two dictionaries are compared in two microseconds. Reading all variables takes ten times as long.
    environment = getattr(os.environ, "_data", os.environ)
    if environment != _environment:
        latest = dict(environment)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_CLIENTS) and not name.endswith(_PLACES)
        }
        remember_secrets(variables)
        _environment = latest
    text = redact_urls(text)
    # Longer ones first: they may contain shorter ones.
    for form in sorted(_known[:], key=len, reverse=True):
        if len(form) >= LONG:
            text = text.replace(form, HIDDEN)
        elif form in text:
            text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", HIDDEN, text)
    return text


def remember_secrets(options: Mapping[str, Any]) -> None:
    """Hide the secrets of storage options, or of credentials by such names, in all later messages."""
    for value in _secrets(options):
        if value not in _known:
            _known.extend(_forms(value))
    if len(_known) > MAX_KNOWN:
        del _known[:-MAX_KNOWN]
        _environment.clear()  # its secrets may have been the oldest


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


def _forms(value: str) -> dict[str, None]:
    """The spellings of a value: first as it is, then those in URLs and in JSON that differ."""
    if value.isalnum():
        return {value: None}  # the same in all spellings
    in_json = json.dumps(value).removeprefix('"').removesuffix('"')
    in_urls = (quote(value), quote(value, safe=""), quote_plus(value))
    return dict.fromkeys((value, *in_urls, in_json))


def redacted_repr(settings: Any) -> str:
    """The repr of a dataclass, without secrets."""
    shown: list[str] = []
    for item in fields(settings):
        if item.repr:
            shown.append(f"{item.name}={getattr(settings, item.name)!r}")
    return redact(f"{type(settings).__name__}({', '.join(shown)})")


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
