"""Checks whether the installed libraries can use GPUs, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from gpunb.api.init_options import DEFAULT_PRELOAD
from gpunb.cli.checks import Finding, Place, note, ok, problem

KNOWN = ("torch", "jax", "tensorflow", "cupy", "numba", "sklearn", "cuml", "xgboost", "lightgbm")
_PACKAGES = {"sklearn": "scikit-learn"}
_CUPY = re.compile(r"cupy(-cuda|-rocm|$)")


def frameworks(place: Place) -> Iterator[Finding]:
    versions = [_version(name) for name in KNOWN if _is_installed(name)]
    yield ok("frameworks", ", ".join(versions) or "none of those that gpunb knows")
    for name, why in (("torch", _torch()), ("jax", _jax()), ("tensorflow", _tensorflow())):
        if why is None or not _is_installed(name):
            continue
        text, cure = why
        yield problem(name, text, cure) if place.gpus else note(name, text)


def preload(place: Place) -> Iterator[Finding]:
    """The modules that are imported before workers are forked."""
    installed = [name for name in DEFAULT_PRELOAD if _is_installed(name)]
    slow = [name for name in ("torch", "tensorflow", "jax") if _is_installed(name)]
    text = f"by default {', '.join([*installed, 'and what tasks have imported'])}"
    if slow:
        text += f"; with gpunb.init(preload={slow[:1]!r}) the first task has {slow[0]}, too"
    yield ok("preload", text)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str:
    package = _PACKAGES.get(name, name)
    if name == "cupy":
        package = next((each for each in _installed() if _CUPY.match(each)), package)
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _installed() -> set[str]:
    names = (each.metadata["Name"] for each in importlib.metadata.distributions())
    return {name.lower() for name in names if name}


def _torch() -> tuple[str, str] | None:
    """Why PyTorch cannot use a GPU, if it cannot."""
    spec = importlib.util.find_spec("torch") if _is_installed("torch") else None
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    built = re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)
    if not built or any(value != "None" for _, value in built):
        return None
    return (
        "this PyTorch was built for CPUs only: it sees no GPU",
        "install one that fits your driver: https://pytorch.org/get-started/locally",
    )


def _jax() -> tuple[str, str] | None:
    plugins = [each for each in _installed() if re.match(r"jax-(cuda|rocm)|libtpu|jax-metal", each)]
    if plugins:
        return None
    return "JAX has no plug-in for GPUs here: it computes on the CPU", "pip install 'jax[cuda12]'"


def _tensorflow() -> tuple[str, str] | None:
    if "tensorflow-cpu" in _installed():
        return "this TensorFlow is for CPUs only", "pip install 'tensorflow[and-cuda]' instead"
    return None
