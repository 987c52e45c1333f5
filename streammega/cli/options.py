"""Options that several commands share: flags made from settings, storage options, sizes."""

from __future__ import annotations

import difflib
import glob
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.config import ORDERS, DataConfig, StorageConfig, load_storage
from streammega.config.validate import FieldType, field_docs, field_types, flag_name, with_home
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.progress import ProgressDisplay
    from streammega.train.config import RunConfig

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
_OVERRIDE = re.compile(r"(data|model|train|parallel|validation)\.[\w.]+=")
DataWords = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN.toml|DATASET",
        help="A run's TOML file, and settings over it: section.name=value. Or datasets, paths or "
        "URLs: a prefix, a folder, a glob or a manifest; with weights, each after its own: "
        "0.7 web 0.3 code.",
    ),
]
OF_DATASETS = "Settings of datasets (a run's file has its own)"
"""The section of the help with settings that a run's file has, and datasets have not."""
SEQUENCE_LENGTH = 4096
GLOBAL_BATCH_SIZE = 1024
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of a sample.",
        show_default=str(SEQUENCE_LENGTH),
        rich_help_panel=OF_DATASETS,
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Samples of a step.",
        show_default=str(GLOBAL_BATCH_SIZE),
        rich_help_panel=OF_DATASETS,
    ),
]
OrderName = Annotated[
    str | None,
    typer.Option(
        help=f"The order: {', '.join(ORDERS)}.",
        show_default="stream",
        autocompletion=complete_from(*ORDERS),
        rich_help_panel=OF_DATASETS,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="The seed of the shuffle.", show_default="1234", rich_help_panel=OF_DATASETS),
]
Shares = Annotated[
    str | None,
    typer.Option(
        help="The shares of train, valid and test.",
        show_default="1,0,0",
        rich_help_panel=OF_DATASETS,
    ),
]
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


def load_data(
    words: Sequence[str],
    storage: Sequence[str] | None = None,
    storage_file: str | None = None,
    *,
    options: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    looks_only: bool = False,
) -> tuple[DataConfig, RunConfig | None]:
    """What the words of `DataWords` mean: the data, and the run if a run's file names it.

    options: values of options that are for datasets alone, by the names of their parameters; None
    where the command line has none. Those that DataConfig has are set. settings: more of DataConfig
    for datasets. looks_only: the command only reads, and does not wait for minutes for storage.

    Raises ConfigError for a name that is neither a run's file nor a dataset, and for an option that
    has no effect.
    """
    first = words[0]
    if first.endswith(RUN_SUFFIX):
        refused = {**options, "storage": storage, "storage_file": storage_file}
        for name, value in refused.items():
            if value is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: {first} has this setting; to change it, write section.name=value "
                    "after the file"
                )
        check_name(first)
        from streammega.train.config import load_run

        run = load_run(first, words[1:])
        if looks_only:
            run = replace(run, data=quick_data(run.data))
        return run.data, run
    for word in words:
        if _OVERRIDE.match(word):
            raise ConfigError(
                f"{word}: settings are for a run's file ({RUN_SUFFIX}), which comes before them"
            )
        if word.endswith(RUN_SUFFIX):
            raise ConfigError(f"{word}: a run's file comes first, and without datasets")
    # In one text, a weight without a prefix is an error. A prefix with blanks needs a list.
    has_blanks = any(len(word.split()) != 1 for word in words)
    values: dict[str, Any] = {
        "sequence_length": SEQUENCE_LENGTH,
        "order": "stream",
        **(settings or {}),
    }
    known = {item.name for item in fields(DataConfig)}
    values |= {key: value for key, value in options.items() if key in known and value is not None}
    data = DataConfig(
        blend=list(words) if has_blanks else " ".join(words),
        storage=storage_config(storage, storage_file, looks_only=looks_only),
        **values,
    )
    for name in data.segments("train")[0].datasets:
        check_name(name)
    return data, None


def check_name(name: str) -> None:
    """Raise ConfigError for the name of a local run's file or dataset if no file has it, nor one that
    begins with it.
    """
    if "://" in name:
        return
    path = with_home(name).rstrip("/")
    is_there = os.path.exists(path) or any(
        glob.glob(pattern) for pattern in (path, f"{glob.escape(path)}[.-]*")
    )
    if is_there or not path:
        return
    folder, stem = os.path.split(path)
    known = set()
    if os.path.isdir(folder or "."):
        for entry in os.listdir(folder or "."):
            is_whole = entry.endswith(RUN_SUFFIX) or os.path.isdir(os.path.join(folder, entry))
            known.add(
                entry if is_whole else entry.removesuffix(".manifest.json").removesuffix(".idx")
            )
    nearest = difflib.get_close_matches(stem, sorted(known), 1)
    hint = f"is {os.path.join(folder, nearest[0])} meant?" if nearest else "check the name"
    raise ConfigError(f"{name}: no run's file, dataset or folder has this name; {hint}")


def one_epoch(data: DataConfig, global_batch_size: int | None) -> RunConfig:
    """A run of as many steps as read the tokens of some datasets once. What they are is looked up, and
    kept in its data.

    Raises ObjectNotFoundError, FormatError, StorageError.
    """
    from streammega.dataset.opening import open_manifests
    from streammega.samples.pinned import read_blend
    from streammega.train.config import RunConfig, TrainConfig

    data = read_blend(data)
    names = data.segments("train")[0].datasets
    manifests = open_manifests(names, data.storage, data.manifests)
    size = GLOBAL_BATCH_SIZE if global_batch_size is None else global_batch_size
    tokens = sum(shard.tokens for manifest in manifests for shard in manifest.shards)
    return RunConfig(
        data=data.with_manifests(dict(zip(names, manifests, strict=True))),
        train=TrainConfig(
            train_iters=max(1, tokens // max(1, data.sequence_length * size)),
            micro_batch_size=1,
            global_batch_size=size,
            out_dir=".",
        ),
    )


def show_progress(stage: str, *arguments: Any, **options: Any) -> ProgressDisplay:
    """A `ProgressDisplay`, for a `with` block. Its module, which loads storage, is imported only here:
    the help needs none of it.
    """
    from streammega.cli.progress import ProgressDisplay

    return ProgressDisplay(stage, *arguments, **options)


def quick(config: StorageConfig) -> StorageConfig:
    """The storage of a command that only reads: it does not wait for minutes."""
    return replace(config, retry_timeout=min(config.retry_timeout, LOOK_TIMEOUT))


def quick_data(data: DataConfig) -> DataConfig:
    """The same of all storage that data names."""
    others = {url: quick(storage) for url, storage in data.storage_by_prefix.items()}
    return replace(data, storage=quick(data.storage), storage_by_prefix=others)


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
