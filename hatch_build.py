"""Puts the extension for JupyterLab into the wheel, built beforehand if need be.

Building it takes Node 20 and npm; installing what was built does not. A source distribution brings
it along, built. An editable install does without: `make labextension` builds it for development.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "labextension"
BUILT = "gpunb/labextension"
INSTALLED = "share/jupyter/labextensions/gpunb"
OLDEST = 20


class Labextension(BuildHookInterface[Any]):
    """The hook, which hatchling calls before it builds anything."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it, unless that is done; an editable install goes without."""
        if version == "editable":
            self.app.display_info("gpunb: the JupyterLab extension is built by `make labextension`")
            return
        root = Path(self.root)
        if not (root / "PKG-INFO").exists():  # else this is a source distribution, unpacked
            build(root / SOURCES)
        elif not (root / BUILT / "package.json").exists():
            raise RuntimeError(f"this source distribution lacks {BUILT}: it was not made by hatch")
        if self.target_name == "wheel":
            build_data["shared_data"].update(
                {BUILT: INSTALLED, f"{SOURCES}/install.json": f"{INSTALLED}/install.json"}
            )


def build(folder: Path) -> None:
    """Build the extension from its sources.

    Raises:
        RuntimeError: there is no Node, or it is too old.
    """
    if problem := lack():
        raise RuntimeError(
            f"{problem}, which the JupyterLab extension is built with. Install Node {OLDEST} or "
            "newer, or `pip install --editable .`, which does without the extension"
        )
    if not (folder / "node_modules").exists():
        _run(folder, "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
    _run(folder, "npm", "run", "--silent", "build")


def lack() -> str:
    """What is missing for a build, in words; empty if nothing is."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "there is no Node here"
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    major = said.strip().removeprefix("v").partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST:
        return f"Node is {said.strip() or 'of no known version'} here and not {OLDEST} or newer"
    return ""


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, env=os.environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed in {folder}: see above")
