"""`storage_options` for Google Cloud Storage and Azure, for obstore's clients.

They are named as obstore, gcsfs and adlfs name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streammega.config import StorageConfig
from streammega.storage.backends.options import client_options

_ENDPOINT = {"gs": "base_url", "az": "endpoint"}
_OF_DRIVERS = ("default_block_size", "project", "use_listings_cache")
"""What gcsfs and adlfs take and obstore has no use for."""
_SEARCHED = ("google_default", "cloud", "cache")
"""gcsfs's names for credentials that are looked for, which obstore does when it is given none."""


def cloud_arguments(scheme: str, config: StorageConfig) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.from_url`.

    `endpoint_url` is an emulator or gateway, plain http if it says so; `anon` sends no signature;
    of gcsfs's `token`, a path is the file of a service account and a mapping its content.
    Everything else has obstore's names, and obstore refuses what it does not know.
    """
    options = dict(config.storage_options)
    for name in _OF_DRIVERS:
        options.pop(name, None)
    client_kwargs = options.pop("client_kwargs", None) or {}
    endpoint_option = _ENDPOINT[scheme]
    endpoint_url = options.pop("endpoint_url", None)
    if endpoint_url:
        options[endpoint_option] = endpoint_url
    # Of Azure's options, `token` is obstore's own.
    token = options.pop("token", None) if scheme == "gs" else None
    anonymous = options.pop("anon", False)
    if anonymous or token == "anon":
        options["skip_signature"] = True
    elif isinstance(token, Mapping):
        options["service_account_key"] = json.dumps(dict(token))
    elif token and token not in _SEARCHED:
        options["application_credentials"] = str(token)
    endpoint = str(options.get(endpoint_option) or "")
    return {
        "config": options,
        "client_options": client_options(config, endpoint, client_kwargs),
    }
