"""Where the requests of a URL go, and what signs them. No request is sent, and no secret returned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError
from streammega.storage.backends.oss import oss_endpoint
from streammega.storage.backends.oss_credentials import OssCredentials
from streammega.storage.backends.s3_options import (
    ENDPOINT_OPTIONS,
    ENDPOINT_VARIABLES,
    s3_credentials,
    s3_endpoint,
    s3_place,
)
from streammega.storage.open import scheme_of

ANONYMOUS = "anonymous"
OPTIONS = "storage_options"
_ENDPOINT_VARIABLES = {**ENDPOINT_VARIABLES, "oss": (*ENDPOINT_VARIABLES["oss"], "OSS_REGION")}
_DEFAULT_ENDPOINTS = {
    "gs": "https://storage.googleapis.com",
    "az": "https://{account}.blob.core.windows.net",
}
_ACCOUNT_VARIABLES = {
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
    ),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLIENT_ID"),
}
_SOURCES = {
    "env": "environment variables",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "iam-role": "the role of this instance",
    "container-role": "the role of this container",
    "assume-role": "a role that the profile names",
    "assume-role-with-web-identity": "a web identity",
    "sso": "single sign-on",
    "custom-process": "the credential_process of the profile",
}
"""botocore's names of its sources."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where requests go. endpoint: empty where a driver of fsspec decides, and for local files.

    bucket_url: the endpoint with the bucket, as a path or in the host's name. source: where the
    endpoint comes from. region: of signatures; empty where there is none.
    """

    endpoint: str
    bucket_url: str
    source: str
    region: str = ""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What signs requests. source: where it comes from. expires: None where that is not known.

    is_renewed: whether others are read from the source when these expire.
    """

    source: str
    is_temporary: bool = False
    is_renewed: bool = True
    expires: datetime | None = None


def connection_of(url: str, config: StorageConfig) -> Connection:
    """Where the requests of a URL go. Raises ConfigError."""
    options = config.for_url(url).storage_options
    scheme = scheme_of(url)
    root = url.partition("://")[2].partition("/")[0]
    variables = [name for name in _ENDPOINT_VARIABLES.get(scheme, ()) if os.environ.get(name)]
    source = variables[0] if variables else "the cloud's default"
    endpoint = bucket_url = region = ""
    if scheme == "s3":
        configured = s3_endpoint(root, options)
        place = s3_place(root, options)
        region = place.region
        endpoint = place.endpoint or f"https://s3.{region}.amazonaws.com"
        if (options.get("client_kwargs") or {}).get("endpoint_url") or options.get("endpoint_url"):
            source = OPTIONS
        elif not configured:  # variables may be ignored
            source = "the cloud's default"
        elif not variables:
            source = "the profile of AWS"
        in_host = place.is_virtual or not place.endpoint
        bucket_url = _with_bucket(endpoint, root) if in_host else f"{endpoint.rstrip('/')}/{root}"
    elif scheme == "oss":
        of_oss = oss_endpoint(root, options, os.environ)
        if any(options.get(name) for name in ("endpoint", "endpoint_url", "region")):
            source = OPTIONS
        bucket_url = of_oss.bucket_url(root)
        endpoint, region = of_oss.url, of_oss.region
    elif scheme in _DEFAULT_ENDPOINTS:
        chosen = options.get("endpoint_url") or options.get(ENDPOINT_OPTIONS[scheme])
        account = options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if scheme == "az" and not (chosen or account):
            raise ConfigError(
                f"{url}: no storage account; set account_name or AZURE_STORAGE_ACCOUNT_NAME"
            )
        endpoint = str(chosen or _DEFAULT_ENDPOINTS[scheme].format(account=account))
        source = OPTIONS if chosen else source
        bucket_url = f"{endpoint.rstrip('/')}/{root}"
    elif scheme in ("http", "https"):
        endpoint = bucket_url = f"{scheme}://{root}"
        source = "the URL"
    else:
        source = ""
    return Connection(
        endpoint=_without_user(endpoint),
        bucket_url=_without_user(bucket_url),
        source=source,
        region=region,
    )


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _with_bucket(endpoint: str, bucket: str) -> str:
    parts = urlsplit(endpoint)
    return parts._replace(netloc=f"{bucket}.{parts.netloc.rpartition('@')[2]}").geturl()


def credentials_of(url: str, config: StorageConfig) -> Credentials | None:
    """What signs the requests of a URL; None where that is not known.

    Raises AccessDeniedError if there are no credentials, ConfigError.
    """
    options = config.for_url(url).storage_options
    scheme = scheme_of(url)
    root = url.partition("://")[2].partition("/")[0]
    if options.get("anon") or (scheme == "gs" and options.get("token") == "anon"):
        return Credentials(source=ANONYMOUS)
    if scheme in ("http", "https"):
        return Credentials(source="the URL" if "@" in root else ANONYMOUS)
    if scheme == "oss":
        return _of_oss(root, options)
    if scheme == "s3":
        if options.get("key") or options.get("username"):
            return Credentials(
                source=OPTIONS, is_temporary=bool(options.get("token")), is_renewed=False
            )
        return _of_botocore(root, options)
    if scheme in _ACCOUNT_VARIABLES:
        if any(
            options.get(name) for name in ("token", "account_key", "sas_token", "connection_string")
        ):
            return Credentials(source=OPTIONS)
        variables = [name for name in _ACCOUNT_VARIABLES[scheme] if os.environ.get(name)]
        return Credentials(source=variables[0]) if variables else None
    return None


def _of_botocore(bucket: str, options: Mapping[str, Any]) -> Credentials:
    credentials = s3_credentials(bucket, options)
    try:
        frozen = credentials.get_frozen_credentials()
    except Exception as error:  # of the service, file or program that they come from
        raise AccessDeniedError(
            f"s3://{bucket}: the credentials could not be read from {_source(credentials)}; check "
            f"it ({type(error).__name__}: {error})"
        ) from None
    is_fixed = credentials.method in ("env", "shared-credentials-file", "config-file")
    return Credentials(
        source=_source(credentials),
        is_temporary=bool(frozen.token),
        is_renewed=not is_fixed,
        # botocore has no public name for it
        expires=getattr(credentials, "_expiry_time", None),
    )


def _source(credentials: Any) -> str:
    method = str(credentials.method)
    return _SOURCES.get(method, method)


def _of_oss(bucket: str, options: Mapping[str, Any]) -> Credentials:
    source = OssCredentials.from_options(bucket, options)
    assert source is not None, "anon was handled"
    key = source.current()
    named = [
        name for name in ("key", "credentials_file", "credentials_provider") if options.get(name)
    ]
    is_fixed = not named or named == ["key"]
    return Credentials(
        source=(OPTIONS if named == ["key"] else named[0]) if named else "environment variables",
        is_temporary=bool(key.token),
        is_renewed=not is_fixed,
        expires=key.expires,
    )
