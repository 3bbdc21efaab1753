"""``gpunb start --head``: starts a head process, a scheduler to which kernels attach."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpunb._version import __version__
from gpunb.api import init_options
from gpunb.cli.output import print_text
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.system import linux

if TYPE_CHECKING:
    import socket

    from gpunb.scheduler.resources import Machine

LAST_LINES = 10
"""Lines of the log that are shown when a head process did not start."""

_AS_GIVEN = (
    "num_gpus num_cpus max_gpus simulate share mps warm park_after object_memory spill "
    "start_method".split()
)
"""Options that are arguments of `init` as they are."""

_SERVE = "import sys; from gpunb.cli.start import serve; sys.exit(serve(sys.argv[1], sys.argv[2]))"
_NOTEBOOK_VARIABLES = ("JPY_SESSION_NAME", "JPY_PARENT_PID")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", action="store_true", help="start a head process")
    parser.add_argument(
        "--name", default=discovery.DEFAULT, help="by which kernels find it (default: %(default)s)"
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
        choices=init_options.SHARES,
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
        "--warm",
        metavar="N",
        nargs="?",
        type=int,
        const=True,
        default=False,
        help="standby processes with a context on the first N GPUs, on all by default",
    )
    parser.add_argument(
        "--park-after",
        metavar="TIME",
        help="idle actors and sessions give their devices back after that, as 10min",
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
        "--start-method",
        choices=init_options.METHODS,
        help="how workers are started: fork or spawn",
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
        name = discovery.check_name(options.name)
    except ValueError as error:
        raise GpunbError(f"--name: {error}") from None
    given = {each: getattr(options, each) for each in _AS_GIVEN}
    given["resources"] = _resources(options.resources)
    given["preload"] = options.preload.split(",") if options.preload is not None else None
    given["caps"] = not options.no_caps
    if isinstance(options.spill, str):  # the head process has another working folder
        given["spill"] = os.path.abspath(options.spill)
    facts = start_head(name, given)
    if options.json:
        print(json.dumps(facts))
        return 0
    print_text(f"head process {name!r} runs as process {facts['pid']}: {facts['devices']}")
    for note in facts["notes"]:
        print_text(f"note: {note}")
    own = name if len(discovery.running()) > 1 else "auto"
    print_text(
        f'attach a kernel with gpunb.init("{own}") or GPUNB_ADDRESS={own}; end it with '
        f"`gpunb stop {name}`; its log is {facts['log']}"
    )
    return 0


def _resources(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    amounts = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            amounts[name.strip()] = float(amount)
        except ValueError:
            raise GpunbError(f"--resources: {part!r} must be of the form NAME=NUMBER") from None
    return amounts


def start_head(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Start a head process with these arguments of `init`. Returns its facts once it listens.

    Raises:
        GpunbError: it did not start.
    """
    if (pid := discovery.pid_of(name)) is not None:
        raise GpunbError(
            f"the head process {name!r} runs already, as process {pid}: attach with "
            f"gpunb.init({name!r}), or end it with `gpunb stop {name}`"
        )
    path = discovery.path_of(name, "log")
    environment = {key: each for key, each in os.environ.items() if key not in _NOTEBOOK_VARIABLES}
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as answer:
        # Appends: an earlier head process of this name may still be writing its last lines.
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            command = [sys.executable, "-P", "-c", _SERVE, name, json.dumps([write_end, given])]
            process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,
            )
        finally:
            os.close(write_end)
            os.close(log)
        reply = answer.read()
    process.wait()
    if not reply:
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        text = "\n".join(lines) or "nothing"
        raise GpunbError(f"the head process {name!r} did not start. The end of {path}:\n{text}")
    facts: dict[str, Any] = json.loads(reply)
    if "error" in facts:
        raise GpunbError(facts["error"])
    return {**facts, "log": str(path)}


def serve(name: str, arguments: str) -> int:
    """Run the head process until it ends. Returns the exit status."""
    write_end, given = json.loads(arguments)
    if os.fork():
        os._exit(0)  # the head process must not be a child of the command
    os.set_inheritable(write_end, False)
    faulthandler.enable()  # the log has the stack of a process that crashes
    from gpunb.api import session
    from gpunb.engine import bootstrap
    from gpunb.head import endpoint
    from gpunb.protocol import backend
    from gpunb.system import process_control

    process_control.set_name("gpunb-head")
    endpoint.serving = name
    endpoint.end_on_signals()
    with open(write_end, "w", encoding="utf-8") as answer, contextlib.ExitStack() as ends:
        ends.callback(endpoint.note, name, "has ended")

        def settled(machine: Machine, notes: Sequence[str]) -> None:
            """Listen and report success. Kernels that connect now wait until the session runs."""
            sockets.append(endpoint.listen(name))
            ends.callback(endpoint.remove, discovery.path_of(name))
            with contextlib.suppress(GpunbError, OSError):  # a note of the session has the reason
                endpoint.open_control_socket()
            facts = _facts(name, machine, notes)
            endpoint.note(name, f"listens; gpunb {__version__}; {facts['devices']}")
            json.dump(facts, answer)
            answer.close()

        sockets: list[socket.socket] = []
        bootstrap.settled = settled
        try:
            ends.callback(endpoint.Lock(name).release)
            ends.callback(session.shutdown)
            session.init("local", **given)
        except (GpunbError, ValueError, TypeError) as error:
            if answer.closed:
                raise
            endpoint.note(name, f"could not start: {error}")
            json.dump({"error": str(error)}, answer)
            return 1
        from gpunb.head import server

        local = server.local(backend.existing())
        served = server.serve(local, name, *sockets)
        ends.callback(served.close)
        ends.callback(session.shutdown)
        local.join()
    return 0


def _facts(name: str, machine: Machine, notes: Sequence[str]) -> dict[str, Any]:
    from gpunb.scheduler.explain import cpus_text, describe

    return {
        "name": name,
        "pid": os.getpid(),
        "devices": f"{describe(machine.devices)}; {cpus_text(machine.cpus)}",
        "gpus": len(machine.devices),
        "notes": list(notes),
    }
