"""The processes of one evaluation: one alone, or several that `accelerate launch` started, which share the batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from eval.runner import Job

PATIENCE = timedelta(days=1)  # how long a process waits for the others, which may have slower batches


@dataclass(frozen=True)
class Processes:
    """This process's `rank` of `count`, and the device that `--device auto` stands for in it."""

    rank: int = 0
    count: int = 1
    device: str = "auto"

    @staticmethod
    def here(device: str) -> Processes:
        """From the environment that the launcher made. Processes on CUDA take one device each."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes(device=device)
        from accelerate import PartialState  # slow to import, and joins a process group when made

        state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
        own = str(state.device) if device == "auto" else device
        return Processes(state.process_index, state.num_processes, own)

    @property
    def is_first(self) -> bool:
        """Whether this process reads, merges and reports for all."""
        return self.rank == 0

    @property
    def share(self) -> int | None:
        """What names this process's results file: its rank, or None where it is alone."""
        return self.rank if self.count > 1 else None

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """This process's jobs: whole batches, so that what is compared is timed on one device."""
        return [job for job in jobs if job.batch % self.count == self.rank]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
