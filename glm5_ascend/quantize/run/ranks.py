"""Several processes on one output: `torchrun --nproc-per-node N -m glm5_ascend quantize ...`.

Rank 0 does what a single process does; the others take their share of every layer's routed experts, which are 96 % of
the weights. They exchange data through the run directory, which all of them see. Sums are taken in integers, so the
bytes do not depend on the number of ranks.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed

#: Rank 0 may work alone on a dense layer or an embedding for so long.
_TIMEOUT = timedelta(hours=12)


class Ranks:
    """The processes that torchrun started; one without torchrun."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine

    def __enter__(self) -> Ranks:
        if self.count > 1:
            torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.count > 1 and error is None:  # after an error torchrun ends the others
            torch.distributed.destroy_process_group()

    def barrier(self) -> None:
        if self.count > 1:
            torch.distributed.barrier()

    def assigned(self, experts: int) -> range:
        """Numbers of the experts that this rank quantizes, of so many."""
        return range(self.rank, experts, self.count)
