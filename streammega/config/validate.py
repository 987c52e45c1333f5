"""Settings are checked by the types of their fields, once, with one form of message."""

from __future__ import annotations

import ast
import inspect
import json
import math
import numbers
import operator
import os
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from difflib import get_close_matches
from functools import cache, partial, wraps
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from streammega.errors import CacheError, ConfigError

Settings = TypeVar("Settings", bound=type)


class Bound(NamedTuple):
    """A limit of a number in the type of a field: `Annotated[int, Ge(1)]`."""

    words: str
    is_met: Callable[[Any, Any], bool]
    limit: float

    def __str__(self) -> str:
        limit = f"{self.limit:,}" if isinstance(self.limit, int) else f"{self.limit:g}"
        return f"{self.words} {limit}"


Ge = partial(Bound, "at least", operator.ge)
Gt = partial(Bound, "more than", operator.gt)
Le = partial(Bound, "at most", operator.le)
Lt = partial(Bound, "less than", operator.lt)


@dataclass(frozen=True)
class Flag:
    """The flag of a setting. name: if it is not the name of the field with dashes."""

    group: str
    name: str = ""
    metavar: str | None = None


class FieldType(NamedTuple):
    """The type of a field, taken apart: `Annotated[Literal["none"] | int | None, Ge(0)]`."""

    alternatives: tuple[Any, ...]
    choices: tuple[Any, ...]
    is_optional: bool
    bounds: tuple[Bound, ...]
    flag: Flag | None

    @property
    def range(self) -> str:
        """The bounds of a number: "at least 0 and less than 1"; empty without bounds."""
        return " and ".join(map(str, self.bounds))

    @property
    def expected(self) -> str:
        """The values that are accepted: "text or a list", "one of none, full, a whole number"."""
        words = [*self.choices, *dict.fromkeys(map(_words_of, self.alternatives))]
        return f"one of {', '.join(words)}" if self.choices else " or ".join(words)


@cache
def field_types(settings: type) -> dict[str, FieldType]:
    """The types of the fields of a dataclass, by their names."""
    types: dict[str, FieldType] = {}
    for name, hint in get_type_hints(settings, include_extras=True).items():
        extras: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)  # type: ignore[assignment]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        literals = [part for part in parts if get_origin(part) is Literal]
        types[name] = FieldType(
            alternatives=tuple(part for part in parts if part not in (*literals, NoneType)),
            choices=tuple(choice for part in literals for choice in get_args(part)),
            is_optional=NoneType in parts,
            bounds=tuple(extra for extra in extras if isinstance(extra, Bound)),
            flag=next((extra for extra in extras if isinstance(extra, Flag)), None),
        )
    return types


def check_fields(settings: Any, section: str = "", *, hides_text: bool = False) -> None:
    """Raise ConfigError for a field whose value its type forbids: another kind of value, none of
    its choices, or out of its bounds. Numbers of numpy and torch become Python's, their arrays lists.

    section: a prefix of names in messages, such as "train.". hides_text: text in place of a number is
    not repeated, for it may be a secret in the wrong line.
    """
    settings_class: type = type(settings)
    types = field_types(settings_class)
    for item in fields(settings):
        kind = types[item.name]
        value = plain(getattr(settings, item.name))
        is_choice = isinstance(value, str) and value in kind.choices
        if is_choice or (value is None and kind.is_optional):
            continue
        original = value
        for alternative in kind.alternatives:
            with suppress(TypeError):
                value = _as_kind(value, alternative)
                break
        else:
            words = _field_in_words(item, original, kind, section, hides_text)
            raise ConfigError(f"{words}; it must be {kind.expected}")
        # This sets a field of a frozen dataclass.
        object.__setattr__(settings, item.name, value)
        for number in value if isinstance(value, tuple | list) else (value,):
            is_number = isinstance(number, numbers.Real)
            if kind.bounds and not (
                is_number and all(bound.is_met(number, bound.limit) for bound in kind.bounds)
            ):
                words = _field_in_words(item, original, kind, section, hides_text)
                raise ConfigError(f"{words}; it must be {kind.range}")


def plain(value: Any) -> Any:
    """The same with Python's own numbers, also within lists and tuples: those of numpy and torch become
    these, and their arrays lists. Others could be kept in no state.
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) and not isinstance(value, type) else value


def whole_number(name: str, value: Any, minimum: int | None = None) -> int:
    """An argument as Python's int. Raises ConfigError for another kind of value, or a lower one."""
    number = plain(value)
    expected = "a whole number" if minimum is None else f"a whole number, at least {minimum}"
    is_whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    if not is_whole or (minimum is not None and number < minimum):
        raise ConfigError(f"{name} is {number!r}; it must be {expected}")
    return int(number)


def _field_in_words(
    item: Field[Any], value: Any, kind: FieldType, section: str, hides_text: bool
) -> str:
    """The name and value of a field in a message: `train.lr (--lr) is -1.0`."""
    what = f"{section}{item.name}"
    if kind.flag is not None:
        what += f" ({flag_name(item.name, kind.flag)})"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if not item.repr or (hides_text and isinstance(value, str) and not kind.choices):
        shown = f"a {type(value).__name__}"  # it may hold secrets
    return f"{what} is {shown}"


KINDS: dict[Any, tuple[str, Any, Any]] = {
    bool: ("true or false", bool | int, ()),
    int: ("a whole number", numbers.Integral, bool),
    float: ("a number", numbers.Real, bool),
    str: ("text", str | os.PathLike, ()),
    Path: ("a path", str | os.PathLike, ()),
    tuple: ("a list", Iterable, str | bytes | Mapping),
    # an iterator would be read by the first check
    Sequence: ("a list", Iterable, str | bytes | Mapping | Iterator),
    dict: ("a mapping", Mapping, ()),
    Mapping: ("a mapping", Mapping, ()),
}
"""For each type: its name in messages, the classes that it accepts, and those that it refuses."""


def _as_kind(value: Any, kind: Any) -> Any:
    """A value as a type has it. Raises TypeError for a value of another type."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return value
    _, accepted, refused = KINDS.get(origin) or (None, origin, ())
    if not isinstance(value, accepted) or isinstance(value, refused):
        raise TypeError
    if size := _fixed_size(kind):
        elements = list(value)
        if len(elements) != size:
            raise TypeError
        return tuple(map(_as_kind, elements, get_args(kind)))
    if origin is bool:
        if value not in (0, 1):
            raise TypeError
        return bool(value)
    if origin is int or (origin is float and type(value) is not int):
        return origin(value)
    return value


def _fixed_size(kind: Any) -> int:
    """The number of elements of a tuple type of fixed size; 0 for every other type."""
    elements = get_args(kind) if get_origin(kind) is tuple else ()
    return 0 if Ellipsis in elements else len(elements)


def _words_of(kind: Any) -> str:
    """The name of a type in messages."""
    if size := _fixed_size(kind):
        return f"{size} whole numbers"
    origin = get_origin(kind) or kind
    return KINDS[origin][0] if origin in KINDS else f"a {origin.__name__}"


def flag_name(name: str, flag: Flag) -> str:
    """`--shard-size`, the name of the flag of a field."""
    return flag.name or "--" + name.replace("_", "-")


def unknown_setting(name: str, *settings: type, section: str = "") -> str:
    """The message for an unknown setting, with the nearest known one."""
    known = [item.name for kind in settings for item in settings_of(kind)]
    nearest = get_close_matches(name, known, 1)
    hint = f"known: {', '.join(section + other for other in known)}"
    if nearest:
        hint = f"did you mean {section}{nearest[0]}?"
    return f"unknown setting {section}{name}; {hint}"


def refuse_unknown(settings: Settings) -> Settings:
    """Make a class of settings refuse unknown ones, by a ConfigError that names the nearest."""
    init = settings.__init__  # type: ignore[misc]
    known = {item.name for item in fields(settings)}

    @wraps(init)
    def checked_init(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise ConfigError(unknown_setting(name, settings))
        init(self, *values, **named)

    settings.__init__ = checked_init  # type: ignore[misc]
    return settings


def settings_of(settings: type) -> list[Field[Any]]:
    """The fields of a class that users set."""
    return [item for item in fields(settings) if not item.name.startswith("_")]


@cache
def field_docs(settings: type) -> dict[str, str]:
    """The docstring below each field of a class, on one line."""
    module = ast.parse(Path(inspect.getfile(settings)).read_text(encoding="utf-8"))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    body = classes[settings.__name__].body
    docs: dict[str, str] = {}
    for item, after in pairwise(body):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            docs[ast.unparse(item.target)] = " ".join(text.split())
    return docs


def parse_json(data: str | bytes) -> Any:
    """The value of JSON that comes from outside. Raises ValueError, also where it is nested too deeply:
    `json.loads` then raises RecursionError.
    """
    try:
        return json.loads(data)  # noqa: TID251
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(value: Any) -> Any:
    """The same value, with None for each number that is not finite: JSON has none of them."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_toml(path: str, remedy: str) -> dict[str, Any]:
    """The content of a TOML file. remedy: what to do if it cannot be read. Raises ConfigError, which
    repeats no value of the file, for it may hold secrets.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no valid TOML ({error})") from None


def local_folder(path: str | Path) -> Path:
    """A folder by its name, in which `~` is the home folder. Raises ConfigError where there is none."""
    return Path(with_home(str(path)))


def with_home(path: str) -> str:
    """A path with the home folder for its `~`; that of an unknown user stays, as in a shell.

    Raises ConfigError for a user who has no home: it would be a folder of this name.
    """
    full_path = os.path.expanduser(path)
    if full_path == "~" or full_path.startswith("~/"):
        raise ConfigError(
            f"{path}: this user has no home folder; set HOME, or write the whole path"
        )
    return full_path


def user_caches() -> Path:
    """The folder of this user's caches: $XDG_CACHE_HOME, else ~/.cache.

    A container's user id may have no name, and then no home, or / for one. Its folder is one in the
    system's temporary folder that is made for this user alone. Raises CacheError where that cannot be.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = os.path.expanduser("~")
    if home != "~" and (home != "/" or os.access(home, os.W_OK)):
        return Path(home, ".cache")
    user = os.geteuid()
    remedy = "set XDG_CACHE_HOME to a folder for caches, for this user has no home"
    try:
        folder = Path(tempfile.gettempdir(), f"caches-of-{user}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise CacheError(f"{error.filename or 'caches'}: {error.strerror}; {remedy}") from None
    if status.st_uid != user or not stat.S_ISDIR(status.st_mode):
        raise CacheError(
            f"{folder}: is no folder of this user (id {user}), so its files may be forged; {remedy}"
        )
    return folder
