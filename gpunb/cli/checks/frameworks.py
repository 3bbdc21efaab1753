"""The libraries here that compute on GPUs, and whether they can. None of them is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from gpunb.cli.checks import Finding, Place, note, ok, problem
from gpunb.settings import DEFAULT_PRELOAD

KNOWN = ("torch", "jax", "tensorflow", "cupy", "numba", "sklearn", "cuml", "xgboost", "lightgbm")
_PACKAGES = {"sklearn": "scikit-learn"}
_CUPY = re.compile(r"cupy(-cuda|-rocm|$)")


def frameworks(place: Place) -> Iterator[Finding]:
    found = [_version(name) for name in KNOWN if _is_there(name)]
    yield ok("frameworks", ", ".join(found) or "none of those that gpunb knows")
    for name, why in (("torch", _torch()), ("jax", _jax()), ("tensorflow", _tensorflow())):
        if why is None or not _is_there(name):
            continue
        says, cure = why
        yield problem(name, says, cure) if place.gpus else note(name, says)


def preload(place: Place) -> Iterator[Finding]:
    """What is imported before workers are forked."""
    there = [name for name in DEFAULT_PRELOAD if _is_there(name)]
    slow = [name for name in ("torch", "tensorflow", "jax") if _is_there(name)]
    says = f"{', '.join(there) or 'nothing'}, by default"
    if slow:
        says += f"; gpunb.init(preload={slow[:1]!r}) makes tasks that use {slow[0]} start at once"
    yield ok("preload", says)


def _is_there(name: str) -> bool:
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
    spec = importlib.util.find_spec("torch") if _is_there("torch") else None
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
