"""What a notebook registers with libraries: its own types and functions, for the whole process.

A cell finds what the notebook has registered, and what a cell in the foreground registers comes
home. Only what the notebook has defined is read, never what the libraries have themselves.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle import cloudpickle
from IPython.core.getipython import get_ipython

from gpunb.data.serialize.operators import made_of, operator
from gpunb.data.serialize.pickler import by_value, closure_of
from gpunb.worker.library import Library, State, of_notebook

__all__ = ["REGISTRATIONS"]


def _name(*things: Any) -> str:
    return " ".join(f"{each.__module__}.{each.__qualname__}" for each in things)


# ---------------------------------------------------------------------------------------- Python


def _reducers(copyreg: Any) -> State:
    table = copyreg.dispatch_table.items()
    own = [(kind, reduce) for kind, reduce in table if of_notebook(kind) or of_notebook(reduce)]
    return {_name(kind): (kind, reduce) for kind, reduce in own}


def _virtual_subclasses(_: Any) -> State:
    """The notebook's classes that were registered with an abstract class."""
    found: State = {}
    dump = importlib.import_module("_abc")._get_dump  # noqa: SLF001 - no public way
    for each in _abstract_classes():
        for reference in dump(each)[0]:
            kind = reference()
            if kind is not None and of_notebook(kind):
                # A class that was defined again has the name of the old one, which may still exist.
                found[f"{_name(each, kind)} {id(kind)}"] = (each, kind)
    return found


def _abstract_classes() -> Iterator[Any]:
    """The abstract classes of Python, and of the notebook those that have travelled."""
    tracked = list(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)  # noqa: SLF001
    collected = list(vars(sys.modules["collections.abc"]).values())
    numbers = list(vars(sys.modules["numbers"]).values()) if "numbers" in sys.modules else []
    for each in (*tracked, *collected, *numbers):
        if isinstance(each, type) and "_abc_impl" in vars(each):
            yield each


def _formats(_: Any) -> State:
    """How IPython shows values."""
    formatter: Any = getattr(get_ipython(), "display_formatter", None)
    if formatter is None:
        return {}
    plain = formatter.formatters["text/plain"]
    state: State = {each: getattr(plain, each) for each in _PLAIN}
    for name, each in formatter.formatters.items():
        for table in ("type_printers", "deferred_printers"):
            for key, function in getattr(each, table).items():
                if key is float and each is plain and plain.float_format:
                    continue  # `%precision` has made it
                if of_notebook(key) or _is_own(key, function):
                    known = _name(key) if isinstance(key, type) else ".".join(key)
                    state[f"{name} {known}"] = name, table, key, function
    return state


_PLAIN = ("float_precision", "pprint", "max_seq_length")


def _format_entries(_: Any) -> Any:
    """Nothing before the first value is shown: the formatters are made then."""
    formatter: Any = vars(get_ipython()).get("_trait_values", {}).get("display_formatter")
    known = vars(formatter).get("_trait_values", {}).get("formatters") if formatter else None
    if known is None:
        return []
    tables = [t for each in known.values() for t in (each.type_printers, each.deferred_printers)]
    plain = known["text/plain"]
    return [[getattr(plain, each) for each in _PLAIN], *(list(t.values()) for t in tables)]


def _format_defaults(_: Any) -> State:
    return {"float_precision": "", "pprint": True, "max_seq_length": 1000}


def _is_own(key: Any, function: Any) -> bool:
    """Whether a function that shows values was made at run time. matplotlib's are set for each
    process by its own settings."""
    if getattr(key, "__module__", "").startswith("matplotlib"):
        return False
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType) or not by_value(function):
        return False
    return not str(function.__module__).startswith("IPython.")


def _set_format(_: Any, name: str, value: Any) -> None:
    formatters = get_ipython().display_formatter.formatters  # type: ignore[union-attr]
    if name in _PLAIN:
        setattr(formatters["text/plain"], name, value)
        return
    which, table, key, function = value
    getattr(formatters[which], table)[key] = function


# ---------------------------------------------------------------------------------- PyTorch, JAX


def _torch_nodes(pytree: Any) -> State:
    found: State = {}
    for kind, each in pytree.SUPPORTED_NODES.items():
        if of_notebook(kind):
            more = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
            known = more.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
            found[_name(kind)] = (
                (kind, each.flatten_fn, each.unflatten_fn),
                {
                    "serialized_type_name": more.serialized_type_name if known else None,
                    "to_dumpable_context": more.to_dumpable_context,
                    "from_dumpable_context": more.from_dumpable_context,
                    "flatten_with_keys_fn": each.flatten_with_keys_fn,
                },
            )
    return found


def _add_torch_node(pytree: Any, _: str, node: Any) -> None:
    (kind, *functions), named = node
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(kind, *functions, **named)


def _operators(operators: Any) -> State:
    """The operators of `torch.library.custom_op`, as what they are made of."""
    known = list(operators.OPDEFS.items())
    own = [(name, each) for name, each in known if of_notebook(each._init_fn)]  # noqa: SLF001
    return {name: made_of(each) for name, each in own}


def _divergences(kl: Any) -> State:
    table = kl._KL_REGISTRY.items()  # noqa: SLF001
    return {_name(*kinds): (*kinds, each) for kinds, each in table if of_notebook(each)}


def _jax_nodes(tree_util: Any) -> State:
    """The notebook's types of trees, as what the functions take that register them."""
    found: State = {}
    for kind, each in tree_util._registry.items():  # noqa: SLF001
        if not of_notebook(kind):
            continue
        flat, whole = each
        variables: dict[str, Any] = {}
        if isinstance(flat, types.FunctionType):
            variables = dict(closure_of(flat))
        if "data_fields" in variables:
            names = list(variables["data_fields"]), list(variables["meta_fields"])
            found[_name(kind)] = "dataclass", kind, *names
        elif "flatten_with_keys" in variables:
            found[_name(kind)] = "keys", kind, variables["flatten_with_keys"], whole
        else:
            found[_name(kind)] = "node", kind, flat, whole
    return found


def _add_jax_node(tree_util: Any, _: str, node: Any) -> None:
    how, kind, *rest = node
    if kind in tree_util._registry:  # noqa: SLF001
        return
    if how == "dataclass":
        fields = {
            name for name, each in getattr(kind, "__dataclass_fields__", {}).items() if each.init
        }
        dropped = sorted(fields.difference(*rest))
        tree_util.register_dataclass(kind, *rest, drop_fields=dropped)
    elif how == "keys":
        tree_util.register_pytree_with_keys(kind, *rest)
    else:
        tree_util.register_pytree_node(kind, *rest)


# ------------------------------------------------------------------------------ other libraries


def _auto_classes(auto: Any) -> State:
    """What `AutoConfig.register`, `AutoModel.register` and others have registered."""
    found: State = {}
    for name, mapping in _auto_mappings(auto):
        for key, value in mapping._extra_content.items():  # noqa: SLF001
            if of_notebook(key) or of_notebook(value):
                found[f"{name} {key}"] = name, key, value
    return found


def _auto_mappings(auto: Any) -> Iterator[tuple[str, Any]]:
    prefix = auto.__name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix) and module is not None:
            for each, value in list(vars(module).items()):
                if each.endswith("MAPPING") and hasattr(value, "_extra_content"):
                    yield f"{name} {each}", value


def _add_auto_class(_: Any, __: str, registered: Any) -> None:
    place, key, value = registered
    module, _, name = place.partition(" ")
    __import__(module)
    getattr(sys.modules[module], name)._extra_content[key] = value  # noqa: SLF001


def _projections(projections: Any) -> State:
    known = projections.projection_registry._all_projection_types  # noqa: SLF001
    return {name: each for name, each in known.items() if of_notebook(each)}


def _scales(scale: Any) -> State:
    return {name: each for name, each in scale._scale_mapping.items() if of_notebook(each)}  # noqa: SLF001


def _units(units: Any) -> State:
    own = [
        item
        for item in units.registry.items()
        if any(of_notebook(type(i)) or of_notebook(i) for i in item)
    ]
    return {_name(kind): (kind, converter) for kind, converter in own}


def _colormaps(matplotlib: Any) -> State:
    known = vars(matplotlib.colormaps)
    return {
        name: known["_cmaps"][name] for name in known["_cmaps"].keys() - known["_builtin_cmaps"]
    }


def _accessors(pandas: Any) -> State:
    found: State = {}
    for kind in (pandas.DataFrame, pandas.Series, pandas.Index):
        for name in kind._accessors:  # noqa: SLF001 - no public way
            made = getattr(vars(kind).get(name), "_accessor", None)
            if made is not None and of_notebook(made):
                found[f"{kind.__name__.lower()}.{name}"] = made
    return found


def _register_accessor(pandas: Any, name: str, accessor: Any) -> None:
    kind, _, attribute = name.partition(".")
    getattr(pandas.api.extensions, f"register_{kind}_accessor")(attribute)(accessor)


def _types(base: Any) -> State:
    return {_name(each): each for each in base._registry.dtypes if of_notebook(each)}  # noqa: SLF001


def _add_type(base: Any, _: str, kind: Any) -> None:
    if kind not in base._registry.dtypes:  # noqa: SLF001
        base._registry.register(kind)  # noqa: SLF001


def _within(
    module: str,
    place: str,
    read: Callable[[Any], State],
    write: Callable[[Any, str, Any], object],
    entries: Callable[[Any], Any] | None = None,
) -> Library:
    """A registry in a module at `place`. It is used once `module` is loaded, whose import is over
    then: what the notebook has registered may need more of the library."""
    return Library(
        module,
        lambda _: read(sys.modules[place]),
        lambda _, name, value: write(sys.modules[place], name, value),
        entries=None if entries is None else lambda _: entries(sys.modules[place]),
    )


REGISTRATIONS = {
    "copyreg": Library(
        "copyreg",
        _reducers,
        lambda copyreg, _, each: copyreg.pickle(*each),
        entries=lambda copyreg: list(copyreg.dispatch_table.values()),
    ),
    "abc": Library(
        "abc",
        _virtual_subclasses,
        lambda _, __, each: each[0].register(each[1]),
        entries=lambda abc: (
            abc.get_cache_token(),
            len(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS),  # noqa: SLF001
        ),
    ),
    "IPython": Library(
        "IPython.core.formatters", _formats, _set_format, _format_defaults, entries=_format_entries
    ),
    "torch trees": _within(
        "torch",
        "torch.utils._pytree",
        _torch_nodes,
        _add_torch_node,
        lambda pytree: list(pytree.SUPPORTED_NODES.values()),
    ),
    "torch operators": _within(
        "torch",
        "torch._library.custom_ops",
        _operators,
        lambda _, *each: operator(*each),
        lambda operators: operators.OPDEFS.valuerefs(),
    ),
    "torch divergences": _within(
        "torch.distributions",
        "torch.distributions.kl",
        _divergences,
        lambda kl, _, each: kl.register_kl(*each[:2])(each[2]),
        lambda kl: list(kl._KL_REGISTRY.values()),  # noqa: SLF001
    ),
    "jax trees": _within(
        "jax",
        "jax._src.tree_util",
        _jax_nodes,
        _add_jax_node,
        lambda tree_util: list(tree_util._registry.values()),  # noqa: SLF001
    ),
    "transformers": Library(
        "transformers.models.auto.auto_factory", _auto_classes, _add_auto_class
    ),
    "matplotlib.projections": _within(
        "matplotlib.figure",
        "matplotlib.projections",
        _projections,
        lambda projections, _, each: projections.register_projection(each),
    ),
    "matplotlib.scale": _within(
        "matplotlib.figure",
        "matplotlib.scale",
        _scales,
        lambda scale, _, each: scale.register_scale(each),
    ),
    "matplotlib.units": _within(
        "matplotlib.figure",
        "matplotlib.units",
        _units,
        lambda units, _, each: units.registry.__setitem__(*each),
    ),
    "matplotlib colormaps": Library(
        "matplotlib",
        _colormaps,
        lambda matplotlib, name, each: matplotlib.colormaps.register(each, name=name, force=True),
    ),
    "pandas accessors": Library("pandas", _accessors, _register_accessor),
    "pandas types": _within("pandas", "pandas.core.dtypes.base", _types, _add_type),
}
