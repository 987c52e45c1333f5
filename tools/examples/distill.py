"""Distillation from stored logits: a teacher writes its top-k for every token next to the tokens, once; a
student reads them with the tokens, in any order, on any number of ranks.

    torchrun --nproc-per-node 2 tools/examples/distill.py teach s3://bucket/web 50304
    torchrun --nproc-per-node 2 tools/examples/distill.py learn s3://bucket/web 50304

The data is packed into bins of LENGTH tokens (streammega convert ... --pack-length 64): a sample is a bin
then, so the teacher and the student see a token in the same context. The number is the size of the
vocabulary. Both go on where they stopped, on any number of ranks; `online` in place of `learn` asks the
teacher at every step, for comparison.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import log_softmax

import streammega as sm

LENGTH = 64
TOP = 8
GLOBAL_BATCH = 8
STEPS = int(os.environ.get("STEPS", "20"))
SAVE_EVERY = 4
TEACHER_STATE = Path(os.environ.get("STATE", "teacher-state.json"))
STUDENT_STATE = Path(os.environ.get("STATE", "student-state.pt"))
COLUMNS = {
    "teacher_ids": sm.Column("uint16", TOP),
    "teacher_logprobs": sm.Column("float16", TOP, fill=-float("inf")),
}


class Model(nn.Module):
    """A tiny model of the next token, which depends on all tokens before it."""

    def __init__(self, vocab_size: int, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(vocab_size, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the next token."""
        return log_softmax(self.head(self.layer(self.embedding(tokens))[0]), -1)


def top(teacher: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the teacher's k most likely tokens are, and their log-probabilities, as they are stored."""
    with torch.no_grad():
        logprobs, ids = teacher(tokens).topk(TOP)
    return ids.to(torch.uint16), logprobs.to(torch.float16)


def teach(prefix: str, vocab_size: int, rank: int, world: int) -> None:
    """Write the teacher's top-k of every label, once."""
    teacher = Model(vocab_size, 48, seed=1)
    data = sm.DataConfig(blend=[prefix], sequence_length=LENGTH, order="sequential")
    loader = sm.StreamLoader(
        data,
        micro_batch_size=2,
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_size=world,
        last="pad",
    )
    # What was stored before the first state is of no use.
    writer = sm.ColumnWriter(loader, COLUMNS, restart=not TEACHER_STATE.exists())
    if TEACHER_STATE.exists():
        writer.load_state_dict(json.loads(TEACHER_STATE.read_text()))
    for number, batch in enumerate(loader, 1):
        ids, logprobs = top(teacher, batch["tokens"])
        writer.write({"teacher_ids": ids, "teacher_logprobs": logprobs})
        if number % (4 * SAVE_EVERY) == 0:
            state = writer.state_dict()
            wait(world)  # all ranks have stored what the state counts
            if rank == 0:
                Path(f"{TEACHER_STATE}.new").write_text(json.dumps(state))
                os.replace(f"{TEACHER_STATE}.new", TEACHER_STATE)
                print(f"written: {loader.consumed_samples} samples", flush=True)
    writer.publish()
    if rank == 0:
        TEACHER_STATE.unlink(missing_ok=True)
        print(f"published: {', '.join(COLUMNS)} of {prefix}", flush=True)


def learn(prefix: str, vocab_size: int, rank: int, world: int, online: bool) -> None:
    """Train the student: its loss is the cross entropy with the teacher's top-k."""
    torch.manual_seed(0)
    student = Model(vocab_size, 16, seed=2)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    data = sm.DataConfig(
        blend=[prefix],
        sequence_length=LENGTH,
        shuffle_lanes=GLOBAL_BATCH,
        fields=["tokens", "labels", "loss_mask"],
        columns=[] if online else [*COLUMNS],
    )
    loader = sm.StreamLoader(
        data,
        micro_batch_size=2,
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_size=world,
    )
    teacher = Model(vocab_size, 48, seed=1) if online else None
    if STUDENT_STATE.exists():
        state = torch.load(STUDENT_STATE, weights_only=True)
        student.load_state_dict(state["student"])
        loader.load_state_dict(state["loader"])
    batches = iter(loader)
    while (step := loader.consumed_samples // GLOBAL_BATCH) < STEPS:
        total = torch.zeros(2)
        for _ in range(GLOBAL_BATCH // (2 * world)):
            batch = next(batches)
            ids, logprobs = (
                top(teacher, batch["tokens"])
                if teacher is not None
                else (batch["teacher_ids"], batch["teacher_logprobs"])
            )
            predicted = student(batch["tokens"]).gather(-1, ids.long())
            losses = -(logprobs.float().exp() * predicted).sum(-1)
            loss = (losses * batch["loss_mask"]).sum()
            loss.backward()
            total += torch.stack([loss.detach(), batch["loss_mask"].sum()])
        parameters = list(student.parameters())
        if world > 1:
            for tensor in (total, *(parameter.grad for parameter in parameters)):
                dist.all_reduce(tensor)
        for parameter in parameters:
            parameter.grad /= total[1]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {float(total[0] / total[1]):.5f}", flush=True)
            if (step + 1) % SAVE_EVERY == 0:
                state = {"student": student.state_dict(), "loader": loader.state_dict()}
                torch.save(state, f"{STUDENT_STATE}.new")
                os.replace(f"{STUDENT_STATE}.new", STUDENT_STATE)
    loader.close()


def wait(world: int) -> None:
    """Until all ranks are here."""
    if world > 1:
        dist.barrier()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("teach", "learn", "online"):
        sys.exit("usage: python tools/examples/distill.py teach|learn|online PREFIX VOCAB_SIZE")
    what, prefix, vocab_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if what == "teach":
        teach(prefix, vocab_size, rank, world)
    else:
        learn(prefix, vocab_size, rank, world, what == "online")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
