"""Those parts of Megatron-Bridge that run on a CPU, out of its own sources.

Bridge itself needs Transformer Engine and a GPU. Where its package is installed without all that,
its classes and functions for datasets, callbacks and the training step are taken out of its files.
"""

from __future__ import annotations
import __future__

import abc
import ast
import dataclasses
import importlib.util
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch

ANY = ("Any", "Callable", "Iterable", "Iterator", "Literal", "Optional", "Tuple", "Union")
CONFIG = ("DataloaderConfig", "DatasetBuildContext", "DatasetProvider")
CALLBACKS = ("VALID_EVENTS", "Callback", "CallbackContext", "CallbackManager", "should_fire")
LOADERS = (
    "build_train_valid_test_data_iterators",
    "build_train_valid_test_data_loaders",
    "build_train_valid_test_datasets",
    "get_train_valid_test_num_samples",
    "setup_data_iterators",
)
STEP = ("train_step", "_handle_mxfp8_param_buffer_copy")


def bridge_folder() -> Path | None:
    """Where Bridge lies; None: it is not installed."""
    megatron = importlib.util.find_spec("megatron")
    places = [] if megatron is None else list(megatron.submodule_search_locations or ())
    found = [Path(place) / "bridge" for place in places if (Path(place) / "bridge").is_dir()]
    return found[0] if found else None


def part_of(name: str, names: tuple[str, ...], **known: Any) -> types.ModuleType:
    """A module "megatron.bridge.<name>" with these names of its file, and what they need besides."""
    folder = bridge_folder()
    assert folder is not None
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    module = types.ModuleType(f"megatron.bridge.{name}")
    # dataclasses look their module up
    sys.modules[module.__name__] = module
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if names_of(node) & set(names)]
    found = set().union(*map(names_of, tree.body))
    assert found == set(names), f"{path} has no {sorted(set(names) - found)}"
    known |= {name: getattr(typing, name) for name in ANY}
    known |= {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "torch": torch}
    known |= {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod}
    vars(module).update(known)
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags), vars(module))
    return module


def names_of(node: ast.stmt) -> set[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def contract() -> dict[str, types.ModuleType]:
    """What `streammega.integrations.megatron_bridge` imports, by the names of its modules."""
    packages = ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.data")
    modules = {name: types.ModuleType(name) for name in packages}
    for module in (part_of("training.config", CONFIG), part_of("training.callbacks", CALLBACKS)):
        modules[module.__name__] = module
    return modules


def training() -> types.SimpleNamespace:
    """Bridge's way from a dataset config to a training step: its functions, by their names.

    Put in place of what they import: no signal handlers, nothing that prints, one group of ranks.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.utils import is_pp_last_stage
    from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
    from megatron.core.utils import get_model_config
    from torch.distributed.checkpoint.stateful import Stateful

    sys.modules.update(contract())
    config = vars(sys.modules["megatron.bridge.training.config"])
    providers = {name: config[name] for name in CONFIG}
    utils = part_of("data.utils", ("get_dataset_provider",), **providers)
    samplers = part_of("data.samplers", ("build_pretraining_data_loader",))
    loaders = part_of(
        "data.loaders",
        LOADERS,
        print_rank_0=lambda text: None,
        build_pretraining_data_loader=vars(samplers)["build_pretraining_data_loader"],
        GPTDatasetConfig=type("NotOurs", (), {}),
        RerunDataIterator=RerunDataIterator,
    )
    step = part_of(
        "training.train",
        STEP,
        get_model_config=get_model_config,
        get_num_microbatches=get_num_microbatches,
        get_rerun_state_machine=get_rerun_state_machine,
        is_pp_last_stage=is_pp_last_stage,
        P2PCommunicator=P2PCommunicator,
        logical_and_across_model_parallel_group=lambda value, mp_group: value,
        reduce_max_stat_across_model_parallel_group=lambda value, mp_group: value,
    )
    state = part_of("training.state", ("TrainState",), Stateful=Stateful)
    callbacks = sys.modules["megatron.bridge.training.callbacks"]
    names: dict[str, Any] = {}
    for module in (utils, loaders, step, state, callbacks):
        names |= vars(module)
    return types.SimpleNamespace(**names)
