"""The accelerator plug-ins that are known, by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from gpunb.accelerators.base import Accelerator
from gpunb.accelerators.nvidia import Nvidia
from gpunb.accelerators.simulated import Logical, Simulated

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "gpunb.accelerators"
"""The entry point group in which packages name their plug-ins."""

Plugin = TypeVar("Plugin", bound=type[Accelerator])

# Registered without an entry point, so that they work from a source tree too.
_known: dict[str, type[Accelerator]] = {Nvidia.name: Nvidia}
# Imported at first use, because a session may never need them.
_built_in: dict[str, str] = {
    "amd": "Amd",
    "intel": "Intel",
    "apple": "Apple",
    "metax": "Metax",
    "ascend": "Ascend",
    "gaudi": "Gaudi",
    "neuron": "Neuron",
    "tpu": "Tpu",
    "rebellions": "Rebellions",
    "tenstorrent": "Tenstorrent",
    "furiosa": "Furiosa",
    "mobilint": "Mobilint",
}
# These devices are pinned like others, but never detected.
_without_hardware: dict[str, type[Accelerator]] = {Logical.name: Logical, Simulated.name: Simulated}
_revision = 0


def register(accelerator: Plugin) -> Plugin:
    """Add a plug-in; also a class decorator. Returns it. A class may be registered again.

    Raises:
        TypeError: not a subclass of `Accelerator`, or one with abstract methods.
        ValueError: the plug-in has no name, or the name of another one.
    """
    global _revision
    if not isinstance(accelerator, type) or not issubclass(accelerator, Accelerator):
        raise TypeError(f"an accelerator plug-in is a subclass of Accelerator, not {accelerator!r}")
    if missing := sorted(accelerator.__abstractmethods__):
        raise TypeError(f"the plug-in {accelerator.__qualname__} does not define {missing}")
    name = getattr(accelerator, "name", None)
    if not name or not isinstance(name, str):
        raise ValueError(f"the plug-in {accelerator.__qualname__} has no name")
    other = _known.get(name) or _without_hardware.get(name) or _load(name) or accelerator
    # A class of the same origin was defined again in a notebook, or its module was reloaded.
    if _origin(other) != _origin(accelerator):
        raise ValueError(
            f"the plug-in name {name!r} is taken by {_origin(other)}: {_origin(accelerator)} "
            "needs another"
        )
    if _known.get(name) is not accelerator:
        _known[name] = accelerator
        _revision += 1
    return accelerator


def registered() -> tuple[type[Accelerator], ...]:
    """The plug-ins registered so far, built-in ones first. Detection adds those of packages."""
    first = {name: _known[name] for name in _known if name == Nvidia.name}
    built_in = {name: _load(name) or _known[name] for name in _built_in}
    return tuple((first | built_in | _known).values())


def revision() -> int:
    """A number that changes whenever a plug-in is added or replaced."""
    return _revision


def find(name: str) -> type[Accelerator]:
    """The plug-in that pins and measures the devices of a vendor.

    Raises:
        LookupError: no plug-in has the name, including those of installed packages.
    """
    if name not in _known and name not in _without_hardware and _load(name) is None:
        load_installed()
    try:
        return _known.get(name) or _without_hardware[name]
    except KeyError:
        known = ", ".join(sorted({*_known, *_without_hardware, *_built_in}))
        raise LookupError(f"no accelerator plug-in is named {name!r}; known: {known}") from None


def _load(name: str) -> type[Accelerator] | None:
    """Import and register the built-in plug-in of that name; None if registered or unknown."""
    if name not in _built_in or name in _known:
        return None
    module = importlib.import_module(f"gpunb.accelerators.{name}")
    plugin: type[Accelerator] = getattr(module, _built_in[name])
    _known[name] = plugin
    return plugin


def load_installed() -> tuple[str, ...]:
    """Register the plug-ins of installed packages. Returns a text for each error."""
    problems = []
    try:
        points = sorted(_entry_points(), key=lambda point: point.name)
    except Exception as error:  # noqa: BLE001 - a broken package elsewhere must not stop gpunb
        return (f"the installed accelerator plug-ins cannot be listed: {_described(error)}",)
    for point in points:
        try:
            register(point.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's import may do anything
            package = f" of {point.dist.name}" if point.dist else ""
            problems.append(
                f"the accelerator plug-in {point.name!r}{package} ({point.value}) does not load: "
                f"{_described(error)}; update that package or remove it"
            )
    return tuple(problems)


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # takes tens of milliseconds

    return entry_points(group=GROUP)


def _origin(accelerator: type) -> str:
    return f"{accelerator.__module__}.{accelerator.__qualname__}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
