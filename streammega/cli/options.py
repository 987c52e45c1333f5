"""Options that several commands share: flags made from settings, storage options, sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.config import StorageConfig, load_storage
from streammega.config.validate import FieldType, field_docs, field_types, flag_name
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.progress import ProgressDisplay

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="KEY=VALUE",
        help="A storage option, anon=true for instance; repeat for more. Secrets belong into "
        "--storage-file: everybody on this machine can read a command line.",
    ),
]
StorageFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A TOML file of StorageConfig; --storage KEY=VALUE counts over it.",
    ),
]


def complete_from(*choices: Any) -> Callable[[str], list[str]] | None:
    """What a shell offers as values of an option; None for an option without choices."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in map(str, choices) if word.startswith(incomplete)]

    return complete if choices else None


RUN_SUFFIX = ".toml"
"""Ends the name of a run's file."""
RunFile = Annotated[str, typer.Argument(help="The run's TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings over the file's: section.name=value.")
]
Split = Annotated[
    str,
    typer.Option(
        help="The split: train, valid or test.",
        autocompletion=complete_from("train", "valid", "test"),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

LOOK_TIMEOUT = 5.0
"""Seconds that a command which only reads waits for an endpoint that fails."""

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

    looks_only: the command only reads, and does not wait for minutes for an endpoint that fails.
    option: the name of the option, for errors.
    """
    config = load_storage(file) if file else StorageConfig()
    if looks_only:
        config = quick(config)
    options = dict(config.storage_options)
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # the message does not repeat the word: it may be a secret
            raise ConfigError(
                f"{option}: a value has no '='; write it as KEY=VALUE, for instance "
                f"endpoint_url=http://127.0.0.1:9000"
            )
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    # a setting of StorageConfig itself, not of its transport
    transport = options.pop("transport", config.transport)
    return replace(config, storage_options=options, transport=transport)


def show_progress(stage: str, *arguments: Any, **options: Any) -> ProgressDisplay:
    """A `ProgressDisplay`, for a `with` block. Its module, which loads storage, is imported only here:
    the help needs none of it.
    """
    from streammega.cli.progress import ProgressDisplay

    return ProgressDisplay(stage, *arguments, **options)


def quick(config: StorageConfig) -> StorageConfig:
    """The storage of a command that only reads: it does not wait for minutes."""
    return replace(config, retry_timeout=min(config.retry_timeout, LOOK_TIMEOUT))


def parse_size(text: str, option: str) -> int:
    """Bytes of "512M", "1.5G", "1000". Raises ConfigError."""
    parsed = re.fullmatch(
        r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", text.strip().lower()
    )
    if not parsed:
        raise ConfigError(f"{option} {text!r}: write a size as 512M, 1G or a number of bytes")
    return int(float(parsed["number"]) * BYTES_OF_UNIT[parsed["unit"]])


def format_size(size: int) -> str:
    """A number of bytes as `parse_size` reads it: "4G" for 4 << 30."""
    for unit in "tgmk":
        if size % BYTES_OF_UNIT[unit] == 0:
            return f"{size // BYTES_OF_UNIT[unit]}{unit.upper()}"
    return str(size)


def with_flags(
    *settings: type, only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add to a command one flag for each field of `settings` that has a `Flag`.

    The command gets their values as keyword arguments, for `settings_from`. only: names of fields.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [flag for kind in settings for flag in _flags(kind, only)]
        written = signature.parameters.values()
        parameters += [item for item in written if item.kind != item.VAR_KEYWORD]
        # arguments that must be given come first, then flags of settings, then the others
        parameters.sort(key=lambda item: item.default is not item.empty)
        # typer reads the signature of a command, and its annotations
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        return command

    return add


def _flags(settings: type, only: Collection[str] | None) -> Iterator[inspect.Parameter]:
    """A parameter for each flag; its help is the first sentence of the field's docstring."""
    docs = field_docs(settings)
    types = field_types(settings)
    for item in fields(settings):
        kind = types[item.name]
        if kind.flag is None or (only is not None and item.name not in only):
            continue
        choices = "|".join(map(str, kind.choices)) or None
        name = flag_name(item.name, kind.flag)
        # of a flag that is off by default, --no-FLAG would say nothing
        words = f"{name}/--no-{name[2:]}" if item.default is True else name
        option = typer.Option(
            words,
            show_default=not isinstance(item.default, bool),
            help=re.split(r"(?<=\.) (?=[A-Z`])", docs[item.name])[0],
            rich_help_panel=kind.flag.group,
            metavar=kind.flag.metavar or choices,
            autocompletion=complete_from(*kind.choices),
        )
        default = None if _repeats(kind) or item.default is MISSING else item.default
        if default is not None and _is_size(item.name):
            default = format_size(default)
        yield inspect.Parameter(
            item.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=Annotated[_type_of_words(item.name, kind), option],
        )


def _is_size(name: str) -> bool:
    """Whether a number of bytes is written as 512M."""
    return name.endswith("_bytes")


def _repeats(kind: FieldType) -> bool:
    """Whether a flag may be repeated: its values become a tuple."""
    return "tuple" in str(kind.alternatives)


def _type_of_words(name: str, kind: FieldType) -> Any:
    """The type by which typer reads the words of a flag."""
    if _repeats(kind):
        return list[int] | None if "int" in str(kind.alternatives) else list[str] | None
    if kind.choices or _is_size(name) or str in kind.alternatives:
        return str | None
    (only,) = kind.alternatives
    return only if only is bool else only | None


def settings_from(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a class of settings from the values of its flags. Raises ConfigError."""
    arguments: dict[str, Any] = {}
    for name, kind in field_types(settings).items():
        value = values.get(name)
        if kind.flag is None or value is None or value == []:
            continue
        if _is_size(name):
            value = parse_size(value, flag_name(name, kind.flag))
        elif _repeats(kind):
            value = tuple(value)
        arguments[name] = value
    return arguments
