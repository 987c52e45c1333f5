"""Write docs/public_api.txt: the names that programs may import, with their signatures.

A test compares the file with the code, so a review sees each change of the public API.

python tools/public_api.py [--check]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from streammega.errors.cached_property import cached_property

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


FILE = ROOT / "docs" / "public_api.txt"
MODULES = (
    "streammega",
    "streammega.config",
    "streammega.convert",
    "streammega.dataset",
    "streammega.errors",
    "streammega.integrations.webdataset",
    "streammega.loading",
    "streammega.order",
    "streammega.parallel",
    "streammega.samples",
    "streammega.samples.fields",
    "streammega.storage",
    "streammega.train.checkpoints.export",
    "streammega.train.config",
)
"""Modules whose `__all__` is public."""
HEAD = "# Written by tools/public_api.py. A change of this file is a change for users.\n"
WIDTH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    text = describe_modules()
    if not parser.parse_args().check:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        sys.exit(f"{FILE} is not up to date: run python tools/public_api.py")


def describe_modules() -> str:
    """The whole file. A name that several modules have is described in the first of them."""
    lines = [HEAD]
    place: dict[int, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines.append(module_name)
        for name in sorted(set(module.__all__) - {"__version__"}):
            value = getattr(module, name)
            described = inspect.isclass(value) or inspect.isfunction(value)
            if described and id(value) in place:
                lines.append(f"    {name}: see {place[id(value)]}")
                continue
            place[id(value)] = f"{module_name}.{name}"
            lines += [f"    {line}" for line in describe(name, value)]
        lines.append("")
    return "\n".join(lines)


def describe(name: str, value: Any) -> list[str]:
    """The lines of a name."""
    if inspect.isfunction(value):
        return with_signature(f"def {name}", value)
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        lines = [f"class {name}({', '.join(bases)})" if bases else f"class {name}"]
        described = dict(sorted(members(value).items()))
        return lines + [f"    {line}" for part in described.values() for line in part]
    if isinstance(value, str | int | float | bool):
        return [f"{name} = {value!r}"]
    return [f"{name}: {type(value).__name__}"]


def members(kind: type) -> dict[str, list[str]]:
    """The lines of each public member of a class, and of what it inherits from this package."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "streammega":
            found |= {
                name: item
                for name, item in vars(base).items()
                if name == "__init__" or not name.startswith("_")
            }
    lines: dict[str, list[str]] = {}
    for name, item in found.items():
        if isinstance(item, property | cached_property):
            getter = item.fget if isinstance(item, property) else item.func
            assert getter is not None
            lines[name] = [f"{name}: {inspect.signature(getter).return_annotation}"]
        elif isinstance(item, classmethod | staticmethod):
            lines[name] = with_signature(f"{type(item).__name__} {name}", item.__func__)
        elif inspect.isfunction(item):
            lines[name] = with_signature(f"def {name}", item)
    return lines


class Text(str):
    """An annotation, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def with_signature(start: str, function: Any) -> list[str]:
    """The lines of a function; each parameter has its own where they do not fit one line."""
    signature = inspect.signature(function)
    parameters = [
        item.replace(annotation=shown(item.annotation))
        for name, item in signature.parameters.items()
        if not name.startswith("_")
    ]
    signature = signature.replace(
        parameters=parameters, return_annotation=shown(signature.return_annotation)
    )
    line = f"{start}{signature}"
    if len(line) <= WIDTH:
        return [line]
    listed = [f"    {item}" for item in parameters]
    keyword_only = [item.kind is inspect.Parameter.KEYWORD_ONLY for item in parameters]
    if True in keyword_only and not any(item.kind is item.VAR_POSITIONAL for item in parameters):
        listed.insert(keyword_only.index(True), "    *")
    return [f"{start}(", *listed, f") -> {signature.return_annotation}"]


def shown(annotation: Any) -> Any:
    return Text(annotation) if isinstance(annotation, str) else annotation


if __name__ == "__main__":
    main()
