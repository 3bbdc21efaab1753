"""Describes the values of a notebook's names. It runs in the notebook's kernel, by `exec`."""

import collections
import hashlib
import sys
import types

_MOST = 2000
"""Parts of one value that are described."""
_DEEP = 4
"""Steps into a value."""


def look(shell):
    """Texts that describe the values of the names of a notebook, and its outputs, by name."""
    space = shell.user_ns
    hidden = {*shell.user_ns_hidden, "gpunb", "_look", "__file__", "__warningregistry__"}
    hidden |= {"__annotations__", "__annotate__", "__conditional_annotations__"}
    names = {
        n: each for n, each in sorted(space.items()) if n not in hidden and n.strip("_ih0123456789")
    }
    outputs = {f"Out[{n}]": each for n, each in space.get("Out", {}).items()}
    found = {}
    first = {}  # of each object that others could change, the first of its names
    for name, value in {**names, **outputs}.items():
        found[name] = _Description().of(value)
        if type(value) not in _FIXED and id(value) in first:
            found[f"{name} is"] = first[id(value)]
        first.setdefault(id(value), name)
    return found


class _Description:
    """A text for one value."""

    def __init__(self):
        self.left = _MOST
        self.around = []

    def of(self, value):
        kind = type(value)
        self.left -= 1
        if self.left < 0 or len(self.around) > _DEEP or any(each is value for each in self.around):
            return _title(kind)
        if isinstance(value, types.ModuleType):  # of a class of its own until it is loaded
            return f"module {value.__name__}"
        self.around.append(value)
        try:
            return f"{_title(kind)} {self.data(value, kind)}"
        except Exception as error:  # noqa: BLE001 - methods of the value may raise anything
            return f"{_title(kind)} {type(error).__name__}"
        finally:
            self.around.pop()

    def data(self, value, kind):
        package = kind.__module__.partition(".")[0]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        if kind in _FIXED:
            return _short(repr(value))
        if package in _READ and (read := _READ[package](self, value, kind)) is not None:
            return read
        if isinstance(value, (list, tuple, collections.deque)):
            return self.listed(value, map(self.of, list(value)[: self.left + 1]))
        if isinstance(value, (set, frozenset)):
            return self.listed(value, sorted(map(self.of, value)))
        if isinstance(value, dict):
            pairs = list(value.items())[: self.left + 1]
            return self.listed(value, (f"{self.of(one)}: {self.of(two)}" for one, two in pairs))
        usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
        if not usual or package in _OPAQUE or not hasattr(value, "__dict__"):
            return ""  # a class that says what a pickle has may leave caches out
        ours = kind.__module__ == "__main__"
        parts = sorted(each for each in vars(value).items() if ours or each[0][0] != "_")
        return self.listed(parts, (f"{name}: {self.of(each)}" for name, each in parts))

    def listed(self, value, parts):
        return f"{len(value)} [{', '.join(parts)}]"


def _title(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(text):
    if len(text) < 200:
        return text
    return f"{text[:100]}... {hashlib.sha1(text.encode(errors='replace')).hexdigest()}"


def _hash(data):
    return hashlib.sha1(data).hexdigest()


def _numpy(description, value, kind):
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ma.MaskedArray):
        return f"{description.of(value.data)} {description.of(numpy.ma.getmaskarray(value))}"
    if isinstance(value, numpy.generic):
        return repr(value)
    if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        generator = getattr(value, "bit_generator", value)
        return description.of(getattr(generator, "state", None) or generator.get_state())
    if not isinstance(value, numpy.ndarray):
        return None
    about = f"{value.dtype} {value.shape} {'' if value.flags.writeable else 'read-only '}"
    if value.dtype.hasobject:
        return about + description.of(value.ravel()[: description.left + 1].tolist())
    return about + (_short(repr(value.tolist())) if value.size < 20 else _hash(value.tobytes()))


def _pandas(description, value, kind):
    pandas = sys.modules["pandas"]
    if isinstance(value, pandas.Index):
        return f"{value.dtype} {value.name!r} {description.of(value.tolist())}"
    if isinstance(value, pandas.Series):
        return f"{value.dtype} {value.name!r} {_hash(_rows(pandas, value))}"
    if isinstance(value, pandas.DataFrame):
        columns = list(zip(value.columns.tolist(), map(str, value.dtypes), strict=True))
        return f"{value.shape} {_short(repr(columns))} {_hash(_rows(pandas, value))}"
    return None


def _rows(pandas, table):
    try:
        return pandas.util.hash_pandas_object(table).values.tobytes()
    except TypeError:  # an object in it has no hash
        return table.to_csv().encode()


def _torch(description, value, kind):
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        return None
    return f"{value.requires_grad} {description.of(value.detach().cpu().numpy())}"


_READ = {"numpy": _numpy, "pandas": _pandas, "torch": _torch}
_OPAQUE = {"matplotlib", "mpl_toolkits", "IPython", "threading", "logging"}
"""Packages with objects of many parts that depend on what was drawn or run before."""
_FIXED = (int, float, complex, bool, str, bytes, type(None), range, slice, type(...))
