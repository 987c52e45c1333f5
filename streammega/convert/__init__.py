"""Corpora to token shards: text through a tokenizer, or tokens from one layout to another; in
parallel, restartable.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streammega.convert.options import ConvertOptions as ConvertOptions
    from streammega.convert.options import ExecutionConfig as ExecutionConfig
    from streammega.convert.report import ConvertReport as ConvertReport
    from streammega.convert.run import Task as Task
    from streammega.convert.run import TaskReport as TaskReport
    from streammega.convert.run import convert as convert
    from streammega.convert.run import convert_task as convert_task
    from streammega.convert.run import merge_tasks as merge_tasks
    from streammega.convert.tokenize.chat import ChatEncoder as ChatEncoder
    from streammega.convert.tokenize.of_dataset import tokenizer_of as tokenizer_of
    from streammega.convert.tokenize.tokenizers import load_tokenizer as load_tokenizer
    from streammega.storage.progress import ProgressObserver as ProgressObserver

# Loaded at first use: the command line takes its flags from `options`, and starts without the rest.
_HOMES = {
    "ChatEncoder": "streammega.convert.tokenize.chat",
    "ConvertOptions": "streammega.convert.options",
    "ConvertReport": "streammega.convert.report",
    "ProgressObserver": "streammega.storage.progress",
    "ExecutionConfig": "streammega.convert.options",
    "Task": "streammega.convert.run",
    "TaskReport": "streammega.convert.run",
    "convert": "streammega.convert.run",
    "convert_task": "streammega.convert.run",
    "merge_tasks": "streammega.convert.run",
    "load_tokenizer": "streammega.convert.tokenize.tokenizers",
    "tokenizer_of": "streammega.convert.tokenize.of_dataset",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streammega.convert' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
