"""Lightning's own Trainer and Fabric with the data module: what is trained on, token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.errors import ConfigError, StateError
from streammega.integrations.lightning import ConsumedBatches
from tests.support.builders import write_random_pair
from tests.support.gang import Gang
from tests.support.processes import launch
from tests.support.trainer_kills import (
    FABRIC,
    KILLS,
    KILLS_OF_THE_BARE_LOADER,
    LIGHTNING,
    check_killed_trainer,
)
from tests.support.trainer_programs import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SIZES,
    STEPS,
    RowLog,
    accumulation,
    lightning_fit,
    lightning_module,
    lightning_validate,
    logged,
    rank_environment,
    rows_of,
    stream,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, of few workers and few batches


@pytest.fixture(params=["sized", "endless"])
def config(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def folder_of(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


@pytest.mark.guarantee("lightning-fabric-killed")
@pytest.mark.parametrize("estimate", [False, True])
def test_a_resume_goes_on_with_the_next_sample(
    config: DataConfig, tmp_path: Path, estimate: bool
) -> None:
    """With and without a length, also where configure_optimizers asks how long the run will be."""
    first = folder_of(tmp_path, "first")
    state = lightning_fit(0, config, first, 1, max_steps=6)
    assert state["consumed_samples"] == 6 * GLOBAL_BATCH
    assert len(json.dumps(state)) < 1024
    assert logged(Path(first), 1) == stream(config, 6)
    second = folder_of(tmp_path, "second")
    checkpoint = str(Path(first) / "step=0004.ckpt")
    endless = config.num_samples is None
    limit = {"max_steps": 12, "max_epochs": 3} if endless else {"max_epochs": 2}
    lightning_fit(0, config, second, 1, checkpoint, estimate, **limit)
    steps = 12 if endless else 2 * STEPS
    assert logged(Path(second), 1) == stream(config, steps)[4 * GLOBAL_BATCH :]


@pytest.mark.guarantee("lightning-fabric-killed")
@KILLS
def test_a_killed_run_resumes_exactly(
    gang: Gang, endless: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    check_killed_trainer(gang, LIGHTNING, endless, tmp_path, before, after)


@pytest.mark.guarantee("lightning-fabric-killed")
@KILLS_OF_THE_BARE_LOADER
def test_a_killed_run_of_fabric_resumes_exactly(
    gang: Gang, endless: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    check_killed_trainer(gang, FABRIC, endless, tmp_path, before, after)


@pytest.mark.guarantee("epochs-repeat-lose")
@pytest.mark.parametrize("per_epoch", [1.0, 20])
def test_epochs_go_through_the_data_and_repeat_or_lose_nothing(
    config: DataConfig, tmp_path: Path, per_epoch: float
) -> None:
    """An epoch that is cut short is gone on from behind its last batch, though without a length
    Lightning had fetched one more.
    """
    folder = folder_of(tmp_path, "run")
    limit: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": per_epoch}
    if per_epoch == 1.0 and config.num_samples is None:
        limit = {"max_steps": 30}
    lightning_fit(0, config, folder, 1, **limit)
    rows = logged(Path(folder), 1)
    expected = {1.0: 3 * STEPS, 20: 15}[per_epoch]
    if per_epoch == 20 and config.num_samples is not None:
        expected = 5 + 5 + 3  # an epoch ends with the pass
    if "max_steps" in limit:
        expected = 30
    assert rows == stream(config, expected)


class StepModule:
    """Notes the samples of each optimizer step; and saves, or fails, within a micro-batch."""

    def __init__(self, *, manual: bool = False, save_after: int = 0, fail_at: int = 0) -> None:
        from pytorch_lightning import Callback, LightningModule

        class Model(LightningModule):
            def __init__(model) -> None:
                super().__init__()
                model.weight = torch.nn.Parameter(torch.zeros(()))
                model.automatic_optimization = not manual

            def training_step(model, batch: Any, batch_idx: int) -> Any:
                if batch_idx + 1 == fail_at:
                    raise RuntimeError("in the middle of a step")
                self.pending += rows_of(batch)
                loss = model.weight * batch["tokens"].numel()
                if not manual:
                    return loss
                model.manual_backward(loss)
                if (batch_idx + 1) % 4 == 0:
                    model.optimizers().step()  # type: ignore[union-attr]
                    model.optimizers().zero_grad()  # type: ignore[union-attr]
                return None

            def configure_optimizers(model) -> Any:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.register_step_post_hook(self.note_step)
                return optimizer

        class Saving(Callback):
            def on_train_batch_end(
                callback, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if batch_idx + 1 == save_after:
                    trainer.save_checkpoint(self.path)

        self.steps: list[list[list[int]]] = []
        self.pending: list[list[int]] = []
        self.path = ""
        self.model = Model()
        self.saving = Saving()

    def note_step(self, *_: Any) -> None:
        self.steps.append(self.pending)
        self.pending = []

    def fit(self, config: DataConfig, path: Path, steps: int, resume: bool = False) -> Any:
        """Train up to an optimizer step; the data module."""
        from pytorch_lightning import Trainer

        from streammega.integrations.lightning import StreamDataModule

        self.path = str(path)
        accumulate = 4 if self.model.automatic_optimization else 1
        self.trainer = Trainer(
            accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulate,
            enable_checkpointing=False, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[self.saving],
        )  # fmt: skip
        data = StreamDataModule(config, **SIZES)
        self.trainer.fit(self.model, datamodule=data, ckpt_path=str(path) if resume else None)
        return data


@pytest.mark.guarantee("states-of-whole-steps")
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("after", [1, 3, 4, 5, 7])
def test_a_checkpoint_within_an_accumulation_is_that_of_the_last_step(
    config: DataConfig, tmp_path: Path, after: int, manual: bool
) -> None:
    """As one by time is. Every later step is of the samples of an uninterrupted run."""
    path = tmp_path / "middle.ckpt"
    whole = StepModule(manual=manual, save_after=after)
    whole.fit(config, path, 4)
    assert [row for step in whole.steps for row in step] == stream(config, 4)
    resumed = StepModule(manual=manual)
    data = resumed.fit(config, path, 4, resume=True)
    assert resumed.steps == whole.steps[after // 4 :]
    assert data.state_dict()["consumed_samples"] == 4 * GLOBAL_BATCH
    assert torch.equal(resumed.model.weight, whole.model.weight)


@pytest.mark.guarantee("states-of-whole-steps")
def test_a_checkpoint_of_an_exception_is_that_of_the_last_step(
    config: DataConfig, tmp_path: Path
) -> None:
    path = tmp_path / "middle.ckpt"
    failing = StepModule(fail_at=7)
    with pytest.raises(RuntimeError, match="in the middle"):
        failing.fit(config, path, 9)
    failing.trainer.save_checkpoint(path)
    resumed = StepModule()
    resumed.fit(config, path, 9, resume=True)
    assert [row for step in failing.steps + resumed.steps for row in step] == stream(config, 9)
    for save_after, left in ((6, 8), (4 * 7 + 2, 2)):  # of a run that was resumed itself
        again = StepModule(save_after=save_after)
        again.fit(config, path, 9, resume=True)
        resumed = StepModule()
        resumed.fit(config, path, 9, resume=True)
        assert resumed.steps == again.steps[-left:]


@pytest.mark.guarantee("states-of-whole-steps")
def test_a_step_of_what_is_left_of_an_epoch_is_whole(config: DataConfig, tmp_path: Path) -> None:
    """Lightning steps at the end of an epoch, also within an accumulation."""
    from pytorch_lightning import Trainer

    from streammega.integrations.lightning import StreamDataModule

    data = StreamDataModule(config, **SIZES)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=6, accumulate_grad_batches=4,
        enable_checkpointing=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = StepModule()
    trainer.fit(module.model, datamodule=data)
    assert [len(step) for step in module.steps] == [GLOBAL_BATCH, 2 * MICRO_BATCH]
    assert data.state_dict()["consumed_samples"] == 6 * MICRO_BATCH


@pytest.mark.guarantee("lightning-states-loaded")
def test_states_are_loaded_twice_after_iterating_and_refused_where_they_are_foreign(
    endless: DataConfig,
) -> None:
    from streammega.integrations.lightning import StreamDataModule

    rows = stream(endless, 4)
    data = StreamDataModule(endless, **SIZES)
    assert data.state_dict() == {}
    batches = data.train_dataloader()
    begun = iter(batches)
    state = data.state_dict()
    for _ in range(2):
        data.load_state_dict(state)
    assert rows_of(next(begun)) == rows[:2], "nothing was taken: it goes on at the loaded place"
    batches.mark_consumed()
    assert data.state_dict() == state, "no step was made of it"
    batches.mark_step()
    after_one = data.state_dict()
    next(begun)
    assert data.state_dict() == after_one, "the second was fetched, and is not trained on"
    for foreign in ({}, {"epoch": 3}, after_one | {"fingerprint": "0"}):
        with pytest.raises(StateError):
            data.load_state_dict(foreign)
        assert data.state_dict() == after_one
    other = StreamDataModule(replace(endless, seed=8), **SIZES)
    with pytest.raises(StateError, match="seed"):
        other.load_state_dict(after_one)
    data.load_state_dict(after_one)
    for _ in range(2):
        with pytest.raises(StateError, match="load_state_dict moved its loader"):
            next(begun)
    assert rows_of(next(iter(batches))) == rows[2:4]
    data.seek(GLOBAL_BATCH)
    assert rows_of(next(iter(batches))) == rows[8:10]
    data.teardown("fit")


@pytest.mark.guarantee("epochs-repeat-lose")
@settings(max_examples=12)
@given(
    ahead=st.booleans(),
    events=st.lists(
        st.sampled_from(["train", "train", "train", "step", "epoch", "resume"]), max_size=30
    ),
)
def test_epochs_and_resumes_in_any_order_train_on_the_stream(
    ahead: bool, events: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As Lightning goes about batches, with one fetched ahead where there is no length."""
    folder = Path(tmp_path_factory.getbasetemp()) / "any"
    if not folder.exists():
        write_random_pair(str(folder / "pair"))
    config = DataConfig(
        blend=[str(folder / "pair")],
        sequence_length=16,
        order="stream",
        storage=StorageConfig(cache_dir=folder),
    )
    batches = ConsumedBatches(StreamLoader(config, **SIZES))
    iterator = iter(batches)
    waiting = [next(iterator)] if ahead else []
    rows: list[list[int]] = []
    stepped = 0
    for event in events:
        if event == "train":
            waiting.append(next(iterator))
            rows += rows_of(waiting.pop(0))
            batches.mark_consumed()
            continue
        if event == "step":
            batches.mark_step()
            stepped = len(rows)
            continue
        if event == "resume":
            del rows[stepped:]
            state = json.loads(json.dumps(batches.state_dict()))
            batches.loader.close()
            batches = ConsumedBatches(StreamLoader(config, **SIZES))
            batches.load_state_dict(state)
        iterator = iter(batches)
        waiting = [next(iterator)] if ahead else []
    batches.loader.close()
    assert rows == stream(config, len(rows) // GLOBAL_BATCH + 1)[: len(rows)]


@pytest.mark.guarantee("epochs-repeat-lose")
def test_an_epoch_that_cannot_begin_loses_no_batch(endless: DataConfig) -> None:
    rows = stream(endless, 1)
    with StreamLoader(endless, **SIZES) as loader:
        batches = ConsumedBatches(loader)
        next(iter(batches))  # fetched, and not trained on
        with loader._begin()._lock, pytest.raises(StateError, match="another thread waits"):
            iter(batches)
        assert rows_of(next(iter(batches))) == rows[: SIZES["micro_batch_size"]]


def test_the_module_is_of_the_package_that_is_used(endless: DataConfig, tmp_path: Path) -> None:
    """`lightning.pytorch` and `pytorch_lightning` know nothing of each other's classes."""
    pytest.importorskip("lightning", reason="make integrations installs it")
    program = """
import lightning.pytorch as used
from streammega import DataConfig
from streammega.integrations.lightning import StreamDataModule
assert issubclass(StreamDataModule, used.LightningDataModule)
class Model(used.LightningModule):
    def training_step(self, batch, batch_idx):
        pass
    def configure_optimizers(self):
        pass
config = DataConfig(blend=["mock://tokens=100000,vocab=99"], sequence_length=16, order="stream")
data = StreamDataModule(config, micro_batch_size=2, global_batch_size=2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = used.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=3, **quiet)
trainer.fit(Model(), datamodule=data)
assert data.state_dict()["consumed_samples"] == 6
"""
    family = launch(tmp_path, 1, ["-c", program], {"PYTHONWARNINGS": "ignore"})
    codes = family.ended(0, within=120)
    printed = family.log(0)
    family.close()
    assert codes == [0], printed[-3000:]


@pytest.mark.guarantee("opened-before-trainer")
def test_what_was_opened_before_a_trainer_said_the_rank_is_opened_again(
    endless: DataConfig, tmp_path: Path
) -> None:
    from streammega.integrations.lightning import StreamDataModule

    data = StreamDataModule(endless, **SIZES)
    assert data.loader.dataset.dp_size == 1
    data.seek(GLOBAL_BATCH)
    module = lightning_module(RowLog(str(tmp_path), 0))
    data.trainer = SimpleNamespace(
        distributed_sampler_kwargs={"rank": 1, "num_replicas": 2},
        accumulate_grad_batches=2,
        enable_validation=False,
        callbacks=[],
        ckpt_path="a.ckpt",
        lightning_module=module,
    )
    batches = data.train_dataloader()
    assert (data.loader.dataset.dp_rank, data.loader.dataset.dp_size) == (1, 2)
    rows = stream(endless, 2)[GLOBAL_BATCH:]
    assert rows_of(next(iter(batches))) == [rows[1], rows[3]]
    assert data.train_dataloader() is batches
    data.teardown("fit")


@pytest.mark.guarantee("ranks-said")
def test_a_strategy_of_one_process_in_a_job_of_several_is_refused(
    endless: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would train by itself on the same batches."""
    from streammega.integrations.lightning import StreamDataModule

    monkeypatch.setenv("WORLD_SIZE", "2")
    alone: Any = SimpleNamespace(distributed_sampler_kwargs=None)
    data = StreamDataModule(endless, **SIZES)
    data.trainer = alone
    for open_loader in (data.train_dataloader, data.val_dataloader):
        with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2 .*or dp_size=1"):
            open_loader()
    meant = StreamDataModule(endless, dp_size=1, **SIZES)
    meant.trainer = alone
    assert meant.loader.dataset.dp_size == 1


@pytest.mark.guarantee("lightning-states-loaded")
def test_what_cannot_be_right_is_refused_before_the_first_batch(
    endless: DataConfig, sized: DataConfig, tmp_path: Path
) -> None:
    from streammega.integrations import lightning
    from streammega.integrations.lightning import StreamDataModule

    folder = folder_of(tmp_path, "run")
    with pytest.raises(ConfigError, match="accumulate_grad_batches=4"):
        lightning_fit(0, endless, folder, 1, accumulate=2, max_steps=2)
    with pytest.raises(ConfigError, match="leave out rampup_batch_size"):
        StreamDataModule(endless, rampup_batch_size=(4, 4, 16), **SIZES)
    with pytest.raises(ConfigError, match="go together"):
        StreamDataModule(endless, dp_rank=1, **SIZES)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = lightning.Other
    lightning_fit(0, sized, folder, 1, max_steps=2)
    (path,) = Path(folder).glob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    del saved["StreamDataModule"]
    torch.save(saved, path)
    with pytest.raises(StateError, match="has no position of StreamDataModule"):
        lightning_fit(0, sized, folder, 1, str(path), max_steps=4)
    assert len(logged(Path(folder), 1)) == 2 * GLOBAL_BATCH, "of the run that was right"


@pytest.mark.guarantee("epochs-repeat-lose")
def test_evaluation_is_the_whole_split_and_may_be_empty(
    endless: DataConfig, sized: DataConfig
) -> None:
    from streammega.integrations.lightning import StreamDataModule

    valid = StreamDataModule(sized, **SIZES).val_dataloader()
    assert rows_of(next(iter(valid))) == rows_of(next(iter(valid)))
    assert len(valid) == 8
    valid.close()
    assert StreamDataModule(sized, **SIZES).test_dataloader() == []
    whole = StreamDataModule(endless, **SIZES).val_dataloader()
    rows = [row for batch in whole for row in rows_of(batch)]
    assert len(rows) == len(whole) * SIZES["micro_batch_size"]
    assert 0 <= whole.dataset.samples.num_samples - len(rows) < SIZES["global_batch_size"]
    whole.close()


@pytest.mark.guarantee("epochs-repeat-lose")
def test_a_validation_reads_each_sample_once_over_ranks_or_is_refused(
    gang: Gang, endless: DataConfig, tmp_path: Path
) -> None:
    """An endless stream has no end of an epoch, where Lightning would validate by default."""
    from streammega.integrations.lightning import StreamDataModule

    folder = folder_of(tmp_path, "run")
    often = partial(lightning_validate, max_steps=4, val_check_interval=2 * accumulation(2))
    ranks = gang.run(2, often, endless, folder, 2)
    whole = StreamDataModule(endless, **SIZES).val_dataloader()
    expected = sorted(row for batch in whole for row in rows_of(batch))
    whole.close()
    assert [len(validations) for validations in ranks] == [2, 2]
    for number in range(2):
        assert sorted(ranks[0][number] + ranks[1][number]) == expected
    with pytest.raises(
        ConfigError, match=r"would never validate: give it val_check_interval=COUNT"
    ):
        lightning_validate(0, endless, folder, 1, max_steps=4)
    for way in ({"limit_val_batches": 0}, {"limit_train_batches": 8}):
        lightning_validate(0, endless, folder, 1, max_steps=4, **way)


@pytest.mark.guarantee("fabric-saves-loads")
def test_fabric_keeps_the_position_with_the_model(sized: DataConfig, tmp_path: Path) -> None:
    from lightning_fabric import Fabric

    with rank_environment(0, 1):
        fabric = Fabric(accelerator="cpu", devices=1)
        model = torch.nn.Linear(1, 1)
        rows = stream(sized, STEPS)
        with StreamLoader(sized, **SIZES) as loader:
            assert rows_of(fabric.to_device(next(loader))) == rows[:2]
            fabric.save(tmp_path / "fabric.ckpt", {"model": model, "data": loader})
        with StreamLoader(sized, **SIZES) as loader:
            fabric.load(tmp_path / "fabric.ckpt", {"model": model, "data": loader})
            assert [row for batch in loader for row in rows_of(batch)] == rows[2:]
