"""The zygotes that live, and their ends.

Each process stays with the zygote that forked it: signals go to that zygote, and that zygote
reports its end. So a zygote that was replaced ends after its last process and the last zygote that
it forked.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from gpunb.data import files
from gpunb.processes.generation import Generation
from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygote_link import Answer, Link
from gpunb.protocol import plain
from gpunb.protocol.zygote import SECOND, Imports, Preload
from gpunb.system import process_control
from gpunb.system.loop import Loop


class Zygotes:
    """Forks zygotes by zygotes, and processes by them. On the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        preload: Sequence[str],
        on_answer: Callable[[Generation, Answer], None],
        on_end: Callable[[Generation, bool], None],
    ) -> None:
        """`preload` are the modules of the second one. `on_answer` gets the answers of each zygote;
        `on_end` is told that one is gone (True), or has sent an invalid message (False)."""
        self._loop = loop
        self._preload = tuple(preload)
        self._on_answer = on_answer
        self._on_end = on_end
        self._live: dict[int, Generation] = {}
        self._last = 0
        self.first: Generation | None = None
        """A new interpreter."""
        self.second: Generation | None = None
        """The one with the preload, forked by the first."""
        self.environment: dict[str, str] = {}
        """The environment of the processes that are forked without imports of tasks."""

    @property
    def notes(self) -> list[str]:
        """Texts on zygotes that do not answer, and on processes that wait to be forked."""
        live = self._live.values()
        silent = [each.why_silent() for each in live]
        return [*filter(None, silent), *(why for each in live for why in each.delayed.values())]

    def new(self, imports: Imports | None = None, parent: Generation | None = None) -> Generation:
        """Return a zygote that is to be started; requests to it wait until its link connects."""
        self._last += 1
        generation = Generation(self._last, imports, parent)
        generation.link = Link(
            self._loop,
            lambda answer: self._on_answer(generation, answer),
            lambda gone: self._on_end(generation, gone),
        )
        self._live[generation.number] = generation
        return generation

    def fork(self, parent: Generation, imports: Imports | None = None, most: int = 0) -> Generation:
        """Fork a zygote that imports the preload and the `imports` of tasks, except what `parent`
        has imported. With these imports it may have `most` bytes.

        Raises:
            OSError: the system lacks memory or descriptors.
        """
        onto = parent.imports is not None
        modules = () if onto else self._preload
        preload = Preload(modules)
        if imports is not None:
            missing = tuple(each for each in imports.modules if each not in parent.modules)
            preload = Preload(modules, tuple(imports._replace(modules=missing)), most, onto)
        file = files.memory_file()
        generation = self.new(imports, parent)
        generation.modules.update(parent.modules)
        try:
            files.write_all(file, iter([memoryview(plain.dumps(tuple(preload)))]))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            generation.link.connect(ours)
        except BaseException:
            os.close(file)
            self.forget(generation)  # or its parent would never end
            raise
        parent.link.ask(("preload", generation.number), [theirs.detach(), file])
        return generation

    def start(
        self, generation: Generation, process: WorkerProcess, descriptors: Sequence[int]
    ) -> None:
        """Fork a process."""
        generation.processes[process.token] = process
        process.origin = generation
        imports = generation.imports
        process.environment = imports.environment if imports else self.environment
        generation.link.ask(("fork", process.token), descriptors)

    def note_forked(self, generation: Generation, token: Any, pid: int) -> None:
        """Note the pid of a process or of a zygote."""
        generation.delayed.pop(token, None)
        match token:
            case int() if token in generation.processes:
                generation.processes[token].pid = pid
            case (_, number) if number in self._live:
                self._live[number].pid = pid

    def signal(self, process: WorkerProcess, number: int) -> None:
        """Send a signal to a process, which may have ended, through its zygote."""
        generation = process.origin
        if isinstance(generation, Generation) and generation.number in self._live:
            generation.signalled.add(process.token)
            generation.link.ask(("signal", process.token, int(number)))

    def kill(self, generation: Generation) -> None:
        """Send SIGKILL to a zygote, through the one that forked it."""
        if generation.parent is not None:
            token = (SECOND, generation.number)
            generation.parent.link.ask(("signal", token, int(signal.SIGKILL)))

    def replace(self, generation: Generation | None) -> None:
        """Let a zygote end after its last process and the last zygote that it forked."""
        if generation is not None:
            generation.replaced = True
            self.end_if_replaced(generation)

    def end_if_replaced(self, generation: Generation) -> None:
        """End a zygote that nothing needs."""
        if not generation.replaced or generation.processes:
            return
        if not any(each.parent is generation for each in self._live.values()):
            self.forget(generation)

    def forget(self, generation: Generation) -> None:
        """End a zygote, or note its end."""
        if self._live.pop(generation.number, None) is not None:
            generation.link.close()
            if generation.parent is not None:
                self.end_if_replaced(generation.parent)

    def close(self) -> None:
        """End the zygotes, for good; they end the workers and the children of these."""
        self.first = self.second = None
        for generation in list(self._live.values()):
            if generation.pid is not None:  # a stopped zygote could not end its workers
                process_control.kill(generation.pid, signal.SIGCONT)
            generation.close_held()
            self.forget(generation)

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        while self._live:
            _, generation = self._live.popitem()
            generation.close_held()
            generation.link.forked()
