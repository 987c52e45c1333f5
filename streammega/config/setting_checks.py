"""Checks that several classes of settings share."""

from __future__ import annotations

import numbers
import operator
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streammega.errors import ConfigError


def read_toml(path: str, remedy: str) -> dict[str, Any]:
    """What a TOML file holds. remedy: what to do where it cannot be read. Raises ConfigError, which
    repeats no value of the file: it may hold secrets.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no valid TOML ({error})") from None


def set_whole_numbers(settings: Any, names: Sequence[str]) -> None:
    """Have fields be plain ints, whatever kind of whole number was given: states are JSON.

    Raises ConfigError for others.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        try:
            # the way to set a field of what is frozen
            object.__setattr__(settings, name, operator.index(value))
        except TypeError:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number") from None


def local_folder(path: str | Path) -> Path:
    """A folder that somebody named, `~` being their home."""
    return Path(os.path.expanduser(path))  # which leaves the home of an unknown user as it is


def checked_folder(name: str, path: str | Path) -> Path:
    """The folder that a setting names. Raises ConfigError for what is no path."""
    try:
        return local_folder(path)
    except TypeError:
        raise ConfigError(f"{name} is {path!r}; it must be the path of a folder") from None


def check_number(name: str, value: Any) -> None:
    """Raise ConfigError where a setting is text, say, which compares with no number."""
    if not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} is {value!r}; it must be a number")
