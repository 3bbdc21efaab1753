"""The settings of Python's own modules, and the state of its random generator."""

from __future__ import annotations

import re
import sys
import warnings
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

from gpunb.worker.library import STATE, Library, State


def _decimal_context(decimal: Any) -> State:
    context = decimal.getcontext()
    traps = [each.__name__ for each, wanted in context.traps.items() if wanted]
    return {**{name: getattr(context, name) for name in _DECIMAL}, "traps": sorted(traps)}


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _set_decimal(decimal: Any, name: str, value: Any) -> None:
    context = decimal.getcontext()
    if name != "traps":
        setattr(context, name, value)
        return
    for each in context.traps:
        context.traps[each] = each.__name__ in value


def _decimal_defaults(decimal: Any) -> State:
    fresh = decimal.Context()
    traps = [each.__name__ for each, wanted in fresh.traps.items() if wanted]
    return {**{name: getattr(fresh, name) for name in _DECIMAL}, "traps": sorted(traps)}


_CATEGORIES = ("LC_COLLATE", "LC_MONETARY", "LC_NUMERIC", "LC_TIME")


def _locale_state(locale: Any) -> State:
    return {name: locale.setlocale(getattr(locale, name)) for name in _CATEGORIES}


_HANDLERS = "\x00handlers"


def _logging_state(logging: Any) -> State:
    """The levels of loggers by name, and the root logger's handlers as `basicConfig` makes them."""
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    state: State = {
        name: level for name, each in loggers.items() if (level := getattr(each, "level", 0))
    }
    state.pop("IPKernelApp", None)  # it is of the notebook's process
    state[_HANDLERS] = [arguments for _, arguments in _root_handlers(logging)]
    return state


def _root_handlers(logging: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The root logger's handlers that write to a standard stream or a file, and what they are made
    of."""
    for each in logging.root.handlers:
        form = each.formatter or logging.Formatter()
        for stream in ("stdout", "stderr"):
            ours = type(each) is logging.StreamHandler and each.stream is getattr(sys, stream)
            if ours and type(form) is logging.Formatter:
                yield each, (stream, each.level, *_format(logging, form))
        if type(each) is logging.FileHandler and type(form) is logging.Formatter:
            place = each.baseFilename, each.encoding
            yield each, (place, each.level, *_format(logging, form))


def _format(logging: Any, form: Any) -> tuple[Any, ...]:
    styles = {kind: style for style, (kind, _) in logging._STYLES.items()}  # noqa: SLF001
    return form._fmt, form.datefmt, styles.get(type(form._style), "%")  # noqa: SLF001


def _set_logging(logging: Any, name: str, value: Any) -> None:
    if name != _HANDLERS:
        new = bool(name) and name not in logging.root.manager.loggerDict
        logger = logging.getLogger(name or None)
        if new:
            logger.level = value  # `setLevel` clears what all loggers have noted of their levels
        else:
            logger.setLevel(value)
        return
    for each, _ in list(_root_handlers(logging)):
        logging.root.removeHandler(each)
        if isinstance(each, logging.FileHandler):
            each.close()
    for stream, level, text, dates, style in value:
        if isinstance(stream, str):
            handler = logging.StreamHandler(getattr(sys, stream))
        else:  # the file goes on, whatever its mode was
            handler = logging.FileHandler(stream[0], encoding=stream[1], delay=True)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(text, dates, style))
        logging.root.addHandler(handler)


def _filters(_: Any) -> State:
    """The filters of warnings, with module and name of each category: to unpickle a category would
    load its library."""
    return {
        "filters": [
            (action, _text(message), (kind.__module__, kind.__qualname__), _text(where), line)
            for action, message, kind, where, line in cast("list[Any]", warnings.filters)
        ]
    }


def _text(pattern: Any) -> Any:
    """A regular expression as plain values: to unpickle one would compile it."""
    known = isinstance(pattern, (re.Pattern, _Pattern))
    return (pattern.pattern, pattern.flags) if known else pattern


class _Pattern:
    """A regular expression that is compiled when a warning is compared with it: few ever are."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern = pattern
        self.flags = flags

    def match(self, text: str) -> re.Match[str] | None:
        return re.compile(self.pattern, self.flags).match(text)

    def __eq__(self, other: object) -> bool:
        """As the compiled one: `warnings` looks whether it has a filter already."""
        return bool(_text(other) == _text(self))

    def __hash__(self) -> int:
        return hash(_text(self))


def _set_filters(_: Any, __: str, filters: Sequence[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    warnings.filters.extend(  # type: ignore[attr-defined]
        (action, _pattern(message), _category(*kind), _pattern(where), line)
        for action, message, kind, where, line in filters
    )


def _pattern(text: Any) -> Any:
    return _Pattern(*text) if isinstance(text, tuple) else text


def _category(module: str, name: str) -> type:
    """A category of warnings; as long as its library is not loaded, one that matches none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    return type(name, (Warning,), {"__module__": module, "__qualname__": name})


def _random_state(random: Any) -> State:
    version, numbers, rest = random.getstate()
    return {STATE: (version, array("I", numbers).tobytes(), rest)}  # they are many


def _set_random_state(random: Any, version: int, numbers: bytes, rest: float | None) -> None:
    random.setstate((version, tuple(array("I", numbers)), rest))


PYTHON = {
    "decimal": Library("decimal", _decimal_context, _set_decimal, _decimal_defaults),
    "locale": Library(
        "locale",
        _locale_state,
        lambda locale, name, value: locale.setlocale(getattr(locale, name), value),
        lambda _: dict.fromkeys(_CATEGORIES, "C"),
    ),
    "logging": Library("logging", _logging_state, _set_logging, lambda _: {"": 30, _HANDLERS: []}),
    "warnings": Library("warnings", _filters, _set_filters),
    "random": Library(
        "random",
        _random_state,
        lambda random, _, value: _set_random_state(random, *value),
        random=True,
    ),
}
