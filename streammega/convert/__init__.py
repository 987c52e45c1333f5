"""Corpora to token shards: text through a tokenizer, or tokens from one layout to another; in
parallel, restartable.
"""

from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.report import ConvertReport
from streammega.convert.run import convert
from streammega.convert.tasks import Task, TaskReport, convert_task, merge_tasks
from streammega.convert.tokenize.chat import ChatEncoder
from streammega.storage.progress import ProgressObserver

__all__ = [
    "ChatEncoder",
    "ConvertOptions",
    "ConvertReport",
    "ProgressObserver",
    "Runner",
    "Task",
    "TaskReport",
    "convert",
    "convert_task",
    "merge_tasks",
]
