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

from gpunb import backend, notebook
from gpunb.core.options import Options
from gpunb.core.resources import parse_size
from gpunb.exceptions import InfeasibleRequestError
from gpunb.notebook import completion, debugging, jobs, lines, running, sessions
from gpunb.notebook.cells import Request, short
from gpunb.notebook.output import may_ask
from gpunb.notebook.switch import Switch
from gpunb.notebook.words import HELP, TAKES, Words
from gpunb.workers.ending import LAST
from gpunb.workers.shell import by_reference


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
            Options().updated(lines.share(text))
        except ValueError as error:
            raise TraitError(f"GpuMagics.share: {error}") from None
        return text

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.sessions = sessions.of(shell)
        self.words = Words(shell, self.sessions)
        self.switch = Switch(shell, lambda: jobs.of(shell).busy)

    def let_go(self, result: Any = None) -> None:
        """After a cell."""
        assert self.shell is not None
        self.sessions.let_go(self.shell.user_ns)

    @magic_arguments()
    @argument(
        "share",
        nargs="?",
        default=None,
        help="what the cell gets: a part of one GPU such as 0.5, a number of whole GPUs, an "
        "amount of GPU memory such as 10GiB, or 0 for none. Default: 1.",
    )
    @argument("-b", "--bg", action="store_true", help="go on at once, and run it meanwhile")
    @argument("-n", "--name", help="name of the job, for status and messages")
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

            loss = %gpu 0.5 evaluate(model)

        Without a cell
        --------------
        ::

            %gpu                         devices and jobs now
            %gpu SHARE EXPRESSION        the value of an expression, computed there
            @@WORDS@@
        """
        assert self.shell is not None
        if cell is None:
            return self._line(line, local_ns)
        request, bg = self._request(line, cell)
        if not bg:
            running.run(self.shell, request)
            return None
        book, error = jobs.of(self.shell), None
        if self._may_come_late():
            job = book.start(request)
        else:
            sys.stdout.write(
                "gpunb: nobody would see what comes later here, so this background cell runs to "
                "its end first\n"
            )
            sys.stdout.flush()
            job, error = book.run_first(request)
        self.shell.displayhook.update_user_ns(job)
        self.shell.displayhook.fill_exec_result(job)
        book.put_out(job)
        if error is not None:
            raise error
        return None

    gpu.__doc__ = (gpu.__doc__ or "").replace(
        "@@WORDS@@",
        "\n    ".join(
            f"%gpu {f'{name} {TAKES.get(name, str())}':24}{text}" for name, text in HELP.items()
        ),
    )

    def _request(self, line: str, cell: str) -> tuple[Request, bool]:
        """What a %%gpu line asks for, and whether in the background."""
        assert self.shell is not None
        expanded = lines.expanded(self.shell, line)
        try:
            arguments = lines.parsed(self.gpu.parser, expanded)
            asked = arguments.share is not None
            options = lines.options(arguments, self.share)
            session = None
            if arguments.session is not None:
                lines.check_session(arguments)
                session = self.sessions.get(arguments.session, options, asked)
        except InfeasibleRequestError as error:
            raise short(error) from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%gpu: {error}") from None
        request = Request(
            cell,
            "" if self.switch.wrote(line, cell) else f"%%gpu {line}".rstrip(),
            options,
            inputs=lines.names(arguments.inputs, "--in"),
            outputs=lines.names(arguments.outputs, "--out"),
            session=session,
            largest=parse_size(self.largest, "GpuMagics.largest"),
        )
        return request, arguments.bg

    def _line(self, line: str, local: Mapping[str, Any] | None = None) -> Any:
        """`%gpu` without a cell."""
        assert self.shell is not None
        first, rest = lines.first_word(line)
        if not first:
            return self.words.say("ps", "")
        first = lines.expanded(self.shell, first, local)
        if first in ("on", "off"):
            return self._turn(first, rest)
        if first in self.words:
            return self.words.say(first, lines.expanded(self.shell, rest, local))
        if not rest or not (lines.is_share(first) or first[0] in "{$"):
            raise UsageError(
                f"%gpu {line.strip()}: without a cell there has to be a word ({', '.join(HELP)}), "
                "or a share and an expression; a cell begins with %%gpu"
            )
        return self._value(first, rest.rstrip().removesuffix(";"), local)

    def _value(self, share: str, expression: str, local: Mapping[str, Any] | None) -> Any:
        """What an expression gives in a worker, with the names of the function that asks."""
        assert self.shell is not None
        try:
            compile(f"(\n{expression}\n)", "expression", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            text = f"%gpu: {expression!r} is not an expression: {error.msg}"
            raise UsageError(text) from None
        request, _ = self._request(share, expression)
        request = replace(
            request,
            first_line=_lines_before(self.shell),
            outputs=(),
            expression=True,
            local=None if local is self.shell.user_ns else local,
        )
        home = running.run(self.shell, request)
        for name, reason in home.ending.kept:
            if name == LAST:
                raise UsageError(f"%gpu: the value cannot come home: {reason}")
        return home.last

    def _turn(self, word: str, rest: str) -> None:
        if word == "off":
            if rest:
                raise UsageError(f"%gpu off: takes nothing more, not {rest!r}")
            self.switch.off()
            return
        request, _ = self._request(rest, "pass")  # it is refused now, not with the next cell
        if request.session is None:
            never = backend.current().ask("refusal", request.options.demand())
            if never is not None:
                raise short(InfeasibleRequestError(f"%gpu on: {never}"))
        self.switch.on(rest)

    def _may_come_late(self) -> bool:
        return may_ask(self.shell) if self.headless is None else not self.headless


def _lines_before(shell: Any) -> str:
    """The running cell's lines before the one that is reached, as a comment."""
    frame = sys._getframe()  # noqa: SLF001 - what `inspect` uses
    while frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back  # type: ignore[assignment]
    source = shell.user_ns.get("In", [""])[-1].splitlines()
    number = shell.displayhook.prompt_count
    files = shell.compile._filename_map  # noqa: SLF001 - there is no public way
    if frame is None or files.get(frame.f_code.co_filename) != number:
        return ""
    return "\n# ".join(["", *source[: frame.f_lineno - 1]])[2:]


def register(shell: Any) -> None:
    """Register the magics and send functions' output to the cells that submit them."""
    unregister(shell)
    shell.register_magics(GpuMagics)
    by_reference(type(shell))
    shell.events.register("post_run_cell", shell.magics_manager.registry["GpuMagics"].let_go)
    completion.register(shell)
    debugging.install(shell)
    jobs.of(shell).register()
    notebook.attach(shell)


def unregister(shell: Any) -> None:
    """Take the magics out. The session goes on until `gpunb.shutdown()`."""
    magics = shell.magics_manager.registry.pop("GpuMagics", None)
    if magics is None:
        return
    magics.switch.off()
    shell.events.unregister("post_run_cell", magics.let_go)
    completion.unregister(shell)
    debugging.uninstall(shell)
    jobs.of(shell).unregister()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("gpu", None)
    if magics in shell.configurables:
        shell.configurables.remove(magics)
