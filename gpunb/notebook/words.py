"""The words of `%gpu`: what can be said to it besides a share."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.error import UsageError

from gpunb import api, backend, session
from gpunb.exceptions import GpunbError
from gpunb.notebook import found, jobs
from gpunb.notebook.job import Job
from gpunb.notebook.late import replay
from gpunb.notebook.lines import amount
from gpunb.notebook.sessions import Sessions
from gpunb.notebook.view import StatusView
from gpunb.runtime.log import Log
from gpunb.signals import HEARTBEAT

HELP = {
    "ps": "devices and jobs now, and what kernels have left",
    "top": "the same as a live picture",
    "wait": "wait for background cells and bind their names, all by default",
    "job": "the handle of a background cell, as of gpunb.get_job",
    "cancel": "stop jobs",
    "logs": "what a job has shown, or its whole text into a file",
    "why": "what a job waits for",
    "stop": "end a session of cells, and give its devices back",
    "on": "run every following cell as if it began with this %%gpu line",
    "off": "no longer",
    "init": "start gpunb with these settings",
}
"""The words, and what they do."""

TAKES = {
    "wait": "[IDS]",
    "job": "ID",
    "cancel": "IDS | all",
    "logs": "ID [FILE]",
    "why": "ID",
    "stop": "NAME",
    "on": "[SHARE] [OPTIONS]",
    "init": "KEY=VALUE ...",
}
"""What follows them."""


class Words:
    """Carries out what follows `%gpu` in one shell."""

    def __init__(self, shell: Any, sessions: Sessions) -> None:
        self._shell = shell
        self._sessions = sessions

    def __contains__(self, word: str) -> bool:
        return word in HELP

    def say(self, word: str, text: str) -> Any:
        """Do what the word says, with what follows it.

        Raises:
            UsageError: it does not go with the rest.
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
            "init": _init,
        }
        try:
            return takes[word](shlex.split(text))
        except (GpunbError, OSError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"%gpu {word}: {error}") from None

    def _status(self, rest: list[str]) -> StatusView:
        _nothing(rest)
        current = backend.current()
        left = current.kept() if isinstance(current, backend.Keeper) else ()
        return StatusView(api.status(), left)

    def _top(self, rest: list[str]) -> Any:
        _nothing(rest)
        return api.monitor()

    def _wait(self, rest: list[str]) -> None:
        """Wait, and then report each failure once."""
        book = jobs.of(self._shell)
        chosen = [self._job(each) for each in _ids(rest)] if rest else book.unsettled()
        waiting = list(chosen)
        while waiting:
            waiting = [job for job in waiting if not job.done()]
            for job in waiting:
                book.follow(job)
            if waiting:
                time.sleep(HEARTBEAT)
        states: dict[str, int] = {}
        for job in chosen:
            job.wait()
            states[job.state] = states.get(job.state, 0) + 1
            error = job._error  # noqa: SLF001 - a part of it
            if error is not None and book.told(job) and job.state == "failed":
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                sys.stderr.write(f"gpunb: #{job.id} {job.name} has failed: {text}\n")
        ended = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        sys.stdout.write(f"{ended or 'no background cells run'}\n")
        if not rest and (left := _left()):
            sys.stdout.write(f"cells of kernels that are gone: %gpu wait {' '.join(left)}\n")

    def _handle(self, rest: list[str]) -> Job:
        ident = _ids(rest)
        if len(ident) != 1:
            raise ValueError("name one job, as in job = %gpu job 7")
        return self._job(ident[0])

    def _job(self, ident: int) -> Job:
        return jobs.of(self._shell).find(ident)

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
                sys.stdout.write(f"#{ident} {facts['name']} is over already: {facts['state']}\n")

    def _logs(self, rest: list[str]) -> None:
        ident = _ids(rest[:1])
        if len(ident) != 1 or len(rest) > 2:
            raise ValueError("name one job, as in %gpu logs 7, and a file if it should go into one")
        log = self._log(ident[0])
        if len(rest) == 1:
            replay(self._shell, log)
            return
        with open(os.path.expanduser(rest[1]), "w", encoding="utf-8") as file:
            file.writelines(log.texts())

    def _log(self, ident: int) -> Log:
        job, current = jobs.of(self._shell).get(ident), backend.existing()
        if job is not None and not job.lost:
            return job.log
        log: Log | None = current.ask("log", ident) if current is not None else None
        if log is None and isinstance(current, backend.Keeper):
            log = found.log_of(current, ident)
        if log is None:
            raise ValueError(f"nothing is kept of a job #{ident}")
        return log

    def _why(self, rest: list[str]) -> None:
        ident = _ids(rest)
        if len(ident) != 1:
            raise ValueError("name one job, as in %gpu why 7")
        facts, job = _facts(ident[0]), jobs.of(self._shell).get(ident[0])
        current = backend.existing()
        if job is not None:
            why = job._why()  # noqa: SLF001 - as its card says
        else:
            why = current.ask("why", ident[0]) if current is not None else None
        sys.stdout.write(f"#{ident[0]} {facts['name']}: {why or facts['state']}\n")

    def _stop(self, rest: list[str]) -> None:
        if len(rest) != 1:
            known = ", ".join(self._sessions.names()) or "there are none"
            raise ValueError(f"name one session of cells ({known})")
        self._sessions.stop(rest[0])


def _nothing(rest: Iterable[str]) -> None:
    if rest:
        raise ValueError(f"takes nothing more, not {' '.join(rest)!r}")


def _ids(rest: Iterable[str]) -> list[int]:
    found = []
    for each in rest:
        for part in each.split(","):
            text = part.strip().lstrip("#")
            if not text.isdigit():
                raise ValueError(f"{part!r} is not the number of a job, such as 7 or #7")
            found.append(int(text))
    return found


def _left() -> list[str]:
    """The numbers of background cells that kernels which are gone have left."""
    current = backend.existing()
    if not isinstance(current, backend.Keeper):
        return []
    return [str(each["id"]) for each in current.kept() if each["state"] != "session"]


def _facts(ident: int) -> dict[str, Any]:
    current = backend.existing()
    facts: dict[str, Any] | None = current.ask("job", ident) if current is not None else None
    if facts is None:
        raise ValueError(f"there is no job #{ident}")
    return facts


def _cancel_all(current: backend.Backend) -> None:
    """Cancel all of this kernel that waits or runs; what hosts actors and sessions of cells goes
    on."""
    if isinstance(current, backend.Keeper):
        current.cancel_all()
        return
    cancelled: set[int] = set()
    while True:
        facts = current.ask("status")
        actors = {each["id"] for each in facts["actors"]}
        listed = {each["id"] for each in (*facts["running"], *facts["waiting"])}
        found = listed - actors - cancelled  # of those that wait, a status lists the first
        if not found:
            return
        for ident in found:
            current.cancel((ident, 0), False, True)
        cancelled |= found


def _text(_: str, value: str) -> str:
    return value


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


def _folder(_: str, value: str) -> bool | str:
    return value.lower() == "true" if value.lower() in ("true", "false") else value


def _modules(_: str, value: str) -> list[str]:
    return [part for part in value.split(",") if part]


def _resources(name: str, value: str) -> dict[str, float]:
    return dict(amount(part.strip(), name) for part in value.split(",") if part.strip())


SETTINGS: dict[str, Callable[[str, str], Any]] = {
    "address": _text,
    "num_cpus": _whole,
    "num_gpus": _whole,
    "max_gpus": _number,
    "resources": _resources,
    "simulate": _text,
    "preload": _modules,
    "ignore_reinit_error": _switch,
    "start_method": _text,
    "object_memory": _text,
    "spill": _folder,
    "share": _text,
    "caps": _switch,
    "mps": _switch,
}
"""The arguments of `gpunb.init`, and what makes of the text on a line what each takes."""


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
