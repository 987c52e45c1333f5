"""What is known of a conversion before its first document: its inputs, what they hold, where they
go. Whatever can fail, fails here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.conversion import Conversion
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.preflight import check_encoder
from streammega.convert.read.folders import PassedOver
from streammega.convert.read.inputs import Input, OwnOutput, find_inputs
from streammega.convert.read.pipes import check_output
from streammega.convert.tokenize.template_loader import as_option, find_template
from streammega.convert.tokenize.tokenizers import Tokenizer, load_tokenizer
from streammega.convert.work_folder import work_folder
from streammega.convert.write.encoders import share_tokenizer
from streammega.convert.write.manifest_metadata import Labels, labels_of
from streammega.dataset.shards import split_name
from streammega.errors import ConfigError
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver


def prepare(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions,
    runner: Runner,
    storage: StorageConfig,
    input_storage: StorageConfig,
    progress: ProgressObserver | None = None,
) -> tuple[Conversion, Labels, PassedOver]:
    """A conversion that has not begun, and what its manifest will say; raises what can be known
    before its first document.
    """
    check_output(output)
    prefix, kind_named = split_name(output)
    # Of `web.bin.zst` the suffix says the form; `web` and `web.idx` leave it to the options.
    if prefix != output and not output.endswith(".idx"):
        options = replace(options, kind=kind_named)
    tokenizer = None
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer, **options.tokenizer_settings)
        share_tokenizer(tokenizer, options)
    if options.chat_template is not None:
        # All of it, for workers elsewhere, and so that another one is another conversion.
        template = find_template(options.chat_template, options.tokenizer, options.template_vars)
        options = replace(options, chat_template=as_option(template))
    passed_over = PassedOver()
    own = OwnOutput(prefix=prefix, work=work_folder(prefix, runner.work))
    found = find_inputs(inputs, input_storage, options, passed_over, own)
    options, labels = _labelled(found, options, tokenizer, input_storage)
    check_encoder(found, tokenizer, options, input_storage)
    _check_ray(prefix, runner)
    conversion = Conversion(
        prefix=prefix,
        options=options,
        runner=runner,
        storage=storage,
        input_storage=input_storage,
        work=own.work,
        inputs=found,
        tokenizer=tokenizer,
        progress=progress or ProgressObserver(),
    )
    return conversion, labels, passed_over


def sorted_settings(
    options: ConvertOptions | None, runner: Runner | None, settings: dict[str, Any]
) -> tuple[ConvertOptions, Runner]:
    """Fields of options and runner that were given by name, each in its place."""
    of_options = dict(settings)
    if "key" in of_options:
        of_options["keys"] = (of_options.pop("key"),)
    of_runner = {}
    for name in settings:
        if name in Runner.__dataclass_fields__:
            of_runner[name] = of_options.pop(name)
    options = replace(options or ConvertOptions(), **of_options)
    runner = replace(runner or Runner(), **of_runner)
    return options, runner


def _labelled(
    inputs: Sequence[Input],
    options: ConvertOptions,
    tokenizer: Tokenizer | None,
    storage: StorageConfig,
) -> tuple[ConvertOptions, Labels]:
    """The options, with what the inputs' manifests add to them, and what the output's will say."""
    labels = labels_of(inputs, options, tokenizer, storage)
    if tokenizer is None and options.eod_id is None:
        # What is cut keeps the end of its document.
        options = replace(options, eod_id=labels["eod_id"])
    if options.modes is not None:
        # The sequence with the end may be one of those left out.
        labels = labels | {"eod_id": None}
    return options, labels


def _check_ray(prefix: str, runner: Runner) -> None:
    """Raise ConfigError for a work folder of this machine alone, where other machines are to write
    to it.
    """
    if runner.engine != "ray" or runner.work is not None or not is_remote(prefix):
        return
    # A cluster of this machine alone sees its folders.
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        raise ConfigError(
            f"{prefix}: the machines of a Ray cluster need a work folder that all of them can "
            f"write; name one by --work, a URL beside the output for instance"
        )
