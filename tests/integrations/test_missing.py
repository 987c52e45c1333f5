"""A framework that is not installed: the error names its package and the extra that brings it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from streammega.errors import ConfigError
from streammega.integrations import megatron, torchdata
from streammega.integrations.frameworks import PACKAGES, import_framework

CASES = {
    "lightning": ("lightning", "StreamDataModule", ("lightning", "pytorch_lightning")),
    "transformers": ("transformers", "StreamTrainer", ("transformers",)),
    "torchtitan": ("torchtitan", "StreamDataLoader", ("torchtitan",)),
    "megatron": ("megatron_dataset", "StreamGPTDataset", ("megatron.core",)),
}
"""By extra: the module of ours, the class that is asked for, and what is not installed."""


FUNCTIONS = {"torchdata", "megatron-bridge"}
"""Extras of integrations that have no such class."""


def test_every_framework_is_asked_for_where_it_is_missing() -> None:
    assert set(CASES) | FUNCTIONS == set(PACKAGES), "CASES; FUNCTIONS if it has no class"


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages and what is imported of them be missing."""
    for package in packages:
        loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
        for name in (package, *loaded):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.guarantee("framework-installed-named")
@pytest.mark.parametrize("extra", CASES)
def test_the_class_for_a_missing_framework_says_what_to_install(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_name, name, hidden = CASES[extra]
    module = importlib.import_module(f"streammega.integrations.{module_name}")
    monkeypatch.delitem(vars(module), name, raising=False)
    hide(monkeypatch, *hidden)
    with pytest.raises(ConfigError, match=PACKAGES[extra]) as caught:
        getattr(module, name)
    assert f"pip install 'streammega[{extra}]'" in str(caught.value)


@pytest.mark.guarantee("framework-installed-named")
def test_functions_for_missing_frameworks_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torchdata", "megatron.training")
    with pytest.raises(ConfigError, match=r"streammega\[torchdata\]"):
        torchdata.stream_node(cast(Any, None))
    with pytest.raises(ConfigError, match=r"megatron\.training, which megatron-core has"):
        megatron.datasets_provider()(None)
    hide(monkeypatch, "megatron.bridge")
    with pytest.raises(ConfigError, match=r"streammega\[megatron-bridge\]"):
        import_framework("megatron.bridge.training.callbacks", "megatron-bridge")


@pytest.mark.guarantee("framework-installed-named")
def test_what_a_framework_itself_lacks_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_framework.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        import_framework("a_framework", "torchdata")
