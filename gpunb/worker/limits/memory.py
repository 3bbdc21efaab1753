"""Limits the device memory of frameworks to the worker's share, by their documented settings.

Those that read their limit from the environment find it there. The others are told once they are
imported, without making a context on the device: PyTorch when it makes one itself. Nothing is
imported for this, and what the user has set counts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_MIB = 2**20

_TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where PyTorch reads the settings of its allocator: the first of these that is set."""

_TORCH_SETTING = "per_process_memory_fraction"
_TORCH_READS_IT = (2, 10)
"""The release from which on that setting is known; earlier ones refuse to work with it."""

_JAX = "XLA_CLIENT_MEM_FRACTION"
_JAX_BEFORE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_RENAMED = (0, 5)
"""The release from which on the first name is sure to be known. Both at once are an error."""

_RELEASE = re.compile(r"^_*version_*\s*(?::[^=]*)?=\s*['\"](\d+)\.(\d+)", re.MULTILINE)
_FOR_DEVICES = re.compile(r"^(?:cuda|hip)\b[^=]*=\s*['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Caps:
    """The limit of a framework's memory pool.

    Attributes:
        fraction: of the device's memory, between 0 and 1.
        memory: the same in bytes; None if the device's memory is not known.
    """

    fraction: float
    memory: int | None = None


class LimitHook(importlib.abc.MetaPathFinder):
    """Finds nothing itself: looks on when one of the frameworks is found, and tells it its limit
    once it is loaded."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    self._look_on(name, spec)
                return spec
        return None

    def _look_on(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        before, after = _HOOKS[name]
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if before is not None:
                _quietly(name, before, spec.origin, self.caps)
            execute(module)
            if after is not None:
                _quietly(name, after, module, self.caps)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader with slots: the framework is not what its name says


def install(caps: Caps) -> None:
    """Keep this process, and what it starts, to its share. Before anything of the user's runs."""
    _set_variables(caps)
    # Not with isinstance, which takes 0.1 ms in a fresh process for an abstract base class.
    if any(type(each) is LimitHook and each.caps == caps for each in sys.meta_path):
        return
    sys.meta_path.insert(0, LimitHook(caps))
    for name, (_, after) in _HOOKS.items():
        module = sys.modules.get(name)
        if module is not None and after is not None:  # the zygote has imported it
            _quietly(name, after, module, caps)


def rehearse() -> None:
    """Do and undo what `install` does where no framework is loaded: most of its time is the first
    use of code, and of pages that a fork shares."""
    hook = LimitHook(Caps(0.5))
    for name in _set_variables(hook.caps):
        del os.environ[name]
    sys.meta_path.insert(0, hook)
    sys.meta_path.remove(hook)


def _set_variables(caps: Caps) -> list[str]:
    """Set the variables that frameworks read, except those that are set. Return their names."""
    fraction = {} if _JAX in os.environ else {_JAX_BEFORE: f"{caps.fraction:.4f}"}
    memory = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "CUPY_GPU_MEMORY_LIMIT": _cupy(caps)}
    missing = {
        name: value for name, value in {**fraction, **memory}.items() if name not in os.environ
    }
    os.environ.update(missing)
    return list(missing)


def _cupy(caps: Caps) -> str:
    return str(caps.memory) if caps.memory is not None else f"{100 * caps.fraction:.2f}%"


def _quietly(name: str, configure: Callable[[Any, Caps], None], subject: Any, caps: Caps) -> None:
    """Configure a framework. After a failure it works without a limit; the sampler measures it."""
    try:
        configure(subject, caps)
    except Exception as error:
        text = f"gpunb: {name} could not be told its share: {type(error).__name__}: {error}\n"
        sys.stderr.write(text)


# ------------------------------------------------------------------------------------ frameworks


def _before_torch(origin: str | None, caps: Caps) -> None:
    """The setting in the environment also reaches the processes that the task starts."""
    text = _version_of(origin)
    release = _release(text)
    if release is None or release < _TORCH_READS_IT or not _FOR_DEVICES.search(text):
        return
    name = next((each for each in _TORCH if os.environ.get(each)), _TORCH[0])
    settings = os.environ.get(name, "")
    if _TORCH_SETTING in settings or "backend" in settings:  # of another allocator, perhaps
        return
    ours = f"{_TORCH_SETTING}:{caps.fraction:.4f}"
    os.environ[name] = f"{settings},{ours}" if settings else ours


def _torch(torch: Any, caps: Caps) -> None:
    if any(_TORCH_SETTING in os.environ.get(each, "") for each in _TORCH) and not _ours(caps):
        return
    cuda = torch.cuda

    def limit() -> None:
        _quietly("torch", _limit_torch, cuda, caps)

    if cuda.is_initialized():
        limit()
        return
    # What `_lazy_call` does, but for the text of a traceback, which it takes milliseconds to make.
    # There is no public way that makes no context.
    queue = getattr(cuda, "_queued_calls", None)
    if isinstance(queue, list):
        queue.append((limit, []))
    else:
        cuda._lazy_call(limit)  # noqa: SLF001


def _limit_torch(cuda: Any, caps: Caps) -> None:
    for device in range(cuda.device_count()):
        cuda.set_per_process_memory_fraction(caps.fraction, device)


def _ours(caps: Caps) -> bool:
    """Whether the setting in the environment is the one that was made here."""
    ours = f"{_TORCH_SETTING}:{caps.fraction:.4f}"
    return any(ours in os.environ.get(each, "") for each in _TORCH)


def _before_jax(origin: str | None, caps: Caps) -> None:
    release = _release(_version_of(origin))
    ours = f"{caps.fraction:.4f}"
    if release is None or release < _JAX_RENAMED or os.environ.get(_JAX_BEFORE) != ours:
        return
    if _JAX not in os.environ:
        os.environ[_JAX] = os.environ.pop(_JAX_BEFORE)


def _tensorflow(tensorflow: Any, caps: Caps) -> None:
    """Growth alone has no limit. A device that is configured already is the user's."""
    if caps.memory is None:
        return
    config = tensorflow.config
    limit = config.LogicalDeviceConfiguration(memory_limit=caps.memory // _MIB)
    for device in config.list_physical_devices("GPU"):
        if not config.get_logical_device_configuration(device):
            config.set_logical_device_configuration(device, [limit])


def _rmm(rmm: Any, caps: Caps) -> None:
    if caps.memory is None:
        return
    now = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(rmm.mr.LimitingResourceAdaptor(now, caps.memory))


_Before = Callable[[str | None, Caps], None]
_After = Callable[[Any, Caps], None]

_HOOKS: dict[str, tuple[_Before | None, _After | None]] = {
    "torch": (_before_torch, _torch),
    "jax": (_before_jax, None),
    "tensorflow": (None, _tensorflow),
    "rmm": (None, _rmm),
}
"""Functions that run before a framework is loaded, given its path, and after."""


def _version_of(origin: str | None) -> str:
    """The text of the package's version module, without importing anything."""
    try:
        with open(os.path.join(os.path.dirname(origin or ""), "version.py")) as file:
            return file.read()
    except OSError:
        return ""


def _release(text: str) -> tuple[int, int] | None:
    found = _RELEASE.search(text)
    return (int(found[1]), int(found[2])) if found else None
