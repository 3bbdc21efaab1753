"""`%%gpu` and `%gpu`."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from gpunb import api, notebook
from gpunb.core.options import Options
from gpunb.notebook import running
from gpunb.notebook.view import StatusView

_SIZE = re.compile(r"[0-9.]+\s*[kmgtp]?i?b\Z", re.IGNORECASE)


@magics_class
class GpuMagics(Magics):
    """The magics of gpunb."""

    @magic_arguments()
    @argument(
        "share",
        nargs="?",
        default=None,
        help="what the cell gets: a part of one GPU such as 0.5, a number of whole GPUs, an "
        "amount of GPU memory such as 10GiB, or 0 for none. Default: 1.",
    )
    @argument("-n", "--name", help="name of the job, for status and messages")
    @argument("-t", "--type", help="accelerator type, or types in order of preference: A100,V100")
    @argument("-c", "--cpus", type=float, help="CPUs, by default 0 beside a GPU")
    @argument("-i", "--in", dest="inputs", help="names to send, instead of those the cell reads")
    @argument("-o", "--out", dest="outputs", help="names to bring home, instead of all; or 'none'")
    @argument("--timeout", type=float, help="seconds that the cell may run")
    @argument("--retries", type=int, default=0, help="further attempts after a crash; default 0")
    @argument(
        "--env", action="append", default=[], help="K=V, a variable for the worker; may repeat"
    )
    @no_var_expand
    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> StatusView | None:
        """Run a cell in a fresh process on a share of a GPU; without a cell, show devices and jobs.

        The names that the cell reads are sent along, those that it binds or whose objects it
        changes come back, and its output appears as it is made. Stop interrupts only the cell's
        process. When it ends, its share of the GPU is free, and all memory on it.

        Examples
        --------
        ::

            %%gpu 0.5
            model.fit(X, y)

            %%gpu 10GiB --type A100 --timeout 3600
            history = train(model, data)

            %gpu
        """
        assert self.shell is not None
        if cell is None:
            if line.strip():
                raise UsageError(
                    f"%gpu {line.strip()}: without a cell, %gpu takes no arguments and shows "
                    "devices and jobs; a cell begins with %%gpu"
                )
            return StatusView(api.status())
        expanded = self.shell.var_expand(line) if ("{" in line or "$" in line) else line
        try:
            # Not IPython's own way, which keeps quotes.
            arguments = self.gpu.parser.parse_args(shlex.split(expanded))
            options = _options(arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%gpu: {error}") from None
        running.run(
            self.shell,
            cell,
            f"%%gpu {line}".rstrip(),
            options,
            inputs=_names(arguments.inputs, "--in"),
            outputs=_names(arguments.outputs, "--out"),
        )
        return None


def _options(arguments: Any) -> Options:
    """The same options that the decorator takes."""
    options: dict[str, Any] = {"max_retries": arguments.retries, "max_calls": 1}
    share = arguments.share
    if share is None:
        options["num_gpus"] = 1
    elif _SIZE.match(share):
        options["gpu_memory"] = share
    else:
        options["num_gpus"] = _number(share)
    if arguments.type:
        options["accelerator_type"] = [each.strip() for each in arguments.type.split(",")]
    if arguments.env:
        options["runtime_env"] = {"env_vars": dict(_pair(each) for each in arguments.env)}
    said = {"num_cpus": arguments.cpus, "name": arguments.name, "timeout": arguments.timeout}
    options.update((name, value) for name, value in said.items() if value is not None)
    return Options().updated(options)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{text!r} is not a share: write a part of one GPU such as 0.5, a whole number of "
            "GPUs, or an amount of memory such as 10GiB"
        )
    return int(number) if number == int(number) else number


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--env {text!r} must be of the form NAME=VALUE")
    return name, value


def _names(text: str | None, option: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    if text.strip() == "none":
        return ()
    names = tuple(each for each in re.split(r"[,\s]+", text) if each)
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"%%gpu {option}: {name!r} is not a name")
    return names


def register(shell: Any) -> None:
    """Register the magics and send functions' output to the cells that submit them."""
    shell.register_magics(GpuMagics)
    notebook.attach(shell)


def unregister(shell: Any) -> None:
    """Take the magics out. The session goes on until `gpunb.shutdown()`."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("gpu", None)
    shell.magics_manager.registry.pop("GpuMagics", None)
