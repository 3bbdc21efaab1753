"""Parses a %%gpu line into the options of a cell."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.utils.text import DollarFormatter

from gpunb.protocol.ranks import Ranks
from gpunb.scheduler.options import AUTO, Options

_SIZE = re.compile(r"[0-9.]+\s*[kmgtp]?i?b\Z", re.IGNORECASE)
_FIRST = re.compile(r"((?:\{[^{}]*\}|\S)+)\s*(.*)\Z", re.DOTALL)


def expanded(names: Mapping[str, Any], line: str, local: Mapping[str, Any] | None = None) -> str:
    """The line with values in place of ``{name}`` and ``$name``: of the function that has the line,
    by its `local` names, then of the notebook, by its `names`.

    IPython's `var_expand` would look at the names of its caller first.
    """
    if "{" not in line and "$" not in line:
        return line
    try:
        return DollarFormatter().vformat(line, (), {**names, **(local or {})})
    except Exception:
        return line  # as IPython does: the braces may have been meant


def first_word(line: str) -> tuple[str, str]:
    """The text before the first space that is not within braces, and the text after it."""
    match = _FIRST.match(line.strip())
    return (match[1], match[2]) if match is not None else ("", "")


def is_share(text: str) -> bool:
    """Whether a text looks like a share: a number, an amount of memory, or "auto"."""
    return text == AUTO or bool(_SIZE.match(text)) or text[:1].isdigit() or text[:1] == "."


def parsed(parser: Any, line: str) -> Any:
    """The arguments on a line.

    Raises:
        UsageError: the parser refuses them.
        ValueError: a quotation has no end.
    """
    words = shlex.split(line)  # IPython's own function keeps quotes
    try:
        return parser.parse_args(words)
    except UsageError as error:
        raise UsageError(f"%%gpu: {error} (%gpu? lists what there is)") from None


def check_session(arguments: Any) -> None:
    """Raise ValueError unless these are arguments for a cell of a session."""
    if not arguments.session.isidentifier():
        raise ValueError(f"--session {arguments.session!r} must be a name, like a variable's")
    if arguments.share == AUTO:
        Options().updated(share(AUTO)).check_not_auto()
    if arguments.retries:
        raise ValueError("--retries does not go with --session: its names would be lost")
    if arguments.grow:
        raise ValueError("--grow does not go with --session: its names would be lost")


def check_sweep(arguments: Any) -> None:
    """Raise ValueError unless these are arguments for a sweep, or for no sweep."""
    if not arguments.sweep:
        if arguments.fresh:
            raise ValueError("--fresh goes with --sweep, and with --name, which names its file")
        return
    if arguments.session is not None:
        raise ValueError("--sweep does not go with --session: each trial has a process of its own")
    if arguments.check:
        raise ValueError("--check does not go with --sweep: check the cell for one value first")
    if arguments.ranks is not None:
        raise ValueError(
            f"--ranks {arguments.ranks} does not go with --sweep: a trial runs in one process"
        )


def options(arguments: Any, default: str) -> Options:
    """The options as the decorator takes them; `default` is the share of a line without one.

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
    if arguments.ranks is not None:
        given["ranks"] = arguments.ranks
    if arguments.isolate:
        given["isolate"] = True
    if arguments.no_caps:
        given["caps"] = False
    if arguments.grow:
        given["retry_oom"] = True
    if arguments.env:
        given["runtime_env"] = {"env_vars": dict(_pair(each) for each in arguments.env)}
    plain = {
        "num_cpus": arguments.cpus,
        "name": arguments.name,
        "timeout": arguments.timeout,
        "min_memory": arguments.min_memory,
        "priority": arguments.priority,
    }
    given.update((name, value) for name, value in plain.items() if value is not None)
    return Options().updated(given)


def ranks(arguments: Any, own: Options) -> tuple[Ranks | None, frozenset[int]]:
    """The ranks of a cell, and those that are shown in full; None for a cell without ranks.

    Args:
        own: the options of the cell, or of its session.

    Raises:
        ValueError: an option that does not go with the others.
        UsageError: a name to gather is no name.
    """
    size = own.ranks
    texts = {name: getattr(arguments, name) for name in ("only", "gather", "show")}
    if size is None:
        for name, text in texts.items():
            if text is not None:
                raise ValueError(f"--{name} {text} is for a cell with several ranks: add --ranks N")
        return None, frozenset()
    if texts["only"] is not None and arguments.session is None:
        raise ValueError(
            f"--only {texts['only']} is for a session, whose other ranks go on: add --session NAME"
        )
    only, show = _numbers(texts["only"], "--only", size), _numbers(texts["show"], "--show", size)
    gather = names(texts["gather"], "--gather") or ()
    return Ranks(size, bool(own.isolate), gather, tuple(sorted(only))), frozenset(show)


def _numbers(text: str | None, option: str, size: int) -> set[int]:
    """The ranks after an option."""
    if text is None:
        return set()
    if text.strip() == "all":
        return set(range(size))
    found = set()
    for each in text.split(","):
        if not each.strip().isdigit() or int(each) >= size:
            raise ValueError(
                f"{option} {text}: {each!r} is no rank; the {size} ranks are 0 to {size - 1}"
            )
        found.add(int(each))
    return found


def share(text: str) -> dict[str, Any]:
    """The option for a share.

    Raises:
        ValueError: the text is no share.
    """
    if text == AUTO:
        return {"num_gpus": AUTO}
    return {"gpu_memory": text} if _SIZE.match(text) else {"num_gpus": _number(text)}


def _number(text: str) -> float:
    number = _float(text)
    if not math.isfinite(number):
        raise ValueError(
            f"{text!r} is not a share: write a part of one GPU such as 0.5, a whole number of "
            "GPUs, an amount of memory such as 10GiB, or auto"
        )
    return int(number) if number == int(number) else number


def amount(text: str, option: str) -> tuple[str, float]:
    """The name and the number of a resource.

    Raises:
        ValueError: the text, of this option, is no such pair.
    """
    name, equals, after = text.partition("=")
    number = _float(after)
    if not equals or not name or not math.isfinite(number):
        raise ValueError(f"{option} {text!r} must be of the form NAME=AMOUNT, such as NPU=1")
    return name, number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--env {text!r} must be of the form NAME=VALUE")
    return name, value


def names(text: str | None, option: str) -> tuple[str, ...] | None:
    """The names after an option; None if it was not given.

    Raises:
        UsageError: one of them is no name.
    """
    if text is None:
        return None
    if text.strip() == "none":
        return ()
    names = tuple(each for each in re.split(r"[,\s]+", text) if each)
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"%%gpu {option}: {name!r} is not a name")
    return names
