"""One zygote, as the kernel sees it."""

from __future__ import annotations

from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygote_link import Link
from gpunb.protocol.zygote import Imports


class Generation:
    """One zygote: the link to it, and the processes that it forked."""

    def __init__(self, number: int, imports: Imports | None) -> None:
        """`imports` of tasks are preloaded in this zygote."""
        self.number = number
        self.imports = imports
        self.link: Link
        self.pid: int | None = None
        self.processes: dict[int, WorkerProcess] = {}
        self.preloaded = False
        self.replaced = False
        self.delayed: dict[int, str] = {}
        """For each process that waits to be forked, the reason."""
        self.signalled: set[int] = set()
        """Processes that got signals after the last ping that the zygote has answered."""

    def why_silent(self) -> str | None:
        """Return a text if the zygote does not answer; else None."""
        seconds = self.link.silent_seconds()
        if seconds is None:
            return None
        return (
            f"the process that forks workers (pid {self.pid}) has not answered for {seconds:.0f} "
            f"s: it may be stopped, and goes on after `kill -CONT {self.pid}`"
        )
