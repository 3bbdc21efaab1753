"""Checks Jupyter: the kernel, the widgets, and the extensions of the server and of JupyterLab."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from gpunb.cli.checks import Finding, Place, note, ok, problem

EXTENSION = "gpunb.server"
LAB_EXTENSION = "gpunb"
_PACKAGES = ("ipykernel", "ipywidgets", "anywidget", "jupyterlab", "notebook", "jupyter_server")

_OLDEST = {"jupyterlab": 4, "notebook": 7}
_CLICKS = 7, 4
"""The first version of ipykernel in which a click reaches a widget of a running cell."""


def packages(place: Place) -> Iterator[Finding]:
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    yield ok("Jupyter", text)
    if "ipykernel" not in versions:
        yield note(
            "ipykernel",
            "not in this environment: no notebook can use it",
            "pip install ipykernel, and python -m ipykernel install --user --name NAME",
        )
    elif _numbers(versions["ipykernel"]) < _CLICKS:
        yield note(
            "ipykernel",
            f"{versions['ipykernel']}: a click on a widget may wait for the end of the cell "
            "that runs",
            "pip install 'ipykernel>={}.{}'".format(*_CLICKS),
        )
    if "ipywidgets" not in versions:
        yield note("ipywidgets", "missing: the live monitor shows text", "pip install ipywidgets")
    for name, oldest in _OLDEST.items():
        if name in versions and _numbers(versions[name]) < (oldest,):
            yield problem(
                name,
                f"{versions[name]} is too old for the panel, which needs {oldest} or newer; cells "
                "and functions work all the same",
                f"pip install '{name}>={oldest}'",
            )


def extensions(place: Place) -> Iterator[Finding]:
    """Whether gpunb's extensions are enabled in the server and in JupyterLab, where installed."""
    if _version("jupyter_server") is None:
        text = "no Jupyter server in this environment: its panel is set up where the server is"
        yield note("server extension", text)
        return
    from jupyter_core.paths import jupyter_config_path, jupyter_path

    enabled = _enabled([Path(each) for each in jupyter_config_path()])
    cure = f"jupyter server extension enable {EXTENSION}"
    if enabled:
        yield ok("server extension", "enabled")
    elif enabled is None:
        yield problem("server extension", "not installed: the panel has nothing to show", cure)
    else:
        yield problem("server extension", "disabled", cure)
    if _version("jupyterlab") is None and _version("notebook") is None:
        return
    places = [Path(each) / LAB_EXTENSION / "package.json" for each in jupyter_path("labextensions")]
    manifest = next((each for each in places if each.exists()), None)
    if manifest is None:
        yield _missing(Path(__file__).resolve().parents[3])
    elif _disabled([Path(each) for each in jupyter_config_path()]):
        cure = f"jupyter labextension enable {LAB_EXTENSION}, and reload the page"
        yield problem("JupyterLab extension", "disabled: there is no panel", cure)
    else:
        yield ok("JupyterLab extension", f"{_field(manifest, 'version')} in {manifest.parent}")


def _missing(source: Path) -> Finding:
    """The finding for a missing panel. In an installation from source it has to be built."""
    if (source / "labextension" / "package.json").exists():
        text = f"not built, and gpunb is installed from its source in {source}"
        cure = f"install Node 20 or newer, and run `make labextension` in {source}"
    else:
        text, cure = "not installed", "pip install --force-reinstall gpunb"
    return problem("JupyterLab extension", f"{text}: there is no panel", cure)


def _enabled(paths: list[Path]) -> bool | None:
    """Whether the configuration enables the extension, by the first folder that names it."""
    for path in paths:
        files = [path / "jupyter_server_config.json"]
        files += sorted((path / "jupyter_server_config.d").glob("*.json"), reverse=True)
        for file in files:
            try:
                value = json.loads(file.read_text())["ServerApp"]["jpserver_extensions"][EXTENSION]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            return bool(value)
    return None


def _disabled(paths: list[Path]) -> bool:
    """Whether the configuration disables JupyterLab's extension, by the first folder with one."""
    for path in paths:
        try:
            config = json.loads((path / "labconfig" / "page_config.json").read_text())
            named = config["disabledExtensions"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if LAB_EXTENSION in named:
            return bool(named[LAB_EXTENSION]) if isinstance(named, dict) else True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    parts = itertools.takewhile(str.isdigit, version.split("."))
    return tuple(map(int, parts))


def _field(path: Path, name: str) -> str:
    try:
        return str(json.loads(path.read_text())[name])
    except (OSError, ValueError, KeyError):
        return "unknown version"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
