"""Puts the extension for JupyterLab into the wheel, built beforehand if need be.

Building it takes Node 20 and npm; installing what was built does not. A source distribution brings
it along, built. An editable install does without: `make labextension` builds it for development.

The wheel says in `sboms/` what of others is in the extension, with versions and licences.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "labextension"
BUILT = "gpunb/labextension"
INSTALLED = "share/jupyter/labextensions/gpunb"
LICENCES = f"{BUILT}/static/third-party-licenses.json"
BILL = "build/labextension.cdx.json"
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
            lock = json.loads((root / SOURCES / "package-lock.json").read_text("utf-8"))
            found = json.loads((root / LICENCES).read_text("utf-8"))
            (root / BILL).parent.mkdir(exist_ok=True)
            (root / BILL).write_text(json.dumps(bill(found, lock), indent=2) + "\n", "utf-8")
            build_data["sbom_files"].append(BILL)


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


def bill(found: dict[str, Any], lock: dict[str, Any]) -> dict[str, Any]:
    """The bill of materials of the extension, in CycloneDX.

    Args:
        found: `third-party-licenses.json`, which says what was bundled.
        lock: `package-lock.json`, which says what that is.

    Raises:
        RuntimeError: the two differ, or the licence of something is not known.
    """
    own = lock["packages"][""]
    parts = [
        _part(each["name"], each["versionInfo"], each["licenseId"], lock)
        for each in sorted(found["packages"], key=lambda each: str(each["name"]))
    ]
    name, version = "pkg:npm/gpunb", own["version"]
    about = {"type": "library", "name": "gpunb", "version": version}
    licences = [{"license": {"id": own["license"]}}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"bom-ref": f"{name}@{version}", **about, "licenses": licences},
        },
        "components": parts,
        "dependencies": [
            {"ref": f"{name}@{version}", "dependsOn": [each["bom-ref"] for each in parts]},
            *({"ref": each["bom-ref"], "dependsOn": []} for each in parts),
        ],
    }


def _part(name: str, version: str, licence: str, lock: dict[str, Any]) -> dict[str, Any]:
    locked = [
        each
        for path, each in lock["packages"].items()
        if path.endswith(f"node_modules/{name}") and each["version"] == version
    ]
    if not locked:
        raise RuntimeError(f"{name} {version} is in the extension, but not in package-lock.json")
    if not licence or locked[0].get("license") != licence:
        raise RuntimeError(
            f"{name} {version} is in the extension with the licence {licence!r}, and in "
            f"package-lock.json with {locked[0].get('license')!r}: look at it, and correct one"
        )
    reference = f"pkg:npm/{name.replace('@', '%40')}@{version}"
    group, _, rest = name.rpartition("/")
    algorithm, _, digest = locked[0]["integrity"].partition("-")
    return {
        "type": "library",
        "bom-ref": reference,
        **({"group": group} if group else {}),
        "name": rest,
        "version": version,
        "purl": reference,
        "licenses": [{"license": {"id": licence}}],
        "hashes": [
            {
                "alg": algorithm.upper().replace("SHA", "SHA-"),
                "content": base64.b64decode(digest).hex(),
            }
        ],
    }


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, env=os.environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed in {folder}: see above")
