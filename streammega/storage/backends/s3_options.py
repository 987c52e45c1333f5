"""`storage_options` in the fsspec manner, translated for obstore."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError
from streammega.errors.logs import get_logger
from streammega.errors.redaction import remember_secrets
from streammega.storage.http_errors import no_renewal
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)
CONNECT_TIMEOUT = 10.0
"""Seconds, or `request_timeout` if that is less: a server accepts connections at once."""
ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "oss": ("OSS_ENDPOINT",),
}
"""Environment variables that name an endpoint, in the order in which clients take them."""
CREDENTIALS_LAST = timedelta(minutes=10)
"""The expiry that obstore is given. It asks again five minutes before: they may have been renewed."""
S3_OPTIONS = frozenset(
    (
        "anon",
        "client_kwargs",
        "config_kwargs",
        "default_block_size",
        "endpoint_url",
        "key",
        "password",
        "profile",
        "requester_pays",
        "secret",
        "token",
        "use_listings_cache",
        "use_ssl",
        "username",
    )
)
OSS_OPTIONS = frozenset(
    (
        "anon",
        "client_kwargs",
        "credentials_file",
        "credentials_provider",
        "default_block_size",
        "default_cache_type",
        "endpoint",
        "endpoint_url",
        "key",
        "region",
        "secret",
        "token",
        "use_listings_cache",
    )
)
CLIENT_KWARGS = frozenset(("endpoint_url", "region_name", "verify"))
_S3_FOLLOWED = ("addressing_style", "use_accelerate_endpoint", "us_east_1_regional_endpoint")
_HOST_KWARGS = ("use_dualstack_endpoint", "use_fips_endpoint")
"""Keys of config_kwargs that say where requests go: those within `s3`, and others."""
_HOST_VARIABLES = (
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_USE_FIPS_ENDPOINT",
)
_HOST_SETTINGS = ("ignore_configured_endpoint_urls", "s3", *_HOST_KWARGS)
"""Settings of a profile that say where requests go, as these variables do. obstore knows none of them."""
_PLAIN_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!iso)[a-z-]+-\d+")
"""Regions whose hosts end in amazonaws.com."""
_PLAIN_BUCKET = re.compile(r"(?!.*(--x-s3|-s3alias|--op-s3|--xa-s3)$)[^:]*")
"""Names of buckets, and not of directory buckets (S3 Express), access points and Outposts."""


def check_no_settings(url: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where storage_options hold a setting of StorageConfig."""
    settings = sorted(set(options) & {field.name for field in fields(StorageConfig)})
    if settings:
        raise ConfigError(
            f"{url}: storage_options (--storage) hold {', '.join(settings)}, which is a setting of "
            f"the storage itself; write it above [storage_options], in a file for --storage-file"
        )


def s3_arguments(bucket: str, config: StorageConfig) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.S3Store`, from s3fs-style storage options.

    Credentials: the explicit ones, or none with `anon`, or botocore's provider chain (environment,
    profile, container, instance role), refreshed by that chain when they expire: the same that s3fs
    uses. Raises ConfigError for an option that neither knows, AccessDeniedError when there are no
    credentials.
    """
    options = dict(config.storage_options)
    check_no_settings(f"s3://{bucket}", options)
    unknown = sorted(set(options) - S3_OPTIONS)
    if unknown:
        raise ConfigError(
            f"s3://{bucket}: storage_options hold {', '.join(unknown)}, which the obstore transport does "
            f"not know; it knows {', '.join(sorted(S3_OPTIONS))}. Correct the name, or set "
            f"transport='fsspec' to hand it to s3fs"
        )
    client_kwargs = dict(options.get("client_kwargs") or {})
    config_kwargs = dict(options.get("config_kwargs") or {})
    of_s3 = dict(config_kwargs.pop("s3", None) or {})
    others = [name for name in config_kwargs if name not in _HOST_KWARGS]
    others += [f"s3.{name}" for name in of_s3 if name not in _S3_FOLLOWED]
    # no error: s3fs may follow them, where obstore cannot serve a bucket
    if others:
        names = ", ".join(sorted(others))
        text = (
            "config_kwargs of storage_options hold %s, which the obstore transport does not follow; "
            "leave it out, or set transport='fsspec'"
        )
        warn_once(log, names, text, names)
    settings = _late_session(options, with_handlers=False)
    place = s3_place(bucket, options, settings)
    endpoint = place.endpoint
    store: dict[str, Any] = {"region": place.region}
    if place.is_virtual:
        store["virtual_hosted_style_request"] = True
    if endpoint:
        bucket_endpoint = _with_bucket(endpoint, bucket) if place.is_virtual else endpoint
        store["endpoint"] = bucket_endpoint
        # In obstore, that of the environment goes before `endpoint`.
        store["aws_endpoint_url_s3"] = bucket_endpoint
    if options.get("requester_pays"):
        store["request_payer"] = True
    arguments: dict[str, Any] = {
        "config": store,
        "client_options": client_options(
            config, endpoint or "", {"verify": _ca_bundle(endpoint, settings)} | client_kwargs
        ),
    }
    if options.get("anon"):
        store["skip_signature"] = True
    else:
        session = _late_session(options, with_handlers=True)
        arguments["credential_provider"] = _credential_provider(bucket, options, session)
    return arguments


def client_options(
    config: StorageConfig, endpoint: str, client_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of obstore's HTTP client: timeouts, certificates, and plain http if the endpoint has it."""
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=config.request_timeout),
        "read_timeout": timedelta(seconds=config.tuning.read_timeout),
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT, config.request_timeout)),
        "allow_http": endpoint.startswith("http://"),
    }
    unknown = sorted(set(client_kwargs) - CLIENT_KWARGS)
    if unknown:
        raise ConfigError(
            f"client_kwargs of storage_options hold {', '.join(unknown)}, which the obstore transport "
            f"does not know; it knows {', '.join(sorted(CLIENT_KWARGS))}. Correct the name, or set "
            f"transport='fsspec'"
        )
    verify = client_kwargs.get("verify")
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        try:
            client["root_certificate"] = Path(verify).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{verify}: the certificates to trust cannot be read ({error.strerror}); correct "
                f"client_kwargs = {{verify = ...}} of storage_options, AWS_CA_BUNDLE or ca_bundle of "
                f"the profile"
            ) from None
    return client


def _with_bucket(endpoint: str, bucket: str) -> str:
    """https://oss-cn-x.aliyuncs.com -> https://bucket.oss-cn-x.aliyuncs.com, once."""
    scheme, host = endpoint.split("://", 1)
    if host.startswith(f"{bucket}."):
        return endpoint
    return f"{scheme}://{bucket}.{host}"


def _late_session(options: Mapping[str, Any], *, with_handlers: bool) -> Callable[[], Any]:
    """A function that returns botocore's session, and makes it at the first call.

    Importing botocore takes longer than a first batch, and most options need no session.
    with_handlers: for clients, as those that get credentials; they take most of a session's time.
    """

    @cache
    def session() -> Any:
        import botocore.session

        return botocore.session.Session(
            profile=options.get("profile"), include_builtin_handlers=with_handlers
        )

    return session


class S3Place(NamedTuple):
    """Where the requests to a bucket go. endpoint: None for that of the region. is_virtual: whether hosts
    begin with the bucket, as "virtual" of addressing_style says. region: of signatures.
    """

    endpoint: str | None
    is_virtual: bool
    region: str


def s3_place(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any] | None = None
) -> S3Place:
    """Where requests go by the options and the user's AWS configuration: to the same host as botocore's, and
    so those of the AWS command line.

    Raises ConfigError for settings that do not fit each other, or that obstore cannot follow.
    """
    session = session or _late_session(options, with_handlers=False)
    endpoint = s3_endpoint(bucket, options, session)
    region = s3_region(options, endpoint, session)
    if _asks_botocore(bucket, options, endpoint, region, session):
        return _place_of_botocore(bucket, options, endpoint, region)
    of_s3 = (options.get("config_kwargs") or {}).get("s3") or {}
    return S3Place(endpoint, of_s3.get("addressing_style") == "virtual", region)


def s3_endpoint(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any] | None = None
) -> str | None:
    """The endpoint in the options, or else in the user's AWS configuration, if there is one.

    Raises ConfigError, without the endpoint: it may hold a password. Clients would end the process,
    or repeat it.
    """
    client_kwargs = options.get("client_kwargs") or {}
    endpoint = options.get("endpoint_url") or client_kwargs.get("endpoint_url")
    if not endpoint:
        endpoint = _endpoint_of(session or _late_session(options, with_handlers=False))
    _check_endpoint(f"s3://{bucket}", endpoint)
    return endpoint


def s3_region(
    options: Mapping[str, Any],
    endpoint: str | None,
    session: Callable[[], Any] | None = None,
) -> str:
    """The region of signatures and default endpoints: the options', or else the user's."""
    region = (options.get("client_kwargs") or {}).get("region_name")
    # Only signatures and default endpoints need a region.
    if not region and not (endpoint and options.get("anon")):
        session = session or _late_session(options, with_handlers=False)
        region = os.environ.get("AWS_DEFAULT_REGION") or _profile_of(session).get("region")
    return str(region or "us-east-1")


def _check_endpoint(url: str, endpoint: str | None) -> None:
    if endpoint and not is_http_url(endpoint):
        raise ConfigError(
            f"{url}: the endpoint is no URL like 'https://host:9000'; write it so, and in its "
            f"password %2F for '/', %40 for '@' and so on"
        )


def is_http_url(text: str) -> bool:
    """Whether clients accept it as a URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        return False


def _endpoint_of(session: Callable[[], Any]) -> str | None:
    """The endpoint in the user's AWS configuration, if there is one."""
    profile = _profile_of(session)
    ignores = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    if str(ignores or profile.get("ignore_configured_endpoint_urls")).lower() == "true":
        return None
    for name in ENDPOINT_VARIABLES["s3"]:
        if os.environ.get(name):
            return os.environ[name]
    services: Any = {}
    if profile.get("services"):
        services = session().full_config.get("services", {}).get(profile["services"], {})
    of_s3 = services.get("s3")
    of_service = of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None
    endpoint = of_service or profile.get("endpoint_url")
    return str(endpoint) if endpoint else None


def _profile_of(session: Callable[[], Any]) -> Mapping[str, Any]:
    """The settings of the user's profile. Empty where there is none: that is reported when credentials are
    looked up. Without the files of profiles botocore is not imported.
    """
    paths = (
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    )
    if not any(os.path.exists(os.path.expanduser(path)) for path in paths):
        return {}
    try:
        profile: Mapping[str, Any] = session().get_scoped_config()
    except Exception:
        return {}
    return profile


def _ca_bundle(endpoint: str | None, session: Callable[[], Any]) -> str | None:
    """The certificates that the user's AWS configuration trusts; None: those of the system."""
    if endpoint and endpoint.startswith("http://"):
        return None
    path = os.environ.get("AWS_CA_BUNDLE") or _profile_of(session).get("ca_bundle")
    return str(path) if path else None


def _asks_botocore(
    bucket: str,
    options: Mapping[str, Any],
    endpoint: str | None,
    region: str,
    session: Callable[[], Any],
) -> bool:
    """Whether a setting, a name or a region says where requests go that obstore does not know."""
    config_kwargs = options.get("config_kwargs") or {}
    of_s3 = dict(config_kwargs.get("s3") or {})
    if of_s3.get("addressing_style") in ("path", "virtual"):
        del of_s3["addressing_style"]  # that one it knows
    return (
        any(config_kwargs.get(name) for name in _HOST_KWARGS)
        or any(of_s3.get(name) for name in _S3_FOLLOWED)
        or any(os.environ.get(name) for name in _HOST_VARIABLES)
        or any(name in _profile_of(session) for name in _HOST_SETTINGS)
        or not _PLAIN_BUCKET.fullmatch(bucket)
        or not (endpoint or _PLAIN_REGION.fullmatch(region))
    )


def _place_of_botocore(
    bucket: str, options: Mapping[str, Any], endpoint: str | None, region: str
) -> S3Place:
    """Where botocore's requests to a bucket go: it makes one, which is not sent.

    Raises ConfigError for what botocore refuses, and for what obstore cannot do.
    """
    import botocore.config
    import botocore.exceptions

    if bucket.startswith("arn:"):
        raise ConfigError(
            f"s3://{bucket}: ARNs are not taken as buckets; give the alias of the access point, which "
            f"the console and `aws s3control get-access-point` show"
        )
    if bucket.endswith("--x-s3"):
        raise ConfigError(
            f"s3://{bucket}: S3 Express has sessions of its own, which the obstore transport was never "
            f"tried with; set transport='fsspec'"
        )
    config_kwargs = dict(options.get("config_kwargs") or {})
    followed = {
        name: config_kwargs[name] for name in (*_HOST_KWARGS, "s3") if name in config_kwargs
    }

    class NotSent(Exception):
        """Ends a request, and holds it."""

    def stop(request: Any, **_: Any) -> None:
        raise NotSent(request)

    try:
        client = _late_session(options, with_handlers=True)().create_client(
            "s3",
            region_name=region,
            endpoint_url=endpoint,
            aws_access_key_id="unused",
            aws_secret_access_key="unused",
            config=botocore.config.Config(**followed),
        )
        client.meta.events.register("before-send.s3.HeadBucket", stop)
        client.head_bucket(Bucket=bucket)
        raise AssertionError("the request was not made")
    except NotSent as made:
        (request,) = made.args
    except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as error:
        raise ConfigError(
            f"s3://{bucket}: AWS's settings of where requests go do not fit ({error}); correct them in "
            f"~/.aws/config, the environment or config_kwargs of storage_options"
        ) from None
    url = urlsplit(request.url)
    signed = request.headers["Authorization"].decode()
    # "Credential=unused/20261130/us-east-1/s3/aws4_request, ..."
    signing_region = signed.partition("Credential=unused/")[2].split("/")[1]
    in_path = url.path.strip("/") == bucket
    if not in_path and not url.netloc.startswith(f"{bucket}."):
        raise ConfigError(
            f"s3://{bucket}: its host is {url.netloc}, which the obstore transport cannot name; set "
            f"transport='fsspec'"
        )
    host = url.netloc if in_path else url.netloc.removeprefix(f"{bucket}.")
    return S3Place(f"{url.scheme}://{host}", not in_path, signing_region)


def _credential_provider(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any]
) -> Callable[[], dict[str, Any]]:
    key = options.get("key") or options.get("username")
    secret = options.get("secret") or options.get("password")
    if bool(key) != bool(secret):
        raise ConfigError(
            f"s3://{bucket}: storage_options need both 'key' and 'secret', or neither; only one of "
            f"them was given"
        )
    if key:
        fixed = {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": options.get("token"),
            "expires_at": None,
        }
        return lambda: dict(fixed)
    credentials = s3_credentials(bucket, options, session)

    def provide() -> dict[str, Any]:
        """The current credentials, in the form of obstore."""
        try:
            # botocore refreshes here when they are about to expire.
            frozen = credentials.get_frozen_credentials()
        except Exception as error:
            # obstore prints the traceback.
            raise no_renewal(f"{type(error).__name__}: {error}") from None
        current = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
        }
        remember_secrets(current)
        return {**current, "expires_at": datetime.now(UTC) + CREDENTIALS_LAST}

    return provide


def s3_credentials(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any] | None = None
) -> Any:
    """botocore's credentials of its provider chain. Raises AccessDeniedError where it finds none."""
    session = session or _late_session(options, with_handlers=True)
    import botocore.exceptions

    try:
        credentials = session().get_credentials()
    except (
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.MetadataRetrievalError,
    ) as error:
        raise no_renewal(type(error).__name__) from None
    except botocore.exceptions.BotoCoreError as error:
        raise AccessDeniedError(
            f"s3://{bucket}: {error}; correct the profile in ~/.aws/config or AWS_PROFILE"
        ) from None
    if credentials is None:
        raise AccessDeniedError(
            f"s3://{bucket}: no credentials found; set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, run 'aws configure', or give storage_options={{'key': ..., "
            f"'secret': ...}}, to a command by --storage-file ({{'anon': True}} for a public bucket)"
        )
    return credentials


ENDPOINT_OPTIONS = {"gs": "base_url", "az": "endpoint"}
"""obstore's names of the endpoint."""
_DRIVER_OPTIONS = ("default_block_size", "project", "use_listings_cache")
"""Options of gcsfs and adlfs that obstore does not need."""
_DEFAULT_TOKENS = ("google_default", "cloud", "cache")
"""Values of gcsfs's `token` that mean default credentials. obstore finds them without an option."""


def cloud_arguments(scheme: str, config: StorageConfig) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.from_url`.

    `endpoint_url` is an emulator or gateway, which may use plain http. `anon` sends no signature.
    gcsfs's `token` may be the path of a service account's file, or its content as a mapping. All
    other options have obstore's names, and obstore refuses unknown ones.
    """
    options = dict(config.storage_options)
    check_no_settings(f"{scheme}://", options)
    for name in _DRIVER_OPTIONS:
        options.pop(name, None)
    client_kwargs = options.pop("client_kwargs", None) or {}
    endpoint_option = ENDPOINT_OPTIONS[scheme]
    endpoint_url = options.pop("endpoint_url", None)
    if endpoint_url:
        options[endpoint_option] = endpoint_url
    # For Azure, obstore has its own option `token`.
    token = options.pop("token", None) if scheme == "gs" else None
    anonymous = options.pop("anon", False)
    if anonymous or token == "anon":
        options["skip_signature"] = True
    elif isinstance(token, Mapping):
        options["service_account_key"] = json.dumps(dict(token))
    elif token and token not in _DEFAULT_TOKENS:
        options["application_credentials"] = str(token)
    endpoint = str(options.get(endpoint_option) or "")
    _check_endpoint(f"{scheme}://", endpoint)
    return {
        "config": options,
        "client_options": client_options(config, endpoint, client_kwargs),
    }
