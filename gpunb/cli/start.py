"""``gpunb start --head``: a scheduler in a process of its own, to which kernels attach."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpunb import linux, settings
from gpunb.exceptions import GpunbError
from gpunb.runtime import heads

if TYPE_CHECKING:
    import socket

    from gpunb.core.resources import Machine

LAST_LINES = 10
"""Lines of the log that are shown when a head process did not start."""

_SERVE = "import sys; from gpunb.cli.start import serve; sys.exit(serve(sys.argv[1], sys.argv[2]))"
_OF_NOTEBOOKS = ("JPY_SESSION_NAME", "JPY_PARENT_PID")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", action="store_true", help="start a head process")
    parser.add_argument(
        "--name", default=heads.DEFAULT, help="by which kernels find it (default: %(default)s)"
    )
    parser.add_argument("--num-gpus", type=int, metavar="N", help="use the first N devices")
    parser.add_argument("--num-cpus", type=int, metavar="N", help="CPUs to give to tasks")
    parser.add_argument(
        "--max-gpus", type=float, metavar="X", help="how much of the devices to have at once"
    )
    parser.add_argument("--simulate", metavar="TEXT", help="simulated devices, as 2xA100:40GiB")
    parser.add_argument(
        "--preload", metavar="NAMES", help="modules to import before workers start, as torch,numpy"
    )
    parser.add_argument(
        "--resources", metavar="NAME=X,...", help="custom resources, as licence=2,scratch=0.5"
    )
    parser.add_argument(
        "--share",
        choices=settings.SHARES,
        default="warn",
        help="what happens to a task that takes more device memory than its share: warn, kill or "
        "off (default: %(default)s)",
    )
    parser.add_argument(
        "--no-caps", action="store_true", help="frameworks are not told to keep to a task's share"
    )
    parser.add_argument(
        "--mps", action="store_true", help="share devices through NVIDIA's Multi-Process Service"
    )
    parser.add_argument(
        "--object-memory", metavar="SIZE", help="what objects may take together, as 10GiB"
    )
    parser.add_argument(
        "--spill",
        metavar="FOLDER",
        nargs="?",
        const=True,
        help="move objects beyond that to a folder, a temporary one by default",
    )
    parser.add_argument(
        "--start-method", choices=settings.METHODS, help="how workers are started: fork or spawn"
    )
    parser.add_argument("--address", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if options.address is not None:
        raise GpunbError(
            f"--address {options.address}: a head process serves the kernels of one machine. For "
            'several machines there is gpunb.init("ray"), which runs the same cells and functions '
            "on the Ray cluster that `ray start` has started"
        )
    if not options.head:
        raise GpunbError("say `gpunb start --head`: there is nothing else to start")
    linux.check()
    try:
        name = heads.check_name(options.name)
    except ValueError as error:
        raise GpunbError(f"--name: {error}") from None
    given = {
        "num_gpus": options.num_gpus,
        "num_cpus": options.num_cpus,
        "max_gpus": options.max_gpus,
        "simulate": options.simulate,
        "resources": _resources(options.resources),
        "preload": options.preload.split(",") if options.preload is not None else None,
        "share": options.share,
        "caps": not options.no_caps,
        "mps": options.mps,
        "object_memory": options.object_memory,
        # Its own folder is another.
        "spill": os.path.abspath(options.spill)
        if isinstance(options.spill, str)
        else options.spill,
        "start_method": options.start_method,
    }
    facts = started(name, given)
    if options.json:
        print(json.dumps(facts))
        return 0
    print(f"head process {name!r} runs as process {facts['pid']}: {facts['devices']}")
    for note in facts["notes"]:
        print(f"note: {note}")
    own = name if len(heads.running()) > 1 else "auto"
    print(
        f'attach a kernel with gpunb.init("{own}") or GPUNB_ADDRESS={own}; end it with '
        f"`gpunb stop {name}`; its log is {facts['log']}"
    )
    return 0


def _resources(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            raise GpunbError(f"--resources: {part!r} must be of the form NAME=NUMBER") from None
    return found


def started(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Start the process with these arguments of `init`: what it says of itself once it listens.

    Raises:
        GpunbError: it did not start.
    """
    if (pid := heads.pid_of(name)) is not None:
        raise GpunbError(
            f"the head process {name!r} runs already, as process {pid}: attach with "
            f"gpunb.init({name!r}), or end it with `gpunb stop {name}`"
        )
    path = heads.path_of(name, "log")
    environment = {key: each for key, each in os.environ.items() if key not in _OF_NOTEBOOKS}
    told, tells = os.pipe()
    with open(told, "rb") as answer:
        # Apart from the log of one that may still be ending.
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            command = [sys.executable, "-P", "-c", _SERVE, name, json.dumps([tells, given])]
            process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[tells],
                start_new_session=True,
            )
        finally:
            os.close(tells)
            os.close(log)
        said = answer.read()
    process.wait()
    if not said:
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        text = "\n".join(lines) or "nothing"
        raise GpunbError(f"the head process {name!r} did not start. The end of {path}:\n{text}")
    facts: dict[str, Any] = json.loads(said)
    if "error" in facts:
        raise GpunbError(facts["error"])
    return {**facts, "log": str(path)}


def serve(name: str, arguments: str) -> int:
    """Be the head process, from its first line to its end."""
    tells, given = json.loads(arguments)
    if os.fork():
        os._exit(0)  # so that it is nobody's child
    os.set_inheritable(tells, False)
    from gpunb import backend, session
    from gpunb.runtime import listening, starting
    from gpunb.workers import system

    system.set_name("gpunb-head")
    listening.serving = name
    listening.end_on_signals()
    with open(tells, "w", encoding="utf-8") as answer, contextlib.ExitStack() as ends:

        def settled(machine: Machine, notes: Sequence[str]) -> None:
            """It can be found: kernels that knock now wait until it is there."""
            sockets.append(listening.listen(name))
            ends.callback(heads.path_of(name).unlink, missing_ok=True)
            with contextlib.suppress(GpunbError, OSError):  # the session says so
                listening.open_desk()
            json.dump(_facts(name, machine, notes), answer)
            answer.close()

        sockets: list[socket.socket] = []
        starting.settled = settled
        try:
            ends.callback(listening.Lock(name).release)
            ends.callback(session.shutdown)
            session.init("local", **given)
        except (GpunbError, ValueError, TypeError) as error:
            if answer.closed:
                raise
            json.dump({"error": str(error)}, answer)
            return 1
        from gpunb.runtime import head

        local = head.local(backend.existing())
        served = head.serve(local, name, *sockets)
        ends.callback(served.close)
        ends.callback(session.shutdown)
        local.join()
    return 0


def _facts(name: str, machine: Machine, notes: Sequence[str]) -> dict[str, Any]:
    from gpunb.core.reasons import cpus_text, describe

    return {
        "name": name,
        "pid": os.getpid(),
        "devices": f"{describe(machine.devices)}; {cpus_text(machine.cpus)}",
        "gpus": len(machine.devices),
        "notes": list(notes),
    }
