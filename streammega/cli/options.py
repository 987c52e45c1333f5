"""What several commands share: options of a storage, and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from streammega.config import StorageConfig, load_storage
from streammega.errors import ConfigError

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="KEY=VALUE",
        help="A storage option, e.g. endpoint_url=http://host:9000 or anon=true; repeat for more. "
        "Secrets belong into --storage-file: everybody on this machine can read a command line.",
    ),
]
StorageFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A TOML file with settings of StorageConfig; --storage KEY=VALUE counts over it.",
    ),
]

RunFile = Annotated[str, typer.Argument(help="The run's TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings over the file's: section.name=value.")
]
Split = Annotated[str, typer.Option(help="The split: train, valid or test.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[str | None, typer.Option(help="Write a page with tables to this file.")]

GIVE_UP_LOOKING = 5.0
"""Seconds.

A dropped connection is back sooner; somebody at a terminal with a mistyped endpoint waits no
longer.
"""

BYTES_OF_UNIT = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def storage_config(
    pairs: Sequence[str] | None,
    file: str | None = None,
    *,
    looks_only: bool = False,
    option: str = "--storage",
) -> StorageConfig:
    """A StorageConfig from a file and `key=value` words; values true/false are booleans, the rest
    text.

    looks_only: for a command whose answer somebody waits for, which does not wait for minutes for
    an endpoint that fails. option: the name of the option, for errors.
    """
    config = load_storage(file) if file else StorageConfig()
    if looks_only:
        config = replace(config, give_up_after=min(config.give_up_after, GIVE_UP_LOOKING))
    options = dict(config.storage_options)
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # The word is not repeated: it may be a secret.
            raise ConfigError(
                f"{option}: a value has no '='; write it as KEY=VALUE, for instance "
                f"endpoint_url=http://127.0.0.1:9000"
            )
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    # a setting of StorageConfig itself, not of its transport
    transport = options.pop("transport", config.transport)
    return replace(config, storage_options=options, transport=transport)


def parse_size(text: str, option: str) -> int:
    """Bytes of "512M", "1.5G", "1000". Raises ConfigError."""
    parsed = re.fullmatch(
        r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", text.strip().lower()
    )
    if not parsed:
        raise ConfigError(f"{option} {text!r}: write a size as 512M, 1G or a number of bytes")
    return int(float(parsed["number"]) * BYTES_OF_UNIT[parsed["unit"]])
