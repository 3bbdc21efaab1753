"""The libraries with state for a whole process: what it is, how to read it and how to set it.

Values that would load a library when they are unpickled are read as plain values.
"""

from __future__ import annotations

import functools
import pickle
import sys
from array import array
from collections.abc import Callable
from typing import Any

from gpunb.protocol import backend
from gpunb.worker.library import STATE, Library, State
from gpunb.worker.python_settings import PYTHON

_PROCESS = frozenset(
    "backend backend_fallback interactive toolbar timezone savefig.directory "
    "figure.max_open_warning figure.raise_window tk.window_focus webagg.address webagg.port "
    "webagg.port_retries webagg.open_in_browser docstring.hardcopy".split()
)
"""Settings of matplotlib that are of a process and its front end, not of how things look."""


def _rc_params(matplotlib: Any, name: str = "rcParams") -> State:
    state: State = dict(dict.items(getattr(matplotlib, name, {})))  # without a check of each name
    for each in _PROCESS:
        state.pop(each, None)
    return state


@functools.cache
def _rc_defaults(matplotlib: Any) -> State:
    return _rc_params(matplotlib, "rcParamsOrig")


def _pandas_options(_: Any) -> State:
    flat: State = {}
    todo = [("", sys.modules["pandas._config.config"]._global_config)]  # noqa: SLF001 - no public way
    while todo:
        prefix, options = todo.pop()
        for name, value in options.items():
            if type(value) is dict:
                todo.append((f"{prefix}{name}.", value))
            else:
                flat[f"{prefix}{name}"] = value
    return flat


def _pandas_defaults(_: Any) -> State:
    known = getattr(sys.modules.get("pandas._config.config"), "_registered_options", {})
    return {name: option.defval for name, option in known.items()}


def wide_tables(_: Any) -> None:
    """Let pandas show as many columns of a table as in a kernel: it looks for one when it loads,
    and finds none in a worker or in the zygote."""
    name, options = "display.max_columns", sys.modules["pandas._config.config"]
    known = options._registered_options[name]  # noqa: SLF001 - no public way
    if known.defval == 0:  # as in a terminal
        options._registered_options[name] = known._replace(defval=20)  # noqa: SLF001
        if options.get_option(name) == 0:
            options.reset_option(name)


def _numpy_defaults(_: Any) -> State:
    known = getattr(sys.modules.get("numpy._core.printoptions"), "default_format_options_dict", {})
    return {**known, "legacy": False} if known else {}


def _sklearn_options(sklearn: Any) -> State:
    options: State = sklearn.get_config()
    return options


def _sklearn_defaults(_: Any) -> State:
    return dict(getattr(sys.modules.get("sklearn._config"), "_global_config", {}))


def _diagram_counts(diagrams: Any) -> State:
    return {name: vars(diagrams)[name].count for name in _DIAGRAMS}


def _set_diagram_count(diagrams: Any, name: str, count: int) -> None:
    vars(diagrams)[name].count = count


_DIAGRAMS = ("_CONTAINER_ID_COUNTER", "_ESTIMATOR_ID_COUNTER")
"""The counters for scikit-learn's diagrams of estimators: two diagrams in a page must not have the
same number, or a click on one opens the other."""


def _torch_options(torch: Any) -> State:
    """As plain values: to unpickle a type of PyTorch would load PyTorch."""
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "grad_enabled": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _set_torch_option(torch: Any, name: str, value: Any) -> None:
    match name:
        case "dtype":
            torch.set_default_dtype(getattr(torch, value))
        case "float32_matmul_precision":
            torch.set_float32_matmul_precision(value)
        case "grad_enabled":
            torch.set_grad_enabled(value)
        case "deterministic":
            torch.use_deterministic_algorithms(value)


def _torch_defaults(_: Any) -> State:
    return {
        "dtype": "float32",
        "float32_matmul_precision": "highest",
        "grad_enabled": True,
        "deterministic": False,
    }


_device_of_cells: list[str] = []
"""The default device that a cell has brought home, if it is a GPU. It holds in cells alone: the
notebook's own process would use the GPU."""


def _torch_device(torch: Any) -> State:
    """PyTorch's own function makes a tensor, which could start CUDA."""
    chosen = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001
    own = str(chosen.device) if chosen is not None else "cpu"
    return {"device": _device_of_cells[0] if _device_of_cells else own}


def _set_torch_device(torch: Any, _: str, device: str) -> None:
    current = backend.existing()
    if current is None or current.context().task is None:
        on_host = device.partition(":")[0] in ("cpu", "meta")
        _device_of_cells[:] = () if on_host else (device,)
        device = device if on_host else "cpu"
    torch.set_default_device(None if device == "cpu" else device)


def _print_options(tensor_str: Any) -> State:
    return dict(vars(tensor_str.PRINT_OPTS))


_CUDNN = ("benchmark", "deterministic")


def _attributes(*names: str) -> Callable[[Any], State]:
    return lambda module: {name: getattr(module, name) for name in names}


_JAX = {
    "jax_enable_x64": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_disable_jit": False,
    "jax_enable_checks": False,
    "jax_check_tracer_leaks": False,
    "jax_log_compiles": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_enable_custom_prng": False,
    "jax_threefry_partitionable": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_traceback_filtering": "auto",
}
"""JAX's settings with their defaults, without those of a process, such as its devices."""


def _jax_options(jax: Any) -> State:
    values = jax.config.values
    return {name: values[name] for name in _JAX if name in values}


def _numpy_state(random: Any) -> State:
    state = random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":  # the default; to pickle its array takes longer
        state["state"]["key"] = state["state"]["key"].tobytes()
    return {STATE: pickle.dumps(state)}


def _set_numpy_state(random: Any, packed: bytes) -> None:
    state = pickle.loads(packed)
    if state["bit_generator"] == "MT19937":
        state["state"]["key"] = array("I", state["state"]["key"])
    random.set_state(state)


def _torch_state(torch: Any) -> State:
    return {STATE: torch.default_generator.get_state().numpy().tobytes()}


def _set_torch_state(torch: Any, state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


SETTINGS = {
    **PYTHON,
    "matplotlib": Library(
        "matplotlib",
        _rc_params,
        lambda matplotlib, name, value: matplotlib.rcParams.__setitem__(name, value),
        _rc_defaults,
    ),
    "matplotlib.colors": Library(
        "matplotlib.colors",
        lambda colors: {name: colors.colorConverter.colors[name] for name in colors.BASE_COLORS},
        lambda colors, name, value: colors.colorConverter.colors.__setitem__(name, value),
        lambda colors: dict(colors.BASE_COLORS),
    ),
    "pandas": Library(
        "pandas",
        _pandas_options,
        lambda pandas, name, value: pandas.set_option(name, value),
        _pandas_defaults,
    ),
    "numpy": Library(
        "numpy",
        lambda numpy: dict(numpy.get_printoptions()),
        lambda numpy, name, value: numpy.set_printoptions(**{name: value}),
        _numpy_defaults,
    ),
    "sklearn": Library(
        "sklearn",
        _sklearn_options,
        lambda sklearn, name, value: sklearn.set_config(**{name: value}),
        _sklearn_defaults,
    ),
    **{
        each: Library(
            each, _diagram_counts, _set_diagram_count, lambda _: dict.fromkeys(_DIAGRAMS, 0)
        )
        # The second is of scikit-learn before 1.7.
        for each in ("sklearn.utils._repr_html.estimator", "sklearn.utils._estimator_html_repr")
    },
    "numpy errors": Library(
        "numpy",
        lambda numpy: dict(numpy.geterr()),
        lambda numpy, name, value: numpy.seterr(**{name: value}),
        lambda _: {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    "torch options": Library("torch", _torch_options, _set_torch_option, _torch_defaults),
    "torch device": Library("torch", _torch_device, _set_torch_device, lambda _: {"device": "cpu"}),
    "torch printing": Library(
        "torch._tensor_str",
        _print_options,
        lambda module, name, value: setattr(module.PRINT_OPTS, name, value),
        lambda module: dict(vars(type(module.PRINT_OPTS)())),
    ),
    "cudnn": Library(
        "torch.backends.cudnn",
        _attributes(*_CUDNN),
        setattr,
        lambda _: dict.fromkeys(_CUDNN, False),
    ),
    "jax": Library(
        "jax", _jax_options, lambda jax, name, value: jax.config.update(name, value), lambda _: _JAX
    ),
    "transformers bars": Library(
        "transformers.utils.logging",
        _attributes("_tqdm_active"),
        setattr,
        lambda _: {"_tqdm_active": True},
    ),
    "datasets bars": Library(
        "datasets.utils.tqdm",
        _attributes("_hf_datasets_progress_bars_disabled"),
        setattr,
        lambda _: {"_hf_datasets_progress_bars_disabled": False},
    ),
    "numpy.random": Library(
        "numpy.random",
        _numpy_state,
        lambda random, _, value: _set_numpy_state(random, value),
        random=True,
    ),
    "torch": Library(
        "torch",
        _torch_state,
        lambda torch, _, value: _set_torch_state(torch, value),
        random=True,
    ),
}
