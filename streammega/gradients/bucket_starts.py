"""Where a bucket starts its collective, and when: in backward as soon as it is full and it is its
turn, else at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from streammega.gradients.buffers import GradBucket, GradBuffer, in_order_of_backward
from streammega.gradients.checks import GradientChecks
from streammega.gradients.collectives import Group, reduce_all


class BucketStarts:
    """The buckets of a model, of which one after the other starts.

    All ranks of the group start them in the same order: a collective knows those of other ranks by
    nothing but its place in the group's sequence. Models of one group take turns by `StartOrder`.

    Args:
        module: whose order of registration gives the order of the buckets.
        buffers: where the gradients are.
        group: the ranks over which they are summed; None: this one alone.
        tied_group: the ranks that add to the buckets that wait.
        checks: what looks at gradients before they are summed; None: nothing does.
        overlap: buckets may start in backward.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: Sequence[GradBuffer],
        *,
        group: Group | None,
        tied_group: Group | None,
        checks: GradientChecks | None,
        overlap: bool,
    ) -> None:
        self.checks = checks
        self._group = group
        self._tied_group = tied_group
        self._overlap = overlap
        self._all = [bucket for buffer in buffers for bucket in buffer.buckets]
        self._tied = [bucket for bucket in self._all if bucket.place.waits]
        self._in_order = in_order_of_backward(module, buffers)
        self._next = 0

    @property
    def has_started(self) -> bool:
        """Whether some bucket of this step has."""
        return self._next > 0

    def start_full(self) -> bool:
        """Start the buckets that are full, in their order, up to the first that is not; whether all
        have started.

        Buckets to which another stage adds first are left to the end of the step.
        """
        while self._next < len(self._in_order):
            bucket = self._in_order[self._next]
            if not self._overlap or bucket.unready:
                return False
            self._look_and_start(bucket)
            self._next += 1
        return True

    def start_rest(self) -> None:
        """Start what backward did not, in the order in which it would have."""
        for bucket in self._in_order[self._next :]:
            self._look_and_start(bucket)
        self._next = 0

    def add_tied(self) -> None:
        """Add to the gradients of shared parameters those of the other stage."""
        for bucket in self._tied:
            assert self._tied_group is not None
            # before, so that what is bad is named where it came from
            self._look(bucket)
            dist.all_reduce(bucket.grads, group=self._tied_group)
            self._look(bucket, ", with what another stage added,")

    def start_tied(self) -> None:
        """Start the buckets of shared parameters, to which the other stage has added."""
        for bucket in self._tied:
            self._start(bucket)

    def wait(self) -> None:
        """Wait for the collectives; all is then ready for the next step."""
        for bucket in self._all:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.forget()

    def _look_and_start(self, bucket: GradBucket) -> None:
        # parts of a model may run on streams of their own, as their hooks then do
        bucket.wait_for_streams()
        # before the sum, in which a bad gradient would be that of every rank
        self._look(bucket)
        self._start(bucket)

    def _look(self, bucket: GradBucket, note: str = "") -> None:
        if self.checks is not None:
            self.checks.look(bucket.grads, bucket.slots, note)

    def _start(self, bucket: GradBucket) -> None:
        if self._group is not None:
            bucket.work = reduce_all(bucket.grads, self._group)
