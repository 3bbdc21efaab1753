"""The command ``gpunb``: shows devices and sessions, starts head processes, checks the machine."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpunb._version import __version__
from gpunb.cli.output import print_remark
from gpunb.exceptions import GpunbError


class Command(NamedTuple):
    """A command. Its module has a function `run(options)`, which returns the exit status, and may
    have a function `add_options(parser)`."""

    name: str
    help: str


COMMANDS = (
    Command(
        "status", "all kernels of this machine, their shares of devices, and who else is there"
    ),
    Command("logs", "what a job has shown, so far or until it is over"),
    Command("release", "ask one of your kernels to let go of devices"),
    Command("start", "start a head process, which schedules for several kernels"),
    Command("stop", "end a head process"),
    Command("history", "what earlier runs took, from which `auto` chooses shares"),
    Command("devices", "the devices that a session would use"),
    Command("doctor", "what works here, what does not, and what to do"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 on success."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="gpunb", description="Run notebook cells and functions on shares of GPUs."
    )
    parser.add_argument("--version", action="version", version=f"gpunb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name not in arguments:
            continue  # importing all commands takes longer than most of them run
        module = importlib.import_module(f"gpunb.cli.{command.name}")
        if (add_options := getattr(module, "add_options", None)) is not None:
            add_options(sub)
        sub.add_argument("--json", action="store_true", help="for programs")
        sub.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = chosen.run
    try:
        return run(chosen)
    except GpunbError as error:
        print_remark(f"gpunb {chosen.command}: {error}")
        return 1
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
