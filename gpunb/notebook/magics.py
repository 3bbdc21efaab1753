"""`%%gpu` and `%gpu`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from IPython.core.magic_arguments import argument, magic_arguments
from traitlets import Bool, TraitError, Unicode, validate

from gpunb.exceptions import GpunbError, InfeasibleRequestError
from gpunb.notebook import (
    completion,
    debugging,
    foreground,
    line_options,
    registration_hint,
    shell_hooks,
)
from gpunb.notebook import shell as notebook_shell
from gpunb.notebook.auto_magic import Switch
from gpunb.notebook.background import Jobs
from gpunb.notebook.capture import CellRequest
from gpunb.notebook.cell import short
from gpunb.notebook.sessions import Sessions
from gpunb.notebook.subcommands import HELP, TAKES, Subcommands
from gpunb.protocol import backend
from gpunb.scheduler.options import Options
from gpunb.scheduler.resources import parse_size
from gpunb.worker.cell.cell_types import LAST
from gpunb.worker.cell.shell import by_reference


@magics_class
class GpuMagics(Magics):
    """The magics of gpunb."""

    share = Unicode("1", help="what a cell gets that says nothing of it").tag(config=True)
    largest = Unicode("2GiB", help="a larger value stays in its worker, unless --out names it").tag(
        config=True
    )
    headless = Bool(
        None,
        allow_none=True,
        help="whether nobody would see output that comes after a cell's end, so that background "
        "cells run to their end first; by default, whether the front end takes no input",
    ).tag(config=True)

    @validate("largest")
    def _is_size(self, proposal: Any) -> str:
        text: str = proposal["value"]
        try:
            parse_size(text, "GpuMagics.largest")
        except ValueError as error:
            raise TraitError(str(error)) from None
        return text

    @validate("share")
    def _is_share(self, proposal: Any) -> str:
        text: str = proposal["value"]
        try:
            Options().updated(line_options.share(text))
        except ValueError as error:
            raise TraitError(f"GpuMagics.share: {error}") from None
        return text

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.notebook = notebook_shell.of(shell)
        self.jobs = self.notebook.part(Jobs)
        self.sessions = self.notebook.part(Sessions)
        self.subcommands = Subcommands(self.notebook)
        self.switch = Switch(self.notebook, lambda: self.jobs.busy)

    def after_cell(self, result: Any = None) -> None:
        """Drop objects that only sessions keep; after an error, say what may be missing here."""
        self.sessions.let_go(self.notebook.user_ns)
        if result is not None:
            registration_hint.tell(self.notebook, result)

    @magic_arguments()
    @argument(
        "share",
        nargs="?",
        default=None,
        help="what the cell gets: a part of one GPU such as 0.5, a number of whole GPUs, an "
        "amount of GPU memory such as 10GiB, auto for what earlier runs of the same cell took, or "
        "0 for none. Default: 1.",
    )
    @argument("-b", "--bg", action="store_true", help="go on at once, and run it meanwhile")
    @argument(
        "-n", "--name", help="name of the job, for status and messages; without control characters"
    )
    @argument(
        "-s",
        "--session",
        metavar="NAME",
        help="run it in this lasting worker, which keeps names and GPUs",
    )
    @argument(
        "-t",
        "--type",
        metavar="TYPES",
        help="accelerator type, or types in order of preference: A100,V100",
    )
    @argument(
        "--min-memory", metavar="SIZE", help="how large each GPU must be at least, as in 40GiB"
    )
    @argument(
        "-r",
        "--resource",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="a resource, or devices of another kind: NPU=1, with no GPU beside it unless a share "
        "is given; may repeat",
    )
    @argument("-c", "--cpus", type=float, metavar="N", help="CPUs, by default 0 beside a GPU")
    @argument(
        "-i",
        "--in",
        dest="inputs",
        metavar="NAMES",
        help="names to send, instead of those the cell reads",
    )
    @argument(
        "-o",
        "--out",
        dest="outputs",
        metavar="NAMES",
        help="names to bring home, instead of all; or 'none'",
    )
    @argument("--timeout", type=float, metavar="SECONDS", help="seconds that the cell may run")
    @argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="further attempts after a crash; default 0",
    )
    @argument("--ranks", type=int, metavar="N", help="run it in N processes, each with the share")
    @argument(
        "--gather", metavar="NAMES", help="names whose values come home as lists in rank order"
    )
    @argument("--only", metavar="RANKS", help="ranks of the session that run the cell: 0,2")
    @argument(
        "--show", metavar="RANKS", help="ranks whose output is shown in full: all, or as in 0,2"
    )
    @argument(
        "--isolate", action="store_true", help="let each rank see its own devices, and no others"
    )
    @argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="run the cell once for each value, as in rate=0.1,0.3, with NAME bound to it; may "
        "repeat, for all combinations. Or the name of a dict of lists, or of a list of dicts. "
        "--out says which names each trial keeps, --name in which file; the notebook's name "
        "'sweep' has the trials",
    )
    @argument("--fresh", action="store_true", help="delete the results in the sweep's file first")
    @argument(
        "--grow",
        action="store_true",
        help="after an out-of-memory error on a part of a GPU, run the cell again on twice the "
        "part; always with auto",
    )
    @argument(
        "--check",
        action="store_true",
        help="list what the cell's names lose on the way to the worker and home, such as graphs",
    )
    @argument(
        "--priority",
        type=int,
        metavar="N",
        help="of the jobs that wait, those with a higher number start first; default 0",
    )
    @argument(
        "--no-caps", action="store_true", help="let frameworks take more than the share they got"
    )
    @argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the worker; may repeat",
    )
    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def gpu(
        self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a cell in a fresh process on a share of a GPU; without a cell, show devices and jobs.

        The names that the cell reads are sent along, those that it binds or whose objects it
        changes come back, and its output appears as it is made. Stop interrupts only the cell's
        process. When it ends, its share of the GPU is free, and all memory on it.

        With --bg the notebook goes on at once; output and names come when they are there. With
        --session NAME the process, its names and its GPUs stay for further cells.

        Examples
        --------
        ::

            %%gpu 0.5
            model.fit(X, y)

            %%gpu 10GiB --type A100 --timeout 3600
            history = train(model, data)

            %%gpu 0.25 --bg --name sweep
            losses = [train(rate) for rate in rates]

            %%gpu 1 --ranks 4 --gather loss
            loss = train_with_ddp(model, data)

            loss = %gpu 0.5 evaluate(model)

        Without a cell
        --------------
        ::

            %gpu                         devices and jobs now
            %gpu SHARE EXPRESSION        the value of an expression, computed there
            @@WORDS@@
        """
        if cell is None:
            return self._line(line, local_ns)
        request, arguments = self._request(line, cell)
        if arguments.sweep:
            self._sweep(request, arguments)
            return None
        if not arguments.bg:
            foreground.run(self.notebook, request)
            return None
        error = None
        if not self.notebook.headless():
            job = self.jobs.start(request)
        else:
            sys.stdout.write(
                "gpunb: nobody would see what comes later here, so this background cell runs to "
                "its end first\n"
            )
            sys.stdout.flush()
            job, error = self.jobs.run_first(request)
        self.notebook.set_output(job)
        self.jobs.put_out(job.id)
        if error is not None:
            raise error
        return None

    gpu.__doc__ = (gpu.__doc__ or "").replace(
        "@@WORDS@@",
        "\n    ".join(
            f"%gpu {f'{name} {TAKES.get(name, str())}':24}{text}" for name, text in HELP.items()
        ),
    )

    def _sweep(self, request: CellRequest, arguments: Any) -> None:
        """Run a cell with --sweep."""
        from gpunb.notebook import sweep_cell

        try:
            trials = sweep_cell.trials_of(arguments.sweep, self.notebook.user_ns)
            sweep_cell.run(
                self.notebook, request, trials, fresh=arguments.fresh, background=arguments.bg
            )
        except (InfeasibleRequestError, UsageError):
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%gpu: {error}") from None
        except (GpunbError, OSError) as error:
            raise short(error) from None

    def _request(self, line: str, cell: str) -> tuple[CellRequest, Any]:
        """The request of a cell with this %%gpu line, and the arguments on the line."""
        expanded = line_options.expanded(self.notebook.user_ns, line)
        try:
            arguments = line_options.parsed(self.gpu.parser, expanded)
            asked = arguments.share is not None
            options = line_options.options(arguments, self.share)
            session = None
            line_options.check_sweep(arguments)
            if arguments.session is not None:
                line_options.check_session(arguments)
                session = self.sessions.get(arguments.session, options, asked)
            own = options if session is None else session.options
            ranks, show = line_options.ranks(arguments, own)
        except InfeasibleRequestError as error:
            raise short(error) from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%gpu: {error}") from None
        request = CellRequest(
            cell,
            "" if self.switch.wrote(line, cell) else f"%%gpu {line}".rstrip(),
            options,
            inputs=line_options.names(arguments.inputs, "--in"),
            outputs=line_options.names(arguments.outputs, "--out"),
            session=session,
            largest=parse_size(self.largest, "GpuMagics.largest"),
            ranks=ranks,
            show=show,
            check=arguments.check,
        )
        return request, arguments

    def _line(self, line: str, local: Mapping[str, Any] | None = None) -> Any:
        """Run `%gpu` without a cell."""
        names = self.notebook.user_ns
        first, rest = line_options.first_word(line)
        if not first:
            return self.subcommands.run("ps", "")
        first = line_options.expanded(names, first, local)
        if first in ("on", "off"):
            return self._turn(first, rest)
        if first in HELP:
            return self.subcommands.run(first, line_options.expanded(names, rest, local))
        if not rest or not (line_options.is_share(first) or first[0] in "{$"):
            raise UsageError(
                f"%gpu {line.strip()}: without a cell there has to be a word ({', '.join(HELP)}), "
                "or a share and an expression; a cell begins with %%gpu"
            )
        return self._value(first, rest.rstrip().removesuffix(";"), local)

    def _value(self, share: str, expression: str, local: Mapping[str, Any] | None) -> Any:
        """The value of an expression in a worker; `local` are the names of the function that
        asks."""
        try:
            compile(f"(\n{expression}\n)", "expression", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            text = f"%gpu: {expression!r} is not an expression: {error.msg}"
            raise UsageError(text) from None
        request, _ = self._request(share, expression)
        request = replace(
            request,
            first_line=self.notebook.lines_before(),
            outputs=(),
            expression=True,
            # A copy: since Python 3.13 it is a view of the function's frame.
            local={} if local is self.notebook.user_ns else dict(local or {}),
        )
        home = foreground.run(self.notebook, request)
        for name, reason in home.result.left_behind:
            if name == LAST:
                raise UsageError(f"%gpu: the value cannot come home: {reason}")
        return home.last

    def _turn(self, word: str, rest: str) -> None:
        if word == "off":
            if rest:
                raise UsageError(f"%gpu off: takes nothing more, not {rest!r}")
            self.switch.off()
            return
        request, arguments = self._request(rest, "pass")  # a bad line fails now
        if arguments.sweep:
            raise UsageError("%gpu on: --sweep is for one cell: write it in that cell's %%gpu line")
        if request.session is None:
            never = backend.current().ask("refusal", request.options.demand())
            if never is not None:
                raise short(InfeasibleRequestError(f"%gpu on: {never}"))
        self.switch.on(rest)


def register(ip: Any) -> None:
    """Register the magics and send functions' output to the cells that submit them."""
    unregister(ip)
    ip.register_magics(GpuMagics)
    by_reference(type(ip))
    magics: GpuMagics = ip.magics_manager.registry["GpuMagics"]
    ip.events.register("post_run_cell", magics.after_cell)
    actions = GpuMagics.gpu.parser._actions  # noqa: SLF001 - argparse has no public way
    names = {name for each in actions for name in each.option_strings}
    completion.register(magics.notebook, sorted(name for name in names if name[:2] == "--"))
    debugging.install(magics.notebook)
    magics.jobs.register()
    shell_hooks.install(ip)


def unregister(ip: Any) -> None:
    """Take the magics out. The session goes on until `gpunb.shutdown()`."""
    magics: GpuMagics | None = ip.magics_manager.registry.pop("GpuMagics", None)
    if magics is None:
        return
    magics.switch.off()
    ip.events.unregister("post_run_cell", magics.after_cell)
    completion.unregister(magics.notebook)
    debugging.uninstall(magics.notebook)
    magics.jobs.unregister()
    for kind in ("line", "cell"):
        ip.magics_manager.magics[kind].pop("gpu", None)
    if magics in ip.configurables:
        ip.configurables.remove(magics)
