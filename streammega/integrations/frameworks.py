"""The trainers and libraries that are integrated: imported when they are needed, and named where
they are missing.
"""

from __future__ import annotations

import importlib
from typing import Any

from streammega.errors import ConfigError

PACKAGES = {
    "lightning": "lightning",
    "transformers": "transformers",
    "torchdata": "torchdata",
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "megatron-bridge": "megatron-bridge",
}
"""Of each extra that brings a framework, the package it is."""


def imported(module: str, extra: str) -> Any:
    """A module of a framework.

    Raises ConfigError where it is not installed, naming the package and the extra that brings it;
    ImportError where it is, but not what it needs itself.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise
        raise not_installed(module, extra) from None


def not_installed(module: str, extra: str) -> ConfigError:
    """What to say where a module of a framework is missing."""
    return ConfigError(
        f"there is no module {module}, which {PACKAGES[extra]} has: "
        f"pip install 'streammega[{extra}]', or {PACKAGES[extra]} itself"
    )
