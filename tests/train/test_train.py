"""The training program: settings, checkpoints, and a real run of several processes that is killed
and resumed.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import IndexedDatasetWriter, ParallelLayout
from streammega.config import StorageConfig
from streammega.errors import ConfigError, FormatError, GradientError, StateError, StorageError
from streammega.gradients.buffers import local_part
from streammega.samples.open import open_source
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import RunConfig, load_run
from streammega.train.config_check import global_batch_hash, sample_digests
from streammega.train.optimizer import LossScale, learning_rate
from streammega.train.program import _is_of_others
from streammega.train.program import main as train_main
from streammega.train.run_log import RunLog, read_metrics
from streammega.train.splits import has_valid
from streammega.train.stages import check_layout
from streammega.train.trainer import Trainer
from tests.support.builders import write_random_pair, write_small_run
from tests.support.checkpoint_programs import checkpoint_records, position_of
from tests.support.gang import Gang
from tests.support.processes import launch
from tests.support.run_hashes import loader_hashes, open_without_ranks
from tests.support.servers import S3
from tests.support.typed import first_prefix

CPU = torch.device("cpu")


@pytest.fixture
def run_file(tmp_path: Path, pair: str) -> str:
    return write_small_run(tmp_path, pair)


def start(run_file: str, *overrides: str) -> Trainer:
    return Trainer(load_run(run_file, overrides), CPU)


def run_log_in(folder: Path, storage: StorageConfig | None = None) -> RunLog:
    return RunLog(str(folder), storage or StorageConfig(), iters=10)


def records_of(config: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(config.train.out_dir) / "metrics.jsonl")


def train_on(run_file: str, ranks: int, kill_at: int | None, environment: dict[str, str]) -> None:
    """Train on so many ranks; SIGKILL to all of them once a step is in the metrics."""
    folder = Path(run_file).parent
    family = launch(folder, ranks, ["-m", "streammega.train", run_file], environment)
    metrics = folder / "run" / "metrics.jsonl"
    everyone = range(ranks)
    deadline = time.monotonic() + 120
    while family.ended(*everyone, within=0.02) == [None] * ranks and time.monotonic() < deadline:
        if (
            kill_at is not None
            and metrics.exists()
            and any(r["step"] >= kill_at for r in read_metrics(metrics))
        ):
            family.signal(signal.SIGKILL, *everyone)
            break
    codes = family.ended(*everyone, within=60)
    family.close()
    if kill_at is None:
        assert codes == [0] * ranks, [family.log(rank) for rank in everyone]


@pytest.mark.guarantee("exact-resume-state")
def test_killed_runs_resume_on_exactly_the_next_token_with_any_rank_count(
    tmp_path: Path, moto: S3
) -> None:
    """From s3://: two ranks, SIGKILL, one rank, SIGKILL, two ranks to the end."""
    bucket = moto.new_bucket()
    write_random_pair(str(tmp_path / "pair"))
    for name, value in moto.environment.items():
        os.environ[name] = value
    try:
        with IndexedDatasetWriter(f"s3://{bucket}/pair", np.uint16) as writer:
            writer.add_index(str(tmp_path / "pair"))
        run_file = write_small_run(tmp_path, f"s3://{bucket}/pair")
        for ranks, kill_at in ((2, 5), (1, 11), (2, None)):
            train_on(run_file, ranks, kill_at, moto.environment)
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        expected = loader_hashes(load_run(run_file))
    finally:
        for name in moto.environment:
            os.environ.pop(name, None)
    assert {record["step"] for record in records} == set(range(1, 17))
    assert {record["ranks"] for record in records} == {1, 2}
    for record in records:
        assert record["batch_hash"] == expected[record["step"] - 1], record
    assert len({r["batch_hash"] for r in records}) == 16


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out_dir of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    write_random_pair(str(folder / "data" / "pair"))
    Trainer(load_run(write_small_run(folder, f"{folder}/data/pair")), CPU).run()
    return folder / "run"


@pytest.fixture
def trained(run_file: str, finished: Path) -> RunConfig:
    """A run over equal data with a copy of what the finished one left."""
    config = load_run(run_file)
    shutil.copytree(finished, config.train.out_dir)
    return config


@pytest.mark.guarantee("checkpoints-atomic-written")
@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    run_file: str, tmp_path: Path, order: str
) -> None:
    trained = load_run(run_file, [f"data.order={order}"])
    Trainer(trained, CPU).run()
    half = replace(trained, train=replace(trained.train, out_dir=str(tmp_path / "half")))
    first = Trainer(half, CPU)
    for _ in range(7):
        first.train_step()
        first.step += 1
    first.save()
    second = Trainer(half, CPU)
    second.resume()
    assert second.step == 7
    second.run()
    whole = Trainer(trained, CPU)
    whole.resume()
    assert whole.step == 16
    for a, b in zip(
        second.model.chunks[0].parameters(), whole.model.chunks[0].parameters(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.guarantee("metrics-jsonl-line", "checkpoints-atomic-written")
def test_the_run_learns_keeps_the_last_checkpoints_and_evaluates(trained: RunConfig) -> None:
    folder = Path(trained.train.out_dir)
    assert [path.stem for path in checkpoint_records(folder / "checkpoints")] == [
        f"step-{n:08d}" for n in (12, 14, 16)
    ]
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "valid_loss" in record] == [8, 16]
    assert records[-1]["samples"] == [120, 128]
    said_of_each = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "data_wait_s", "samples"}
    assert all(said_of_each <= set(record) for record in records)
    position = position_of(folder / "checkpoints" / "step-00000016.json")
    assert position["data"]["consumed_samples"] == 128


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.seed=5", "seed: the checkpoint has 1234, this run 5"),
        ("data.sequence_length=8", "sequence_length: the checkpoint has 16, this run 8"),
        ("model.dim=32", "model.dim: the checkpoint has 16, this run 32; restore"),
        ("model.heads=4", "model.heads: the checkpoint has 2, this run 4; restore"),
        (
            'data.blend="mock://tokens=9000,vocab=40,length=200"',
            r"(?s)dataset .*the checkpoint has.*a change of data in mid-run is a phase",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    trained: RunConfig, run_file: str, override: str, named: str
) -> None:
    other = start(run_file, override)
    with pytest.raises(StateError, match=named):
        other.resume()


def test_a_checkpoint_of_another_dataset_is_refused(
    trained: RunConfig, run_file: str, pair: str
) -> None:
    write_random_pair(pair, seed=77)
    with pytest.raises(StateError, match=r"dataset \(.*\): the checkpoint has"):
        start(run_file).resume()


@pytest.mark.guarantee("states-many-datasets")
def test_a_checkpoint_of_many_datasets_has_a_small_state_and_says_where_they_differ(
    run_file: str,
) -> None:
    def started(tokens_of_last: int) -> Trainer:
        names = [f"mock://tokens=4000,vocab=40,length=200,seed={number}" for number in range(39)]
        names.append(f"mock://tokens={tokens_of_last},vocab=40,length=200")
        blend = json.dumps([[name, 1.0] for name in names])
        overrides = [f"data.blend={blend}", "data.order=stream", "data.split=1,0,0"]
        config = load_run(run_file, [*overrides, "train.eval_interval=0"])
        return Trainer(config, CPU)

    first = started(4000)
    first.train_step()
    first.step += 1
    first.save()
    first.close()
    (saved,) = checkpoint_records(Path(first.config.train.out_dir) / "checkpoints")
    position = position_of(saved)
    assert len(json.dumps(position["data"])) < 1024
    again = started(4000)
    again.resume()
    assert again.batches.consumed_samples == first.batches.consumed_samples
    again.close()
    other = started(6000)
    with pytest.raises(StateError, match=r"datasets: of 40 items, some of 35 \('mock://"):
        other.resume()
    other.close()


@pytest.mark.guarantee("nothing-half-written", "checkpoints-atomic-written")
def test_a_half_written_checkpoint_is_not_believed(trained: RunConfig) -> None:
    folder = Path(trained.train.out_dir) / "checkpoints"
    killed = folder / "step-00000099-0123abcd"
    killed.mkdir()
    (killed / "__0_0.distcp").write_bytes(b"half")
    resumed = Trainer(trained, CPU)
    resumed.resume()
    assert resumed.step == 16
    resumed.save()
    assert not killed.exists(), "the next save clears what a kill left"
    (folder / "step-00000016.json").write_text("{")
    before = Trainer(trained, CPU)
    before.resume()
    assert before.step == 14, "the one before it is taken"


@pytest.mark.guarantee("run-file-overrides")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.train_itres=5",
            r"unknown setting train\.train_itres; did you mean train\.train_iters",
        ),
        ("train_iters=5", r"unknown setting train_iters; did you mean train\.train_iters"),
        ("data.memory_bytes=5", r"did you mean data\.storage\.memory_bytes"),
        ("data.storage.request_timeuot=5", r"did you mean data\.storage\.request_timeout"),
        ("data.storage._tuning.max_request_bytes=8192", r"unknown setting data\.storage\._tuning"),
        (
            "data.storage.max_request_bytes=8192",
            r"unknown setting data\.storage\.max_request_bytes; did you mean data\.storage\.request_timeout",
        ),
        ("model.width=5", r"^\S+/run.toml with 1 override: unknown setting model.width"),
        ("data.seed=one", r"^\S+/run.toml with 1 override: seed is 'one'"),
        ("train.train_iters=many", "train.train_iters is 'many'; it must be a whole number"),
        ("train.train_iters=0", "must be at least 1"),
        ("train.train_iters", "write it as section.name=value"),
        ("model.heads=3", "multiple of 2 x heads"),
        ("data.num_samples=[8, 0, 0]", "data.num_samples is 8 for training"),
    ],
)
def test_wrong_settings_are_named(run_file: str, override: str, message: str) -> None:
    def start() -> Any:
        return open_without_ranks(load_run(run_file, [override]))

    with pytest.raises(ConfigError, match=message):
        start()


def test_settings_come_from_the_file_and_the_command_line(run_file: str) -> None:
    config = load_run(
        run_file,
        ["train.lr=1", 'data.storage.transport="fsspec"', "data.storage.storage_options.anon=true"],
    )
    assert (config.train.lr, config.data.storage.transport) == (1.0, "fsspec")
    assert config.data.storage.storage_options == {"anon": True}
    assert config.data.vocab_size == config.model.vocab_size
    assert config.num_samples() == (128, 48, 0)


def test_blends_of_megatron_are_understood(run_file: str, pair: str) -> None:
    weighted = load_run(run_file, [f'data.blend=[["{pair}", 0.3], ["{pair}", 0.7]]'])
    assert len(open_without_ranks(weighted)) == 64
    text = (
        Path(run_file)
        .read_text()
        .replace(f'blend = ["{pair}"]', f'blend = "0.3 {pair} 0.7 {pair}"')
    )
    Path(run_file).write_text(text)
    assert load_run(run_file).data.blend == f"0.3 {pair} 0.7 {pair}"
    assert len(open_without_ranks(load_run(run_file))) == 64


RUN_WITH = "[train]\ntrain_iters=1\n[model]\nvocab_size=4\n[data]\nblend='a'\nsequence_length=1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "no valid TOML"),
        (f"x = {'[' * 9999}", "no valid TOML"),
        (f"x = {'9' * 9999}", "no valid TOML"),
        ("[data]\nblend='a'\nsequence_length=1", "no .train. section"),
        (f"{RUN_WITH}[data.phases]\nfirst_sample=8", "write \\[\\[data.phases\\]\\] before each"),
        (f"{RUN_WITH}[[data.phases]]\nfirst_sampel=8", "did you mean data.phases.first_sample?"),
        (f"{RUN_WITH}fields='tokens'", "data.fields is text; it must be a list"),
        (f"{RUN_WITH}storage.storage_options='a'", "storage_options is text; it must be a mapping"),
    ],
)
def test_broken_run_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(str(tmp_path / "run.toml"))


def test_an_error_in_a_real_rank_is_one_message(run_file: str, tmp_path: Path) -> None:
    command = ["-m", "streammega.train", run_file, "data.blend=['/no/such/pair']"]
    family = launch(tmp_path, 1, command)
    assert family.ended(0, within=60) == [1], family.log(0)
    assert "error (rank 0): /no/such/pair.bin: no such file" in family.log(0)
    assert "Traceback" not in family.log(0)


@pytest.mark.guarantee("global-batch-ramps", "learning-rate-decays")
def test_the_learning_rate_warms_up_and_falls_to_its_least(run_file: str) -> None:
    overrides = ["train.train_iters=100", "train.warmup_iters=10", "train.lr=1.0"]
    train = load_run(run_file, overrides).train
    rates = [learning_rate(train, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.guarantee("learning-rate-decays")
def test_the_decay_goes_by_steps_whatever_their_size(run_file: str) -> None:
    """Two steps of warmup, one more of 8 samples of 16 tokens, and three of 16 samples of 32."""
    config = load_run(
        run_file,
        [
            "data.order=stream",
            "data.shuffle_lanes=16",
            "data.phases=[{first_step=4, global_batch_size=16, sequence_length=32}]",
            "train.train_iters=6",
            "train.warmup_iters=2",
            "train.lr=1.0",
            "train.lr_decay_style=linear",
            "train.save_interval=0",
            "train.eval_interval=3",
        ],
    )
    Trainer(config, CPU).run()
    records = records_of(config)
    # of the same samples, of the first length, on both sides of the change
    assert [record["step"] for record in records if "valid_loss" in record] == [3, 6]
    left = [1 - 0.9 * step / 4 for step in range(4)]
    assert [record["lr"] for record in records] == pytest.approx([0.5, 1.0, *left])
    assert [record["tokens"] for record in records][-1] == 3 * 8 * 16 + 3 * 16 * 32


@pytest.mark.guarantee("learning-rate-decays")
def test_what_is_skipped_is_no_part_of_the_decay(run_file: str, tmp_path: Path) -> None:
    rates = []
    for excluded, last in (("[[8, 16], [32, 56], [80, 88]]", [88, 96]), ("[]", [48, 56])):
        config = load_run(
            run_file,
            [
                "data.order=stream",
                "data.shuffle_lanes=16",
                f"data.exclude_samples={excluded}",
                "data.num_samples=[200, 0, 0]",
                "train.train_iters=7",
                "train.warmup_iters=2",
                "train.save_interval=0",
                "train.eval_iters=0",
                f"train.out_dir={tmp_path}/{last[0]}",
            ],
        )
        Trainer(config, CPU).run()
        records = records_of(config)
        assert records[-1]["samples"] == last
        rates.append([record["lr"] for record in records])
    assert rates[1] == rates[0]


@pytest.mark.guarantee("phase-by-step")
def test_phases_that_other_batch_sizes_move_are_told_of(
    run_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["data.order=stream", "data.shuffle_lanes=16", "train.eval_iters=0"]
    by_step = "data.phases=[{first_step=5, sequence_length=32}]"
    first = load_run(run_file, [*settings, by_step, "train.train_iters=2"])
    Trainer(first, CPU).run()

    def told(*overrides: str) -> str:
        caplog.clear()
        trainer = start(run_file, *settings, *overrides)
        trainer.resume()
        trainer.close()
        return caplog.text

    moved = "phases that were to begin at samples [32] now begin at [64]"
    assert moved in told(by_step, "train.global_batch_size=16")
    by_sample = "data.phases=[{first_sample=32, sequence_length=32}]"
    for same in ([by_step], [by_sample, "train.global_batch_size=16"]):
        assert "were to begin" not in told(*same)
    # phases ahead may be changed, and skips be added, which moves steps
    later = "data.phases=[{first_step=9, sequence_length=32}]"
    for changed in ([later], [by_step, "data.exclude_samples=[[16, 24]]"]):
        assert "were to begin" not in told(*changed)


def test_batch_hashes_see_every_token_and_place_but_not_the_layout() -> None:
    batch = {"tokens": torch.arange(32).view(4, 8), "labels": torch.arange(1, 33).view(4, 8)}
    digests = sample_digests(batch).tolist()
    whole = global_batch_hash(dict(zip(range(4), digests, strict=True)))
    assert global_batch_hash(dict(reversed(list(zip(range(4), digests, strict=True))))) == whole
    assert global_batch_hash(dict(zip((1, 0, 2, 3), digests, strict=True))) != whole
    batch["tokens"][2, 5] += 1
    assert (
        global_batch_hash(dict(zip(range(4), sample_digests(batch).tolist(), strict=True))) != whole
    )


@pytest.mark.parametrize(
    ("split", "valid"),
    [("99,1,0", True), ("99 1 0", True), ("99/1/0", True), ("99, 1, 0", True), (".9 .1", True), ("1,0,0", False), ("100", False),
     ("0 0 1", False), ("9;0;1", False), ("[90, 5, 5]", True)],
)  # fmt: skip
def test_a_run_evaluates_what_its_split_gives_to_valid_however_it_is_written(
    run_file: str, split: str, valid: bool
) -> None:
    for order in ("stream", "megatron"):
        config = load_run(
            run_file, [f'data.split="{split}"', f"data.order={order}", "data.num_samples=[8, 8, 8]"]
        )
        assert has_valid(config.data) == valid
        if not valid:
            with pytest.raises(ConfigError, match="leaves nothing for valid"):
                open_source(config.data, "valid", 1)
    if valid:
        run = load_run(
            run_file, [f'data.split="{split}"', "train.train_iters=2", "train.eval_iters=1"]
        )
        assert "valid_loss" in Trainer(run, CPU).evaluate_all()


def test_an_evaluation_of_nothing_is_refused_before_the_first_step(run_file: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.eval_iters is 2, and there is nothing to evaluate"
    ):
        start(run_file, 'data.split="100,0,0"')


@pytest.mark.guarantee("validation-sets-read")
def test_several_validation_sets_are_read_from_their_start_every_time(
    run_file: str, tmp_path: Path
) -> None:
    write_random_pair(str(tmp_path / "other"), seed=9)
    config = load_run(
        run_file,
        [
            f'validation.other=["{tmp_path}/other"]',
            f'validation.both="0.5 {tmp_path}/other 0.5 {tmp_path}/data/pair"',
        ],
    )
    trainer = Trainer(config, CPU)
    first = trainer.evaluate_all()
    second = trainer.evaluate_all()
    assert first == second
    assert set(first["valid_loss_of"]) == {"other", "both"}
    assert len({first["valid_loss"], *first["valid_loss_of"].values()}) == 3
    per_split = [
        f'["{tmp_path}/data/pair"]',
        f'["{tmp_path}/data/pair", "{tmp_path}/other"]',
        '["unused"]',
    ]
    text = Path(run_file).read_text()
    several = re.sub(
        r"blend = .*",
        f"blend_per_split = [{', '.join(per_split)}]\nmultiple_validation_sets = true",
        text,
    )
    Path(run_file).write_text(several)
    sets = start(run_file).evaluate_all()
    assert set(sets) == {"valid_loss_of"}
    assert set(sets["valid_loss_of"]) == {"pair", "other"}
    with pytest.raises(ConfigError, match="validation set 'a/b'"):
        load_run(run_file, ["validation.a/b=x"])


@pytest.mark.guarantee("global-batch-ramps")
def test_the_global_batch_ramps_up(run_file: str) -> None:
    config = load_run(
        run_file,
        ["train.rampup_batch_size=[4, 2, 24]", "train.micro_batch_size=2", "train.save_interval=0"],
    )
    Trainer(config, CPU).run()
    records = records_of(config)
    sizes = [record["samples"][1] - record["samples"][0] for record in records]
    assert sizes == [4, 4, 4, 6, 6, *[8] * 11]
    assert [r["samples"][0] for r in records[1:]] == [r["samples"][1] for r in records[:-1]]
    assert config.num_samples()[0] == records[-1]["samples"][1] == config.schedule.samples_after(16)
    assert [record["batch_hash"] for record in records] == loader_hashes(config)


@pytest.mark.guarantee("later-phase-never")
def test_a_phase_is_appended_to_a_run_by_an_edit_of_its_file(run_file: str, tmp_path: Path) -> None:
    """Eight steps without it, then as one run that had it from the first step on."""
    write_random_pair(str(tmp_path / "math"), seed=9)
    path = Path(run_file)
    in_lanes = 'order = "stream"\nshuffle_lanes = 16'
    before = path.read_text().replace('order = "megatron"', in_lanes)
    phase = f"""
[[data.phases]]
first_sample = 64
blend = ["0.5", "{first_prefix(load_run(run_file).data)}", "0.5", "{tmp_path}/math"]
global_batch_size = 16
"""
    path.write_text(before)
    start(run_file, "train.train_iters=8").run()
    path.write_text(before + phase)
    config = load_run(run_file)
    again = Trainer(config, CPU)
    assert again.sources == ["pair", "math"]
    again.resume()
    again.run()
    records = records_of(config)
    sizes = [record["samples"][1] - record["samples"][0] for record in records]
    assert sizes == [8] * 8 + [16] * 8
    assert config.num_samples()[0] == records[-1]["samples"][1]
    whole = load_run(run_file, [f"train.out_dir={tmp_path}/whole"])
    Trainer(whole, CPU).run()
    expected = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [r["batch_hash"] for r in records] == [r["batch_hash"] for r in expected]
    with pytest.raises(ConfigError, match="first_samples"):
        path.write_text(f"{before}\n{phase.replace('first_sample', 'first_samples')}")
        load_run(run_file)


@pytest.mark.guarantee("resume-from-replays")
def test_a_run_that_begins_at_a_checkpoint_replays_its_steps_or_passes_over_samples(
    trained: RunConfig, run_file: str
) -> None:
    folder = Path(trained.train.out_dir)
    before = {record["step"]: record for record in read_metrics(folder / "metrics.jsonl")}
    other = f"train.out_dir={folder.parent}/other"
    begin = [other, f"train.resume_from={folder}/checkpoints/step-12"]
    again = start(run_file, *begin)
    again.resume()
    assert again.step == 12
    record, _ = again.train_step()
    assert (record["loss"], record["batch_hash"]) == (before[13]["loss"], before[13]["batch_hash"])
    again.step = 13
    again.save()
    again.close()
    restarted = start(run_file, *begin)
    restarted.resume()
    assert restarted.step == 13, "a restart goes on"
    restarted.close()
    skipping = start(run_file, "data.exclude_samples=[[96, 112]]", "data.num_samples=[200, 48, 0]")
    with pytest.raises(StateError, match="num_samples"):
        skipping.resume()  # in the Megatron order the number of samples is part of the order
    skipping.close()
    skipping = start(run_file, "data.exclude_samples=[[96, 112]]", f"{other}-2", begin[1])
    skipping.resume()
    assert skipping.step == 12
    record, _ = skipping.train_step()
    assert record["samples"] == [112, 120]
    assert record["batch_hash"] == before[15]["batch_hash"]
    skipping.close()


@pytest.mark.guarantee("sharded-computes-narrow")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_train_with_wide_main_ones_and_resume(run_file: str, dtype: str) -> None:
    wide_run = load_run(run_file, ["train.lr=0.01", f"train.out_dir={Path(run_file).parent}/wide"])
    Trainer(wide_run, CPU).run()
    wanted = records_of(wide_run)
    options = [
        f"train.dtype={dtype}",
        "parallel.optimizer=sharded",
        "train.lr=0.01",
        "train.save_interval=8",
        "train.keep_checkpoints=2",
    ]
    config = load_run(run_file, options)
    Trainer(config, CPU).run()
    records = records_of(config)
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in wanted], rel=0.01)
    assert [r["grad_norm"] for r in records] == pytest.approx(
        [r["grad_norm"] for r in wanted], rel=0.1
    )
    assert ("loss_scale" in records[-1]) == (dtype == "float16")
    other = f"train.out_dir={Path(run_file).parent}/other"
    back = start(run_file, *options, other, f"train.resume_from={config.train.out_dir}/step-8")
    back.resume()
    back.run()
    whole = [record["loss"] for record in records[8:]]
    assert [r["loss"] for r in records_of(back.config)] == whole
    wide = start(run_file, other)
    wide.resume()
    for ours, theirs in zip(
        back.model.chunks[0].parameters(), wide.model.chunks[0].parameters(), strict=True
    ):
        assert torch.equal(local_part(ours), theirs), "parameters are fp32 whatever computes"
    with pytest.raises(ConfigError, match=r"parallel\.optimizer = sharded"):
        load_run(run_file, [f"train.dtype={dtype}"])


@pytest.mark.guarantee("narrow-run-takes")
def test_a_narrow_run_takes_the_stored_wide_parameters_of_a_wide_one(
    trained: RunConfig, run_file: str
) -> None:
    wide = Trainer(trained, CPU)
    wide.resume()
    narrow = start(run_file, "train.dtype=bfloat16", "parallel.optimizer=sharded")
    narrow.resume()
    stored = dict(wide.model.chunks[0].named_parameters())
    for name, parameter in narrow.model.chunks[0].named_parameters():
        assert torch.equal(local_part(parameter), stored[name]), name


@pytest.mark.guarantee("metrics-jsonl-line")
def test_a_run_is_drawn(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    from streammega.cli.main import main

    config = load_run(run_file, ["train.save_interval=0"])
    Trainer(config, CPU).run()
    folder = Path(config.train.out_dir)
    assert main(["plot", str(folder)]) == 0
    assert "16 steps, loss" in capsys.readouterr().out
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(folder / "nothing")]) == 1
    assert "give the out_dir of a run" in capsys.readouterr().err


def run_until_bad(rank: int, run_file: str, overrides: list[str]) -> str:
    """The error that ends a run, in one of its first steps."""
    trainer = start(run_file, *overrides)
    try:
        for _ in range(4):
            trainer.train_step()
    except GradientError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.guarantee("bad-gradient-ends")
def test_a_bad_gradient_of_a_sharded_run_ends_all_ranks_with_its_parameter(
    gang: Gang, run_file: str
) -> None:
    overrides = [
        "parallel.optimizer=sharded",
        "train.save_interval=0",
        "train.lr=1e30",
        "train.warmup_iters=0",
    ]
    messages = gang.run(2, run_until_bad, run_file, overrides)
    assert re.search(r"the gradient of \S+ is not finite, summed over the ranks", messages[0])
    assert messages[0] == messages[1]


FP16 = [
    "data.order=stream",
    "train.dtype=float16",
    "parallel.optimizer=sharded",
    "train.eval_interval=0",
    "train.log_batch_hash=false",
]


def saved_steps(config: RunConfig) -> list[int]:
    return CheckpointStore.open(config.train.out_dir, config.data.storage).steps()


@pytest.mark.guarantee("run-diverged-ends")
def test_an_fp16_run_ends_at_a_loss_that_is_not_finite_and_keeps_its_checkpoints(
    run_file: str,
) -> None:
    """The scale of the loss is no cause of it, and no smaller one helps."""
    start(run_file, *FP16, "train.train_iters=6").run()
    ruin = load_run(run_file, [*FP16, "train.lr=1e30", "train.lr_decay_style=constant"])
    trainer = Trainer(ruin, CPU)
    trainer.resume()
    with pytest.raises(GradientError, match=r"the loss of step \d+ is (nan|inf)"):
        trainer.run()
    assert trainer.step < 9
    trainer.close()
    assert saved_steps(ruin) == [2, 4, 6]


@pytest.mark.guarantee("run-diverged-ends")
def test_a_checkpoint_is_saved_after_a_step_that_was_taken(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves between would drop the checkpoints before them, and keep the same weights again."""
    calls = 0
    unscale = LossScale.unscale

    def overflows(self: LossScale, *arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls not in (3, 4, 5, 6) and unscale(self, *arguments)

    monkeypatch.setattr(LossScale, "unscale", overflows)
    config = load_run(run_file, [*FP16, "train.train_iters=8", "train.keep_checkpoints=9"])
    Trainer(config, CPU).run()
    assert saved_steps(config) == [2, 7, 8]


@pytest.mark.guarantee("checkpoints-atomic-written")
def test_a_checkpoint_that_cannot_be_written_is_named_and_the_one_before_stays(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(run_file)
    trainer.train_step()
    trainer.save(background=True)
    trainer.checkpoints.wait()
    store = trainer.checkpoints.store
    (Path(trainer.config.train.out_dir) / "checkpoints" / "in-the-way").write_text(
        "a file where a folder is to be"
    )
    monkeypatch.setattr(store, "begin", lambda step: "in-the-way/draft")
    for background in (True, False):
        with pytest.raises(
            StorageError, match=r"cannot be written .* The checkpoints before it are whole"
        ):
            trainer.save(background=background)
            trainer.checkpoints.wait()
    assert store.steps() == [0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=2", "1 ranks are not a multiple of tp 2"),
        ("parallel.virtual_pipeline_stages=2", r"needs parallel\.pp of two"),
        ("parallel.optimizer=zero", "must be one of replicated, sharded"),
        ("parallel.data_parallel=torch", "unknown setting parallel.data_parallel"),
        ("parallel.optimiser=zero", "did you mean parallel.optimizer"),
        ("train.lr_decay_style=sine", "train.lr_decay_style"),
        ("parallel.pp=2", "1 ranks are not a multiple"),
        ("train.micro_batch_size=3", "is not a multiple of micro_batch_size 3 x dp_size 1"),
    ],
)
def test_layouts_that_cannot_work_are_named(run_file: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(run_file, override)


@pytest.mark.guarantee("pipelines-without-enough")
def test_a_pipeline_without_enough_micro_batches_is_named_before_it_starts(run_file: str) -> None:
    for stages, message in (
        (1, "has 2 micro-batches on each rank, and parallel.pp 4 needs at least 4"),
        (2, "needs a multiple of 4"),
    ):
        overrides = [
            "parallel.pp=4",
            f"parallel.virtual_pipeline_stages={stages}",
            "train.micro_batch_size=4",
        ]
        with pytest.raises(ConfigError, match=message):
            check_layout(load_run(run_file, overrides), ParallelLayout(pp=4))


@pytest.mark.guarantee("resume-from-replays")
@pytest.mark.parametrize(("order", "steps"), [("stream", 16), ("megatron", 14)])
def test_skipped_samples_are_made_up_for_where_the_order_has_no_end(
    run_file: str, order: str, steps: int
) -> None:
    """In the Megatron order the number of samples is part of the order: the run ends with them, by an
    error, and is saved.
    """
    config = load_run(
        run_file,
        [f"data.order={order}", "data.exclude_samples=[[16, 32]]", "train.eval_interval=0"],
    )
    if order == "megatron":
        pair = first_prefix(config.data)
        config = replace(
            config,
            data=replace(config.data, blend=[(pair, 0.5), (pair, 0.5)], num_samples=(128, 0, 0)),
        )
    trainer = Trainer(config, CPU)
    ends = pytest.raises(ConfigError, match="the data ends at sample 128, after step 14 of 16")
    with ends if order == "megatron" else nullcontext():
        trainer.run()
    records = records_of(config)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert trainer.checkpoints.store.steps()[-1] == steps


def test_a_run_whose_data_ends_before_its_last_step_does_not_end_well(
    run_file: str, pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f'data.blend=[["{pair}", 0.5], ["{pair}", 0.5]]',
        "data.order=megatron",
        "data.exclude_samples=[[16, 32]]",
        "train.eval_interval=0",
        "data.num_samples=[128,0,0]",
    ]
    assert train_main([run_file, *overrides]) == 1
    assert "the data ends at sample 128, after step 14 of 16" in capsys.readouterr().err


@pytest.mark.guarantee("settings-run-cannot")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.micro_batch_size=0", "train.micro_batch_size is 0; it must be at least 1"),
        ("train.lr=-1", "train.lr is -1.0; it must be at least 0"),
        ("train.lr=nan", "train.lr is nan"),
        ("train.recompute=2", "train.recompute is 2; it must be one of none, full"),
        (
            "train.weight_decay=inf",
            "train.weight_decay is inf; it must be at least 0 and less than inf",
        ),
        ("train.clip_grad=-1", "train.clip_grad is -1.0"),
        ("train.clip_grad=nan", "train.clip_grad is nan"),
        ("train.seed=18446744073709551616", "train.seed is 18446744073709551616"),
        ("train.collective_timeout=inf", "train.collective_timeout is inf"),
        ("train.train_iters=true", "train.train_iters is true; it must be a whole number"),
        ("model.layers=true", "model.layers is true; it must be a whole number"),
        ("parallel.bucket_size=true", "parallel.bucket_size is true; it must be a whole number"),
        (
            "train.warmup_iters=17",
            "train.warmup_iters is 17, more than train.train_iters 16: the learning",
        ),
        ("data.eod_id=1000", "eod_id is 1000, outside of the vocabulary of 1000"),
        ("train.out_dir=", "train.out_dir is ''; it must be a folder or a URL"),
        ("train.out_dir= ", "train.out_dir is ' '; it must be"),
        ("train.out_dir=s3://", "train.out_dir is 's3://'; it must be"),
        ("train.out_dir=s3:///", "train.out_dir is 's3:///'; it must be"),
        ("train.out_dir=s3:/bucket/run", "train.out_dir is 's3:/bucket/run'; it must be"),
        ("train.out_dir=S3:/bucket/run", "train.out_dir is 'S3:/bucket/run'; it must be"),
        ("train.out_dir=file:/tmp/run", "train.out_dir is 'file:/tmp/run'; it must be"),
        ("train.out_dir=file://", "train.out_dir is 'file://'; it must be"),
        ("train.rampup_batch_size=3", "settings of several values are lists"),
        ("validation.books=3", "validation.books is 3; it must be a blend"),
        ("validation.books=[]", "validation.books: the blend is empty"),
        ("data=3", "data is a setting; it must be a section: write [data]"),
        ("data.storage=7", "data.storage is a setting; it must be a section"),
        ("data.sequence_length=long", "sequence_length is 'long'; it must be a whole number"),
        ("parallel.tp=two", "parallel.tp is 'two'; it must be a whole number"),
    ],
)
def test_settings_that_no_run_can_have_are_refused_by_name(
    run_file: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_run(run_file, [override])


@pytest.mark.parametrize(
    "out_dir",
    ["run", "/", "~/run", "./s3:/run", "a:b/c", "file:///tmp/run", "s3://bucket", "mem://r"],
)
def test_folders_and_urls_are_taken_as_out_dir(run_file: str, out_dir: str) -> None:
    assert load_run(run_file, [f"train.out_dir={out_dir}"]).train.out_dir == out_dir


@pytest.mark.guarantee("settings-run-cannot")
def test_ids_that_the_model_has_no_embedding_for_are_refused(run_file: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.vocab_size is 2000, more than model\.vocab_size 1000"
    ):
        load_run(run_file, ["data.vocab_size=2000"])
    with pytest.raises(FormatError, match="outside of the vocabulary of 500"):
        start(run_file, "data.vocab_size=500").run()


@pytest.mark.guarantee("run-keeps-checkpoints")
def test_a_run_without_checkpoints_says_so_and_that_it_begins_anew(
    run_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_run(
        run_file, ["train.train_iters=2", "train.save_interval=0", "train.eval_interval=0"]
    )
    for number, warning in enumerate(("only SIGTERM or Ctrl-C make", "the run starts at step 0")):
        caplog.clear()
        trainer = Trainer(config, CPU)
        trainer.resume()
        assert trainer.step == 0
        trainer.run()
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == number + 1
        assert warning in said[0]
    assert "has no checkpoint of the 2 steps in its metrics.jsonl" in said[0]


def test_a_finished_run_says_so(
    trained: RunConfig, run_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert train_main([run_file]) == 0
    assert (
        "step 16: train.train_iters = 16 is reached, and nothing left to train; raise it to go on"
        in caplog.messages
    )


@pytest.mark.guarantee("moving-data-another")
@pytest.mark.parametrize("size", [4, 16])
def test_a_resumed_run_with_another_global_batch_size_goes_on_to_its_last_step(
    run_file: str, size: int
) -> None:
    settings = ["data.order=stream", "train.eval_interval=0"]
    first = start(run_file, *settings, "train.train_iters=6")
    first.run()
    consumed = first.batches.consumed_samples
    again = start(run_file, *settings, f"train.global_batch_size={size}", "train.train_iters=20")
    again.resume()
    again.run()
    assert again.step == 20
    assert again.batches.consumed_samples == consumed + 14 * size


@pytest.mark.guarantee("settings-training-differ")
def test_a_resume_says_in_one_line_which_settings_of_training_changed(
    run_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["data.order=stream", "train.eval_interval=0", "train.rampup_batch_size=[4, 4, 8]"]
    first = start(run_file, *settings, "train.train_iters=4", "train.lr=0.001")
    first.run()
    caplog.set_level(logging.INFO)
    said = "settings that differ from the checkpoint's: "
    start(run_file, *settings, "train.train_iters=4", "train.lr=0.001").resume()
    assert said not in caplog.text
    changed = ["train.train_iters=6", "train.lr=0.002", "train.lr_decay_style=constant"]
    start(run_file, *settings, *changed).resume()
    (line,) = [message for message in caplog.messages if message.startswith(said)]
    assert line == (
        f"{said}train.train_iters is 6, was 4; train.lr is 0.002, was 0.001; "
        "train.lr_decay_style is 'constant', was 'cosine'"
    )


@pytest.mark.guarantee("metrics-jsonl-line")
def test_metrics_are_json_whatever_happens_to_the_numbers(tmp_path: Path) -> None:
    log = run_log_in(tmp_path)
    log.write(
        {
            "step": 1,
            "loss": float("nan"),
            "grad_norm": float("inf"),
            "source_loss": {"web": float("nan"), "code": 1.5},
        }
    )
    line = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "source_loss": {"web": None, "code": 1.5},
    }


def test_what_a_power_failure_leaves_of_metrics_does_not_hinder_a_run(tmp_path: Path) -> None:
    log = run_log_in(tmp_path)
    log.write({"step": 1, "loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(bytes(100) + b'\n\xff\xfe\n[1]\n2\n{"loss": 1.0}\n{"step": "3"}\n{"step": 2')
    assert set(log.records()) == {1}
    run_log_in(tmp_path).write({"step": 2, "loss": 1.5})
    assert set(log.records()) == {1, 2}


def test_metrics_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    log = run_log_in(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl: Is a directory"):
        log.write({"step": 1, "loss": 2.0})


@pytest.mark.parametrize("failures", [2, 1000])
def test_metrics_wait_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    settings = StorageConfig().tuned(max_retries=2)
    log = run_log_in(tmp_path, settings)
    log.write({"step": 1, "loss": 2.0})
    write, failures_left = os.write, failures

    def write_part(fd: int, data: bytes) -> int:
        nonlocal failures_left
        if failures_left == 0:
            return write(fd, data)
        if data.startswith(b"{"):
            return write(fd, data[:5])
        failures_left -= 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_part)
        if failures == 2:
            log.write({"step": 2, "loss": 1.5})
            whole = (tmp_path / "metrics.jsonl").read_text()
            assert [json.loads(line)["step"] for line in whole.splitlines()] == [1, 2]
        else:
            with pytest.raises(StorageError, match=r"no space left.*failed after 3 tries"):
                log.write({"step": 2, "loss": 1.5})
    run_log_in(tmp_path, settings).write({"step": 3, "loss": 1.0})
    assert set(log.records()) == ({1, 2, 3} if failures == 2 else {1, 3})


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"),
            True,
        ),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("The size of tensor a (50) must match the size of tensor b (100)"), False),
        (KeyError("x"), False),
    ],
)
def test_what_fails_on_a_rank_itself_is_not_blamed_on_others(
    error: Exception, others: bool
) -> None:
    assert _is_of_others(error) is others
    wrapped = RuntimeError("Failed to run stage backward")
    wrapped.__cause__ = error
    assert _is_of_others(wrapped) is others


def test_an_out_dir_that_cannot_be_written_is_one_message(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert train_main([run_file, f"train.out_dir={tmp_path}/file/run"]) == 1
    assert "Not a directory; check permissions and free space there" in capsys.readouterr().err


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x/y", "storage_options do not fit: .*'host'"),
        ("what://x/y", "no storage has this scheme"),
    ],
)
def test_an_out_dir_of_a_store_that_cannot_be_opened_is_one_message(
    run_file: str, url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([run_file, f"train.out_dir={url}"]) == 1
    gc.collect()
    error = capsys.readouterr().err
    assert re.search(rf"error \(rank 0\): {url[:6]}.*{message}", error)
    assert "Traceback" not in error


def test_the_log_begins_with_the_ranks_in_words(
    run_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        start(run_file).close()
    assert (
        "ranks: 1 (tp 1, cp 1, dp 1, pp 1); each token is read once, over all ranks"
        in caplog.messages
    )


def test_a_run_does_not_tell_where_credentials_were_found(tmp_path: Path) -> None:
    code = """
import logging, sys
from streammega.train.program import main
main(["--help"])
logging.getLogger("botocore.credentials").info("Found credentials in environment variables.")
logging.getLogger("streammega.train").info("what the run says")
"""
    family = launch(tmp_path, 1, ["-c", code])
    assert family.ended(0, within=60) == [0], family.log(0)
    assert "what the run says" in family.log(0)
    assert "credentials" not in family.log(0)
