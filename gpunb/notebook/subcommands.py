"""The subcommands of `%gpu`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.error import UsageError

from gpunb.api import public, session
from gpunb.engine.job_log import Item, Log, words
from gpunb.exceptions import GpunbError
from gpunb.live.status_view import StatusView
from gpunb.notebook.adopted_jobs import Fetched
from gpunb.notebook.background import JobHandle, Jobs
from gpunb.notebook.background_output import replay
from gpunb.notebook.line_options import amount
from gpunb.notebook.rank_output import of_rank
from gpunb.notebook.sessions import Sessions
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol import backend
from gpunb.scheduler.markup import as_text
from gpunb.system.signals import HEARTBEAT

HELP = {
    "ps": "devices and jobs now, and what kernels have left",
    "top": "the same as a live picture",
    "wait": "wait for background cells and bind their names, all by default",
    "job": "the handle of a background cell, as of gpunb.get_job",
    "cancel": "stop jobs",
    "logs": "what a job, or one --rank of it, has shown; also into a file",
    "why": "what a job waits for, and why it got its share",
    "stop": "end a session of cells, and give its devices back",
    "park": "let an idle session give its devices back for now",
    "on": "run every following cell as if it began with this %%gpu line",
    "off": "no longer",
    "init": "start gpunb with these settings",
}
"""The subcommands, with what they do."""

TAKES = {
    "wait": "[IDS]",
    "job": "ID",
    "cancel": "IDS | all",
    "logs": "ID [FILE]",
    "why": "ID",
    "stop": "NAME",
    "park": "NAME",
    "on": "[SHARE] [OPTIONS]",
    "init": "KEY=VALUE ...",
}
"""The arguments of the subcommands."""


class Subcommands:
    """Runs the subcommands of `%gpu` in one shell."""

    def __init__(self, shell: NotebookShell) -> None:
        self._shell = shell
        self._jobs = shell.part(Jobs)
        self._sessions = shell.part(Sessions)

    def run(self, word: str, text: str) -> Any:
        """Run a subcommand with its arguments in `text`.

        Raises:
            UsageError: the arguments are wrong, or the subcommand fails.
        """
        takes: dict[str, Callable[[list[str]], Any]] = {
            "ps": self._status,
            "top": self._top,
            "wait": self._wait,
            "job": self._handle,
            "cancel": self._cancel,
            "logs": self._logs,
            "why": self._why,
            "stop": self._stop,
            "park": self._park,
            "init": _init,
        }
        try:
            return takes[word](shlex.split(text))
        except (GpunbError, OSError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"%gpu {word}: {error}") from None

    def _status(self, rest: list[str]) -> StatusView:
        _nothing(rest)
        current = backend.current()
        left = current.retained() if isinstance(current, backend.SharedBackend) else ()
        return StatusView(public.status(), left)

    def _top(self, rest: list[str]) -> Any:
        _nothing(rest)
        from gpunb.live import monitor  # slow to import, and few sessions need it

        return monitor()

    def _wait(self, rest: list[str]) -> None:
        """Wait, and then report each failure once."""
        jobs = self._jobs
        chosen = [jobs.find(each) for each in _ids(rest)] if rest else jobs.unsettled()
        while waiting := [each for each in chosen if not each.over.is_set()]:
            for each in waiting:
                jobs.follow(each)
            time.sleep(HEARTBEAT)
        states: Counter[str] = Counter()
        for cell in chosen:
            jobs.bind(cell)
            states[cell.state] += 1
            error = cell.error
            if error is not None and jobs.report(cell) and cell.state == "failed":
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                line = as_text(f"gpunb: #{cell.id} {cell.name} has failed: {text}")
                sys.stderr.write(f"{line}\n")
        ended = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        sys.stdout.write(f"{ended or 'no background cells run'}\n")
        if not rest and (left := _left()):
            sys.stdout.write(f"cells of kernels that are gone: %gpu wait {' '.join(left)}\n")

    def _handle(self, rest: list[str]) -> JobHandle:
        ident = _one(rest, "as in job = %gpu job 7")
        return self._jobs.handle(self._jobs.find(ident))

    def _cancel(self, rest: list[str]) -> None:
        if not rest:
            raise ValueError("name the jobs, as in %gpu cancel 7, or say all")
        current = backend.existing()
        if rest == ["all"]:
            if current is not None:
                _cancel_all(current)
            return
        chosen = [(ident, _facts(ident)) for ident in _ids(rest)]
        assert current is not None
        for ident, facts in chosen:
            if facts["state"] in ("queued", "running"):
                current.cancel((ident, 0), False, True)
            else:
                name = as_text(facts["name"])
                sys.stdout.write(f"#{ident} {name} is over already: {facts['state']}\n")

    def _logs(self, rest: list[str]) -> None:
        rest, rank = _rank(rest)
        names = rest[:1] if len(rest) < 3 else []
        log = self._log(_one(names, "as in %gpu logs 7, and a file if it should go into one"))
        shown: Iterable[Item] = log
        if rank is not None:
            shown = list(of_rank(log, rank))
            if not shown:
                sys.stdout.write(f"rank {rank} of #{names[0]} has shown nothing\n")
                return
        if len(rest) == 1:
            replay(self._shell, shown)
            return
        with open(os.path.expanduser(rest[1]), "w", encoding="utf-8") as file:
            file.writelines(words(each) for each in shown if "text" in each or "rank" in each)

    def _log(self, ident: int) -> Log:
        cell, current = self._jobs.get(ident), backend.existing()
        log: Log | None = None
        if cell is not None and not cell.lost:
            log = cell.sink.log
        elif current is not None:
            log = current.ask("log", ident)
        if log is None and isinstance(current, backend.SharedBackend):
            log = Fetched(current, ident).log
        if log is None:
            raise ValueError(f"nothing is kept of a job #{ident}")
        return log

    def _why(self, rest: list[str]) -> None:
        ident = _one(rest, "as in %gpu why 7")
        facts, cell = _facts(ident), self._jobs.get(ident)
        why = backend.current().ask("why", ident) if cell is None else cell.why()
        auto = f"; auto: {facts['auto']}" if facts.get("auto") else ""
        line = as_text(f"#{ident} {facts['name']}: {why or facts['state']}{auto}")
        sys.stdout.write(f"{line}\n")

    def _stop(self, rest: list[str]) -> None:
        if len(rest) != 1:
            known = ", ".join(self._sessions.names()) or "there are none"
            raise ValueError(f"name one session of cells ({known})")
        self._sessions.stop(rest[0])

    def _park(self, rest: list[str]) -> None:
        if len(rest) != 1:
            raise ValueError("name one session of cells or actor")
        session.current().park(rest[0])


def _nothing(rest: Iterable[str]) -> None:
    if rest:
        raise ValueError(f"takes nothing more, not {' '.join(rest)!r}")


def _ids(rest: Iterable[str]) -> list[int]:
    numbers = []
    for each in rest:
        for part in each.split(","):
            text = part.strip().lstrip("#")
            if not text.isdigit():
                raise ValueError(f"{part!r} is not the number of a job, such as 7 or #7")
            numbers.append(int(text))
    return numbers


def _one(rest: Iterable[str], example: str) -> int:
    numbers = _ids(rest)
    if len(numbers) != 1:
        raise ValueError(f"name one job, {example}")
    return numbers[0]


def _rank(rest: list[str]) -> tuple[list[str], int | None]:
    """The words without ``--rank N``, and this number."""
    if "--rank" not in rest:
        return rest, None
    at = rest.index("--rank")
    number = rest[at + 1] if at + 1 < len(rest) else ""
    if not number.isdigit():
        raise ValueError("--rank takes the number of a rank, as in %gpu logs 7 --rank 2")
    return rest[:at] + rest[at + 2 :], int(number)


def _left() -> list[str]:
    """The numbers of the background cells that ended kernels have left."""
    current = backend.existing()
    if not isinstance(current, backend.SharedBackend):
        return []
    return [str(each["id"]) for each in current.retained() if each["state"] != "session"]


def _facts(ident: int) -> dict[str, Any]:
    current = backend.existing()
    facts: dict[str, Any] | None = current.ask("job", ident) if current is not None else None
    if facts is None:
        raise ValueError(f"there is no job #{ident}")
    return facts


def _cancel_all(current: backend.Backend) -> None:
    """Cancel all tasks and cells of this kernel; actors and sessions of cells go on."""
    if isinstance(current, backend.SharedBackend):
        current.cancel_all()
        return
    cancelled: set[int] = set()
    while True:
        facts = current.ask("status")
        actors = {each["id"] for each in facts["actors"]}
        listed = {each["id"] for each in (*facts["running"], *facts["waiting"])}
        to_cancel = listed - actors - cancelled  # a status lists only the first that wait
        if not to_cancel:
            return
        for ident in to_cancel:
            current.cancel((ident, 0), False, True)
        cancelled |= to_cancel


def _whole(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"{name}={value} must be a whole number")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value} must be a number, such as 1.5") from None


def _switch(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{name}={value} must be true or false")
    return value.lower() == "true"


def _text(_: str, value: str) -> str:
    return value


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


SETTINGS: dict[str, Callable[[str, str], Any]] = {
    "address": _text,
    "num_cpus": _whole,
    "num_gpus": _whole,
    "max_gpus": _number,
    "resources": lambda name, value: dict(amount(part, name) for part in _parts(value)),
    "simulate": _text,
    "preload": lambda _, value: _parts(value),
    "ignore_reinit_error": _switch,
    "start_method": _text,
    "object_memory": _text,
    "spill": lambda _, value: {"true": True, "false": False}.get(value.lower(), value),
    "share": _text,
    "caps": _switch,
    "mps": _switch,
    "warm": lambda name, value: int(value) if value.isdigit() else _switch(name, value),
    "park_after": _text,
}
"""The arguments of `gpunb.init`, each with the function that converts its text."""


def _init(rest: list[str]) -> Any:
    settings: dict[str, Any] = {}
    for each in rest:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"{each!r} must be of the form KEY=VALUE")
        if name not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise ValueError(f"{name!r} is no setting (known are {known})")
        settings[name] = SETTINGS[name](name, value)
    return session.init(**settings)
