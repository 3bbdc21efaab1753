"""Modules that are imported when they are first used."""

from __future__ import annotations

import builtins
import importlib
import inspect
import math
import pickle
import sys
import threading
import types

import cloudpickle
import pytest

from gpunb.data.serialize import dumps, find_module, lazy_module, loads, modules
from tests.waiting import eventually

FILES = {
    "lz_plain.py": "import lz_log\nlz_log.log.append('plain')\nvalue = 5\ndef f(): return value\n",
    "lz_pkg/__init__.py": "import lz_log\nlz_log.log.append('pkg')\nfrom lz_pkg.sub import made\n",
    "lz_pkg/sub.py": (
        "import lz_log, lz_pkg\nlz_log.log.append('pkg.sub')\nmade = 'made'\nfrom . import other\n"
    ),
    "lz_pkg/other.py": "import lz_log\nlz_log.log.append('pkg.other')\nx = 1\n",
    "lz_pkg/late.py": "import lz_log\nlz_log.log.append('pkg.late')\nx = 2\n",
    "lz_pkg/shadow.py": "def shadow(): pass\n",
    "lz_bare/__init__.py": "import lz_log\nlz_log.log.append('bare')\n",
    "lz_bare/sub.py": "import lz_log\nlz_log.log.append('bare.sub')\ny = 3\n",
    "lz_broken.py": (
        "import lz_log\nlz_log.log.append('broken')\nhalf = 1\nif lz_log.broken: 1 / 0\n"
    ),
    "lz_swap.py": (
        "import sys, types\nreal = types.SimpleNamespace(z=9)\nsys.modules[__name__] = real\n"
    ),
    "lz_slow.py": "import lz_log\nlz_log.log.append('slow')\nlz_log.wait()\ndone = True\n",
    "lz_knot/__init__.py": (  # as PyTorch: asks itself while it loads, and its parts ask it
        "import sys, lz_log\nlz_log.log.append('knot')\nimport lz_knot\n"
        "def __getattr__(name):\n    if name == 'made': return 'as asked'\n"
        "    raise AttributeError(name)\n"
        "gone = 1\nassert lz_knot.made == 'as asked'\ndel lz_knot.gone\n"
        "from lz_knot import _rebuild\nfrom lz_knot._values import Value\n"
        "names = [name for name in dir(lz_knot) if not name.startswith('__')]\n"
        "if lz_log.broken == 'knot': raise OSError('not now')\n"
    ),
    "lz_knot/_rebuild.py": (
        "import lz_knot\nfound = lz_knot.made\ndef rebuild(number): return lz_knot.Value(number)\n"
    ),
    "lz_knot/_values.py": (
        "from lz_knot import _rebuild\nimport lz_knot\nlz_knot.extra = 5\n"
        "class Value:\n    def __init__(self, number): self.number = number\n"
        "    def __reduce__(self): return _rebuild.rebuild, (self.number,)\n"
    ),
    "lz_chosen.py": (
        "import sys, types\nclass Own(types.ModuleType):\n"
        "    @property\n    def doubled(self): return 2 * self.value\n"
        "value = 4\nsys.modules[__name__].__class__ = Own\n"
    ),
    "lz_needs.py": "import lz_absent\n",
    "lz_space/inner.py": "import lz_log\nlz_log.log.append('space.inner')\nw = 4\n",
}


@pytest.fixture
def log(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finders = list(sys.meta_path)
    module = types.ModuleType("lz_log")
    module.log = []
    module.broken = True
    sys.modules["lz_log"] = module
    yield module.log
    modules._waiting.clear()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("lz_")]:
        del sys.modules[name]


def test_lazy_module_is_loaded_once_by_its_first_use(log):
    module = lazy_module("lz_plain")
    assert isinstance(module, types.ModuleType)
    assert (module.__name__, module.__spec__.name) == ("lz_plain", "lz_plain")
    assert module.__file__.endswith("lz_plain.py")
    assert "lz_plain" in repr(module)
    assert (log, "lz_plain" in sys.modules) == ([], False)
    assert module.value == 5
    assert module.f() == 5
    assert log == ["plain"]
    assert sys.modules["lz_plain"] is module
    assert type(module) is types.ModuleType
    assert inspect.getsource(module.f) == "def f(): return value\n"
    assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
    assert module.__spec__.loader is module.__loader__


def test_an_import_statement_loads_the_same_module(log):
    module = lazy_module("lz_plain")
    space = {}
    exec("import lz_plain", space)
    assert space["lz_plain"] is module
    assert log == ["plain"]
    exec("from lz_plain import value", space)
    assert space["value"] == 5


def test_name_has_one_module_lazy_or_loaded(log):
    assert lazy_module("lz_plain") is lazy_module("lz_plain")
    assert lazy_module("lz_pkg.sub") is lazy_module("lz_pkg.sub")
    importlib.import_module("lz_plain")
    assert lazy_module("lz_plain") is sys.modules["lz_plain"]


@pytest.mark.parametrize("first", ["lz_pkg", "lz_pkg.sub", "lz_pkg.other", "lz_pkg.late"])
def test_submodules_load_after_their_package(log, first):
    names = ["lz_pkg", "lz_pkg.sub", "lz_pkg.other", "lz_pkg.late"]
    lazy = {name: lazy_module(name) for name in names}
    assert log == []
    dir(lazy[first])
    assert log[:3] == ["pkg", "pkg.sub", "pkg.other"]
    assert lazy["lz_pkg"].sub is lazy["lz_pkg.sub"]
    assert lazy["lz_pkg"].late.x == 2
    assert lazy["lz_pkg"].made == "made"
    assert log == ["pkg", "pkg.sub", "pkg.other", "pkg.late"]
    assert all(sys.modules[name] is module for name, module in lazy.items())


def test_lazy_submodule_is_an_attribute_of_its_loaded_package(log):
    package = importlib.import_module("lz_bare")
    sub = lazy_module("lz_bare.sub")
    assert package.sub is sub
    assert log == ["bare"]
    assert package.sub.y == 3


def test_lazy_submodule_is_an_attribute_of_its_lazy_package(log):
    package, _ = lazy_module("lz_bare"), lazy_module("lz_bare.sub")
    assert log == []
    assert package.sub.y == 3
    assert log == ["bare", "bare.sub"]


def test_a_module_is_found_without_loading_its_packages(log):
    found = find_module("lz_pkg.sub")
    assert found.name == "lz_pkg.sub"
    assert found.origin.endswith("sub.py")
    lazy_module("lz_pkg")
    assert find_module("lz_pkg.other").name == "lz_pkg.other"
    for name in ("lz_nothing", "lz_bare.nothing", "lz_nothing.sub", "lz_plain.sub"):
        assert find_module(name) is None
    assert log == []
    importlib.import_module("lz_bare.sub")
    assert find_module("lz_bare.sub") is sys.modules["lz_bare.sub"].__spec__
    assert find_module("lz_bare.nothing") is None


def test_a_missing_module_is_named(log):
    for name in ("lz_nothing", "lz_bare.nothing", "lz_nothing.sub", "lz_plain.sub"):
        with pytest.raises(ModuleNotFoundError) as info:
            lazy_module(name)
        assert info.value.name.startswith(name[:8])
        assert info.value.name in str(info.value)
    with pytest.raises(ModuleNotFoundError, match="lz_absent"):
        _ = lazy_module("lz_needs").x


def test_failed_import_is_tried_again_at_the_next_use(log):
    module = lazy_module("lz_broken")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = module.half
    assert "lz_broken" not in sys.modules
    assert log == ["broken", "broken"]
    sys.modules["lz_log"].broken = False
    assert module.half == 1
    assert sys.modules["lz_broken"] is module


def test_attributes_of_a_module_that_replaces_itself_are_used(log):
    module = lazy_module("lz_swap")
    assert module.z == 9
    module.z = 10
    assert sys.modules["lz_swap"].z == 10


def test_value_can_be_loaded_that_loads_its_lazy_module(log):
    """The library reads its own attributes during its import, as PyTorch does."""
    import lz_knot

    payload = dumps([lz_knot, lz_knot.Value(3)])
    for name in [name for name in sys.modules if name.startswith("lz_knot")]:
        del sys.modules[name]
    del log[:]
    module, value = loads(payload, lazy_modules=True)
    assert log == ["knot"]
    assert (value.number, module.extra, module.made) == (3, 5, "as asked")
    assert "gone" not in vars(module)
    assert {"Value", "_rebuild", "extra"} <= set(module.names)
    assert sys.modules["lz_knot"] is module


def test_module_that_fails_while_a_value_is_loaded_can_be_loaded_later(log):
    import lz_knot

    payload = dumps([lz_knot, lz_knot.Value(3)])
    for name in [name for name in sys.modules if name.startswith("lz_knot")]:
        del sys.modules[name]
    module = lazy_module("lz_knot")
    sys.modules["lz_log"].broken = "knot"
    with pytest.raises(OSError, match="not now"):
        loads(payload, lazy_modules=True)
    sys.modules["lz_log"].broken = False
    assert module.Value(4).number == 4
    assert loads(payload)[0] is module is sys.modules["lz_knot"]


def test_module_that_sets_its_class_keeps_it(log):
    module = lazy_module("lz_chosen")
    assert (module.value, module.doubled) == (4, 8)
    assert type(module).__name__ == "Own"


def test_deleting_an_attribute_loads_the_module_first(log):
    module = lazy_module("lz_plain")
    del module.value
    assert log == ["plain"]
    assert "value" not in vars(module)


def test_setting_an_attribute_loads_the_module_first(log):
    module = lazy_module("lz_plain")
    module.value = 6
    assert (log, module.f()) == (["plain"], 6)


def test_builtin_extension_and_namespace_modules_are_imported_at_once(log):
    assert lazy_module("lz_space.inner").w == 4  # lz_space has no __init__
    assert lazy_module("math") is math
    for name in ("_queue", "_zoneinfo"):  # an extension module
        sys.modules.pop(name, None)
        assert lazy_module(name) is sys.modules[name]


def test_threads_wait_for_a_lazy_module_that_another_thread_loads(log, monkeypatch):
    module = lazy_module("lz_slow")
    gate = threading.Barrier(6)
    importing, found = [], []
    import_module = importlib.import_module

    def imported(name):
        importing.append(name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    # It is loaded for as long as it takes all six to ask for it.
    sys.modules["lz_log"].wait = lambda: eventually(lambda: importing == ["lz_slow"] * 6)

    def use():
        gate.wait()
        found.append(module.done)

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
    assert log == ["slow"]


def test_inspection_of_all_modules_does_not_load_a_lazy_module(log):
    module = lazy_module("lz_plain")
    inspect.getmodule(test_inspection_of_all_modules_does_not_load_a_lazy_module.__code__)
    assert not hasattr(sys.modules.get("lz_plain"), "value")
    assert isinstance(module, types.ModuleType)
    assert log == []


def test_lazy_module_is_pickled_by_name_without_loading_it(log):
    module = lazy_module("lz_plain")
    for stream in (pickle.dumps(module), cloudpickle.dumps(module), dumps(module).stream):
        assert b"lz_plain" in stream
        assert log == []
    assert loads(dumps([module, module]), lazy_modules=True) == [module, module]
    assert log == []
    assert loads(dumps(module)) is module
    assert log == ["plain"]


def test_unused_lazy_module_is_forgotten(log):
    lazy_module("lz_plain")
    assert "lz_plain" not in modules._waiting
    assert importlib.import_module("lz_plain").value == 5


def test_value_with_lazy_modules_loads_them_at_first_use(log):
    import lz_bare.sub
    import lz_plain

    space = {"__name__": "__main__", "__builtins__": builtins, "p": lz_plain, "lz_bare": lz_bare}
    exec("def f(): return p.value, lz_bare.sub.y", space)
    payload = dumps([space["f"], lz_plain, lz_bare.sub])
    for name in ("lz_plain", "lz_bare", "lz_bare.sub"):
        del sys.modules[name]
    del log[:]
    f, plain, sub = loads(payload, namespace={}, lazy_modules=True)
    assert log == []
    assert f.__globals__["p"] is plain
    assert sub.__name__ == "lz_bare.sub"
    assert log == []
    assert f() == (5, 3)
    assert sorted(log) == ["bare", "bare.sub", "plain"]


def test_a_missing_module_in_a_value_is_named(log):
    import lz_plain

    payload = dumps(lz_plain)
    del sys.modules["lz_plain"]
    sys.path.pop(0)
    for lazy in (False, True):
        with pytest.raises(ImportError, match="lz_plain"):
            loads(payload, lazy_modules=lazy)
