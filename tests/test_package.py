"""What the package promises to whoever only imports it."""

import pkgutil
import subprocess
import sys
from importlib import resources

import pytest

import gpunb

PUBLIC = [
    "ActorHandle",
    "DynamicObjectRefGenerator",
    "Executor",
    "ObjectRef",
    "ObjectRefGenerator",
    "__version__",
    "accelerators",
    "actor",
    "as_completed",
    "available_resources",
    "cancel",
    "cluster_resources",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_job",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "load_ipython_extension",
    "method",
    "monitor",
    "nodes",
    "put",
    "register_settings",
    "remote",
    "report",
    "shutdown",
    "status",
    "sweep",
    "timeline",
    "unload_ipython_extension",
    "util",
    "wait",
]


def test_no_module_hides_a_public_name():
    """An imported submodule becomes an attribute of the package."""
    modules = {each.name for each in pkgutil.iter_modules(gpunb.__path__)}
    public = modules.intersection(gpunb.__all__)
    assert public <= {"accelerators", "actor", "exceptions", "util"}


def test_public_names_are_these_and_all_there():
    assert sorted(gpunb.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(gpunb, name) is not None
    assert dir(gpunb) == PUBLIC


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        gpunb.no_such_name  # noqa: B018


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_import_is_light():
    loaded = modules_after("import gpunb")
    assert "gpunb.api.public" not in loaded
    assert not loaded & {"gpunb.sweeps", "sqlite3"}
    assert not loaded & {"IPython", "numpy", "pynvml", "loky", "ray", "multiprocessing", "asyncio"}


def test_the_api_loads_no_notebook_and_no_gpu_library():
    loaded = modules_after("import gpunb; gpunb.remote(num_gpus=1)(print)")
    assert "gpunb.api.public" in loaded
    assert not loaded & {"IPython", "ipykernel", "numpy", "pynvml", "loky", "ray", "torch"}


def test_what_is_in_modules_need_not_be_imported():
    loaded = "import gpunb as ray; print(ray.util.accelerators.NVIDIA_TESLA_V100)"
    assert "V100" in modules_after(loaded)
    with pytest.raises(AttributeError, match=r"'metrics': use .* \(of what ray\.util has, there"):
        gpunb.util.metrics  # noqa: B018
    assert dir(gpunb.util) == gpunb.util.__all__
    for name in dir(gpunb.util):
        assert getattr(gpunb.util, name) is not None


def test_it_is_typed():
    assert resources.files(gpunb).joinpath("py.typed").is_file()
