"""A %%gpu line: from its text to the options of a cell."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.utils.text import DollarFormatter

from gpunb.core.options import Options

_SIZE = re.compile(r"[0-9.]+\s*[kmgtp]?i?b\Z", re.IGNORECASE)
_FIRST = re.compile(r"((?:\{[^{}]*\}|\S)+)\s*(.*)\Z", re.DOTALL)


def expanded(shell: Any, line: str, local: Mapping[str, Any] | None = None) -> str:
    """The line with ``{name}`` and ``$name`` filled in from the notebook, and before it from the
    `local` names of the function that says the line.

    Not by `var_expand`, which looks at the names of whoever calls it first.
    """
    if "{" not in line and "$" not in line:
        return line
    try:
        return DollarFormatter().vformat(line, (), {**shell.user_ns, **(local or {})})
    except Exception:
        return line  # as IPython does: the braces may have been meant


def first_word(line: str) -> tuple[str, str]:
    """What stands before the first space that is not within braces, and what comes after it."""
    found = _FIRST.match(line.strip())
    return (found[1], found[2]) if found is not None else ("", "")


def is_share(text: str) -> bool:
    """Whether it is meant as one: as a number, or as an amount of memory."""
    return bool(_SIZE.match(text)) or text[:1].isdigit() or text[:1] == "."


def parsed(parser: Any, line: str) -> Any:
    """The arguments on a line.

    Raises:
        UsageError: they are none.
        ValueError: a quotation has no end.
    """
    words = shlex.split(line)  # not IPython's own way, which keeps quotes
    try:
        return parser.parse_args(words)
    except UsageError as error:
        raise UsageError(f"%%gpu: {error} (%gpu? lists what there is)") from None


def check_session(arguments: Any) -> None:
    """Raises ValueError if these are no arguments for a cell of a session."""
    if not arguments.session.isidentifier():
        raise ValueError(f"--session {arguments.session!r} must be a name, like a variable's")
    if arguments.retries:
        raise ValueError("--retries does not go with --session: its names would be lost")


def options(arguments: Any, default: str) -> Options:
    """The same options that the decorator takes; `default` is the share that is meant by none.

    Raises:
        ValueError, TypeError: a bad value.
    """
    given: dict[str, Any] = {"max_retries": arguments.retries, "max_calls": 1}
    if arguments.resource:
        given["resources"] = dict(amount(each, "--resource") for each in arguments.resource)
        default = "0"
    given.update(share(default if arguments.share is None else arguments.share))
    if arguments.type:
        given["accelerator_type"] = [each.strip() for each in arguments.type.split(",")]
    if arguments.no_caps:
        given["caps"] = False
    if arguments.env:
        given["runtime_env"] = {"env_vars": dict(_pair(each) for each in arguments.env)}
    said = {
        "num_cpus": arguments.cpus,
        "name": arguments.name,
        "timeout": arguments.timeout,
        "min_memory": arguments.min_memory,
    }
    given.update((name, value) for name, value in said.items() if value is not None)
    return Options().updated(given)


def share(text: str) -> dict[str, Any]:
    """The option that a share stands for.

    Raises:
        ValueError: it stands for none.
    """
    return {"gpu_memory": text} if _SIZE.match(text) else {"num_gpus": _number(text)}


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


def amount(text: str, option: str) -> tuple[str, float]:
    """The name and the number of a resource.

    Raises:
        ValueError: naming the option, if it is no such pair.
    """
    name, equals, after = text.partition("=")
    try:
        number = float(after)
    except ValueError:
        number = math.nan
    if not equals or not name or not math.isfinite(number):
        raise ValueError(f"{option} {text!r} must be of the form NAME=AMOUNT, such as NPU=1")
    return name, number


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--env {text!r} must be of the form NAME=VALUE")
    return name, value


def names(text: str | None, option: str) -> tuple[str, ...] | None:
    """The names after an option; None if it was not given.

    Raises:
        UsageError: one is none.
    """
    if text is None:
        return None
    if text.strip() == "none":
        return ()
    found = tuple(each for each in re.split(r"[,\s]+", text) if each)
    for name in found:
        if not name.isidentifier():
            raise UsageError(f"%%gpu {option}: {name!r} is not a name")
    return found
