"""A loss weighted by token, as in selective language modelling: a reference model says which tokens count,
and their weights are stored next to the tokens, in a column.

    python tools/examples/weights.py selected    # the half of the tokens that the reference predicts best
    python tools/examples/weights.py ones        # all of them: the loss is the plain one
    python tools/examples/weights.py plain       # the plain loss, without a column

The first run makes the dataset, in the folder weights-data; each run writes its column anew.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import streammega as sm

PREFIX = Path("weights-data/web")
VOCAB_SIZE = 128
LENGTH = 64
BATCH = 8
STEPS = 40


def main() -> None:
    if sys.argv[1:] not in (["selected"], ["ones"], ["plain"]):
        sys.exit("usage: python tools/examples/weights.py selected|ones|plain")
    column = sys.argv[1]
    if not PREFIX.with_suffix(".idx").exists():
        write_data()
    reference = new_model()
    if column == "selected":
        train(reference, "plain")
    if column != "plain":
        write_weights(column, reference)
    for step, loss in enumerate(train(new_model(), column)):
        if step % 10 == 9:
            print(f"step {step}: loss {loss:.6f}")


def write_data() -> None:
    """Documents in which an id follows from the one before, but for a third of them, which are noise."""
    rng = np.random.default_rng(0)
    PREFIX.parent.mkdir(exist_ok=True)
    with sm.IndexedDatasetWriter(str(PREFIX), np.uint16) as writer:
        for _ in range(400):
            ids = rng.integers(0, VOCAB_SIZE, 100)
            for place in np.flatnonzero(rng.random(100) > 1 / 3)[1:]:
                ids[place] = (5 * ids[place - 1] + 1) % VOCAB_SIZE
            writer.add_document(ids, [len(ids)])


def write_weights(column: str, reference: nn.Module) -> None:
    """Read every sample once, in the order of the files, and write a weight for each of its labels."""
    data = sm.DataConfig(
        blend=[str(PREFIX)], sequence_length=LENGTH, order="sequential", split="1,0,0"
    )
    sizes = {"micro_batch_size": BATCH, "global_batch_size": BATCH}
    with sm.StreamLoader(data, **sizes, last="pad") as loader:
        writer = sm.ColumnWriter(loader, {column: sm.Column("float16")}, restart=True)
        for batch in loader:
            weights = torch.ones(BATCH, LENGTH)
            if column == "selected":
                with torch.no_grad():
                    losses = losses_of(reference, batch)
                weights = losses < losses.median()
            writer.write({column: weights.half()})
        writer.publish()


def train(model: nn.Module, column: str) -> list[float]:
    """The loss of each step."""
    columns = [] if column == "plain" else [column]
    data = sm.DataConfig(blend=[str(PREFIX)], sequence_length=LENGTH, columns=columns)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    reached = []
    with sm.StreamLoader(data, micro_batch_size=BATCH, global_batch_size=BATCH) as loader:
        for _, batch in zip(range(STEPS), loader, strict=False):
            losses = losses_of(model, batch)
            if columns:
                weights = batch[column].float()
                # of all ranks and micro-batches of a step: divide by the sum of all their weights
                loss = (losses * weights).sum() / weights.sum()
            else:
                loss = losses.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reached.append(float(loss.detach()))
    return reached


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB_SIZE, 64), nn.Linear(64, VOCAB_SIZE))


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of each label, [BATCH, LENGTH]."""
    logits = model(batch["tokens"]).transpose(1, 2)
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


if __name__ == "__main__":
    main()
