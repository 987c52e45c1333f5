"""The Trainer of transformers itself, and models of Hugging Face: the loss, and what is trained on.

`make integrations` installs transformers and TRL, and runs this.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import DataConfig, StreamLoader, add_losses_by_source
from streammega.errors import ConfigError, StateError
from streammega.integrations import transformers as integration
from streammega.integrations.transformers import causal_lm_batch
from tests.support.gang import Gang
from tests.support.trainer_kills import KILLS, TRANSFORMERS, TRL, check_killed_trainer
from tests.support.trainer_programs import (
    EOD,
    GLOBAL_BATCH,
    STEPS,
    VOCABULARY,
    accelerate_rank,
    huggingface_arguments,
    logged,
    rows_of,
    sft_train,
    sft_trainer,
    stream,
    tiny_model,
    trained_to_the_end,
    transformers_evaluate,
    transformers_train,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def needs_transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="needs transformers: make integrations installs it"
    )


def documents_of(rows: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    """A batch as a loader gives it where documents are kept apart."""
    from streammega import FieldsConfig, batch_fields

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(EOD + 1, VOCABULARY, (rows, length + 1), generator=generator)
    ids[:, 9] = EOD
    ids[1:, 20:22] = EOD
    fields = FieldsConfig(
        sequence_length=length,
        eod_id=EOD,
        eod_mask_loss=True,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    return batch_fields(ids, None, fields)


@pytest.mark.guarantee("transformers-loss-our")
def test_labels_are_given_in_both_forms() -> None:
    batch = documents_of()
    before = {name: field.clone() for name, field in batch.items()}
    made = causal_lm_batch(batch)
    learned = before["loss_mask"] == 1
    assert torch.equal(made["shift_labels"][learned], before["labels"][learned])
    assert set(made["shift_labels"][~learned].tolist()) == {-100}
    assert 0 < int((~learned).sum()) < learned.numel()
    assert torch.equal(made["labels"][:, 1:], made["shift_labels"][:, :-1])
    assert set(made["labels"][:, 0].tolist()) == {-100}
    assert all(torch.equal(batch[name], field) for name, field in before.items())


@pytest.mark.guarantee("transformers-loss-our")
@pytest.mark.usefixtures("needs_transformers")
def test_the_loss_of_a_model_is_that_of_our_labels_and_mask() -> None:
    """By hand: each document by itself, each label once, nothing of what is masked."""
    batch = documents_of()
    model = tiny_model().eval()
    with torch.no_grad():
        loss = model(**causal_lm_batch(batch), use_cache=False).loss
        total = torch.zeros(())
        for row in range(len(batch["tokens"])):
            starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 32]
            for start, stop in zip(starts, starts[1:], strict=False):
                logits = model(batch["tokens"][row : row + 1, start:stop]).logits[0]
                each = torch.nn.functional.cross_entropy(
                    logits, batch["labels"][row, start:stop], reduction="none"
                )
                total += (each * batch["loss_mask"][row, start:stop]).sum()
    torch.testing.assert_close(loss, total / batch["loss_mask"].sum())


@pytest.mark.guarantee("transformers-killed-run")
@pytest.mark.usefixtures("needs_transformers")
@KILLS
def test_a_killed_run_resumes_exactly(
    gang: Gang, endless: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    check_killed_trainer(gang, TRANSFORMERS, endless, tmp_path, before, after)


@pytest.mark.guarantee("trl-sfttrainer-killed")
@pytest.mark.usefixtures("needs_transformers")
@KILLS
def test_a_killed_run_of_trls_trainer_resumes_exactly(
    gang: Gang, endless: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    pytest.importorskip("trl", reason="needs TRL: make integrations installs it")
    check_killed_trainer(gang, TRL, endless, tmp_path, before, after)


@pytest.mark.guarantee("trainers-batch-size")
@pytest.mark.usefixtures("needs_transformers")
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_fewer_processes_do_not_change_the_global_batch_without_a_word(
    gang: Gang, endless: DataConfig, tmp_path: Path, trainer: str
) -> None:
    from transformers import TrainingArguments

    if trainer == "trl":
        pytest.importorskip("trl", reason="needs TRL: make integrations installs it")
        from trl import SFTConfig

    train = transformers_train if trainer == "transformers" else sft_train
    gang.run(2, train, endless, str(tmp_path), 2, None, 2)
    checkpoint = str(tmp_path / "checkpoint-2")

    def resume(micro_batches: int, options: dict[str, Any]) -> int:
        with accelerate_rank(0, 1):
            settings: Any = {"micro_batches": micro_batches}
            if trainer == "trl":
                arguments = huggingface_arguments(
                    SFTConfig, str(tmp_path / "one"), 1, 4, bf16=False, **settings
                )
                made = sft_trainer(arguments, endless, stream_options=options)
            else:
                arguments = huggingface_arguments(
                    TrainingArguments, str(tmp_path / "one"), 1, 4, **settings
                )
                made = integration.StreamTrainer(
                    model=tiny_model(), args=arguments, stream=endless, stream_options=options
                )
            state = trained_to_the_end(made, checkpoint)
            return int(state["consumed_samples"])

    message = (
        "a global batch of 8 samples, and this run has 4: to keep it, set "
        "gradient_accumulation_steps=4. If"
    )
    with pytest.raises(StateError, match=message):
        resume(2, {})
    assert resume(4, {}) == 4 * GLOBAL_BATCH
    assert resume(2, {"allow_batch_size_change": True}) == 2 * GLOBAL_BATCH + 2 * 4


@pytest.mark.guarantee("transformers-killed-run")
@pytest.mark.usefixtures("needs_transformers")
def test_epochs_are_passes_and_a_resume_within_one_ends_with_it(
    sized: DataConfig, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    steps = 2 * STEPS + 2
    transformers_train(0, sized, str(whole), 1, None, steps)
    assert logged(whole, 1) == stream(sized, steps)
    checkpoint = str(whole / "checkpoint-16")
    saved = json.loads((whole / "checkpoint-16" / "trainer_state.json").read_text())
    position = saved["stateful_callbacks"]["StreamPosition"]["attributes"]["position"]
    assert position["consumed_samples"] == 3 * GLOBAL_BATCH, "of the second pass"
    transformers_train(0, sized, str(resumed), 1, checkpoint, steps)
    assert logged(resumed, 1) == stream(sized, steps)[16 * GLOBAL_BATCH :]


@pytest.mark.guarantee("transformers-checkpoints-without")
@pytest.mark.usefixtures("needs_transformers")
def test_checkpoints_without_a_position_or_of_other_data_are_refused(
    sized: DataConfig, tmp_path: Path
) -> None:
    transformers_train(0, sized, str(tmp_path), 1, None, 2)
    checkpoint = tmp_path / "checkpoint-2"
    seen = len(logged(tmp_path, 1))
    with pytest.raises(StateError, match="seed"):
        transformers_train(0, replace(sized, seed=5), str(tmp_path), 1, str(checkpoint), 4)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    without: list[Any] = [{"args": {}, "attributes": {"position": {}}}, {"args": {}}, []]
    for damaged in without:
        state["stateful_callbacks"]["StreamPosition"] = damaged
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        with pytest.raises(StateError):
            transformers_train(0, sized, str(tmp_path), 1, str(checkpoint), 4)
    assert len(logged(tmp_path, 1)) == seen, "before the first batch"


@pytest.mark.guarantee("transformers-checkpoints-without")
def test_samples_that_these_models_cannot_be_told_of_are_refused(endless: DataConfig) -> None:
    mixin = integration.StreamTrainerMixin
    with pytest.raises(ConfigError, match="leave attention_mask out of fields"):
        mixin(stream=replace(endless, fields=[..., "attention_mask"]))
    with pytest.raises(ConfigError, match="both reset_position_ids and reset_attention_mask"):
        mixin(stream=replace(endless, reset_position_ids=True))
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = integration.Other


@pytest.mark.guarantee("transformers-checkpoints-without")
@pytest.mark.usefixtures("needs_transformers")
def test_a_model_that_would_let_documents_see_each_other_is_refused(
    endless: DataConfig, tmp_path: Path
) -> None:
    """With a cache transformers ignores where positions begin again."""
    from transformers import TrainingArguments

    apart = replace(endless, reset_position_ids=True, reset_attention_mask=True)
    with accelerate_rank(0, 1):
        quiet = huggingface_arguments(TrainingArguments, str(tmp_path), 1, 1)
        trainer = integration.StreamTrainer(model=tiny_model(), args=quiet, stream=apart)
        assert trainer.model.config.use_cache is False, "what a Trainer sets by itself"
        caching = huggingface_arguments(TrainingArguments, str(tmp_path), 1, 1, use_cache=True)
        with pytest.raises(ConfigError, match="use_cache=False"):
            integration.StreamTrainer(model=tiny_model(), args=caching, stream=apart)


@pytest.mark.guarantee("trainer-transformers-evaluates")
@pytest.mark.usefixtures("needs_transformers")
@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_goes_through_the_valid_split_every_time(
    gang: Gang, sized: DataConfig, tmp_path: Path, size: int
) -> None:
    answers = gang.run(size, transformers_evaluate, sized, str(tmp_path), size, 4)
    with StreamLoader(sized, split="valid", micro_batch_size=2, global_batch_size=2) as loader:
        batches = list(loader)
    model = tiny_model().eval()
    with torch.no_grad():
        losses = [model(**causal_lm_batch(batch), use_cache=False).loss for batch in batches]
    expected = [row for batch in batches for row in rows_of(batch)]
    for rank, (loss, seen) in enumerate(answers):
        assert seen == expected[rank::size] * 3, "after two and four steps, and once more"
        assert loss == pytest.approx(float(sum(losses) / len(losses)))
    assert logged(tmp_path, size) == stream(sized, 4), "training does not notice"


@pytest.mark.guarantee("trainer-transformers-evaluates")
@pytest.mark.usefixtures("needs_transformers")
def test_what_cannot_be_evaluated_is_refused_and_other_datasets_are_the_trainers(
    endless: DataConfig, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    with accelerate_rank(0, 1):
        quiet = huggingface_arguments(TrainingArguments, str(tmp_path), 1, 1)
        config = replace(endless, split="1,0,0")
        trainer = integration.StreamTrainer(model=tiny_model(), args=quiet, stream=config)
        with pytest.raises(ConfigError, match="no valid split to evaluate"):
            trainer.evaluate()
        one: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
        trainer = integration.StreamTrainer(
            model=tiny_model(), args=quiet, stream=endless, eval_dataset=one
        )
        assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.guarantee("trainer-transformers-evaluates")
@pytest.mark.usefixtures("needs_transformers")
def test_a_valid_split_of_too_few_samples_is_refused_before_the_first_step(
    endless: DataConfig, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    config = replace(endless, split="99,1,0")
    with accelerate_rank(0, 1):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 64}
        arguments = huggingface_arguments(TrainingArguments, str(tmp_path), 1, 4, **settings)
        trainer = integration.StreamTrainer(model=tiny_model(), args=arguments, stream=config)
        with pytest.raises(ConfigError, match="less than one global batch of 64"):
            trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.guarantee("samples-tell-dataset")
@pytest.mark.usefixtures("needs_transformers")
def test_losses_by_source_of_a_trainer_of_ones_own_make_up_the_loss(
    config: DataConfig, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    from streammega.integrations.transformers import StreamTrainer

    (prefix,) = config.blend or ()
    stream_config = replace(
        config, blend=[(str(prefix), 3.0), (str(prefix), 1.0)], fields=[..., "dataset_id"]
    )
    arguments = huggingface_arguments(TrainingArguments, str(tmp_path), 1, 2)
    arguments.logging_strategy = "steps"
    arguments.logging_steps = 1
    arguments.learning_rate = 0.0
    sums = torch.zeros(2, 2, dtype=torch.float64)
    sums_of_steps: list[list[list[float]]] = []

    class SourceTrainer(StreamTrainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any
        ) -> Any:
            dataset_id = inputs.pop("dataset_id")
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keywords)
            labels = inputs["shift_labels"]
            each = torch.nn.functional.cross_entropy(
                outputs.logits.transpose(1, 2).float(), labels, reduction="none"
            )
            add_losses_by_source(sums, dataset_id, each, labels != -100)
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
            sums_of_steps.append(sums.tolist())
            sums.zero_()
            super().log(logs, *arguments, **keywords)

    trainer = SourceTrainer(model=tiny_model(), args=arguments, stream=stream_config)
    trainer.train()
    trainer.callback_handler.train_dataloader.close()
    whole: Any = {"micro_batch_size": GLOBAL_BATCH, "global_batch_size": GLOBAL_BATCH}
    model = trainer.model.eval()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    with StreamLoader(stream_config, **whole) as loader, torch.no_grad():
        for entry, sums_of_step in zip(logs, sums_of_steps, strict=False):
            batch = loader.take()
            logits = model(batch["tokens"], use_cache=False).logits
            each = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch["labels"], reduction="none"
            )
            for number in range(2):
                expected = each[batch["dataset_id"] == number].mean()
                loss, tokens = sums_of_step[number]
                assert loss / tokens == pytest.approx(float(expected), rel=1e-5)
            assert entry["loss"] == pytest.approx(float(each.mean()), rel=1e-4)
