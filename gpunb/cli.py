"""The command ``gpunb``: what this machine has, and what is wrong with it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gpunb import accelerators
from gpunb._version import __version__
from gpunb.core.resources import size_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if `doctor` found a problem."""
    parser = argparse.ArgumentParser(
        prog="gpunb", description="Run notebook cells and functions on shares of GPUs."
    )
    parser.add_argument("--version", action="version", version=f"gpunb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("devices", _devices, "the devices that a session would use"),
        ("doctor", _doctor, "what works here, what does not, and what to do"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="for programs")
        command.set_defaults(run=run)
    chosen = parser.parse_args(arguments)
    run_command: Callable[[bool], int] = chosen.run
    return run_command(chosen.json)


def _devices(as_json: bool) -> int:
    found = accelerators.detect()
    if as_json:
        facts = {"devices": [_facts(each) for each in found.devices], "notes": list(found.notes)}
        print(json.dumps(facts, indent=2))
        return 0
    for device in found.devices:
        memory = size_text(device.memory) if device.memory else "memory unknown"
        kind = device.type or ("logical" if device.logical else "type unknown")
        print(f"GPU {device.id}: {device.name}, {kind}, {memory}, {device.key}")
    if not found.devices:
        print("no GPUs")
    for note in found.notes:
        print(f"note: {note}")
    return 0


def _facts(device: Any) -> dict[str, Any]:
    names = ("id", "key", "name", "type", "memory", "vendor", "logical")
    return {name: getattr(device, name) for name in names}


def _doctor(as_json: bool) -> int:
    checks = [check() for check in (_python, _processes, _gpus, _visibility, _frameworks)]
    if as_json:
        print(json.dumps([dict(zip(("name", "ok", "says"), each, strict=True)) for each in checks]))
    else:
        for name, ok, says in checks:
            print(f"{'ok     ' if ok else 'problem'}  {name}: {says}")
    return 0 if all(ok for _, ok, _ in checks) else 1


Check = tuple[str, bool, str]


def _python() -> Check:
    return (
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()}, gpunb {__version__}",
    )


def _processes() -> Check:
    missing = [name for name in ("pidfd_open", "memfd_create", "eventfd") if not hasattr(os, name)]
    if not sys.platform.startswith("linux"):
        return "processes", False, f"gpunb needs Linux for its workers, and this is {sys.platform}"
    if missing:
        return (
            "processes",
            False,
            f"this Python lacks {', '.join('os.' + name for name in missing)}",
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        text = f"pidfd_open is not allowed ({error.strerror}): use start_method='spawn'"
        return "processes", False, text
    return "processes", True, f"Linux {platform.release()}, workers can be forked"


def _gpus() -> Check:
    found = accelerators.detect()
    count = sum(not device.logical for device in found.devices)
    says = f"{count} found"
    if found.notes:
        says += "; " + "; ".join(found.notes)
    if not count:
        says += "; gpunb.init(num_gpus=2) makes logical ones, for trying things out"
    return "GPUs", bool(count), says


def _visibility() -> Check:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return "CUDA_VISIBLE_DEVICES", True, "not set: all devices are used"
    return "CUDA_VISIBLE_DEVICES", True, f"{value!r}: only these devices are used"


def _frameworks() -> Check:
    found = []
    for name in ("torch", "jax", "tensorflow", "cupy", "sklearn"):
        if importlib.util.find_spec(name) is None:
            continue
        package = {"sklearn": "scikit-learn"}.get(name, name)
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(package)
    return "frameworks", True, ", ".join(found) or "none of those that gpunb knows"


if __name__ == "__main__":
    sys.exit(main())
