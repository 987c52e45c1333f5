"""Packages that only some uses need: an extra of this package brings each of them."""

from __future__ import annotations

import importlib
from typing import Any

from streammega.errors import ConfigError


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module that an extra brings.

    needed_by: how the message begins if it is not installed, such as "plots need matplotlib".
    Raises ConfigError for that. Raises ImportError if it is installed, but a module that it needs is
    not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise
        raise ConfigError(f"{needed_by}: pip install 'streammega[{extra}]'") from None
