"""What people get: the wheel, installed from an index with what it depends on, and used.

`make release-check` builds `dist/` and runs these; they take minutes and the network. Interpreters
to install into may be named in GPUNB_RELEASE_PYTHONS, with ``:`` between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import textwrap
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpunb
from tests.sessions import ROOT
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("GPUNB_SLOW_TESTS"), reason="`make release-check` runs these"
    ),
]

PYTHONS = os.environ.get("GPUNB_RELEASE_PYTHONS", sys.executable).split(":")
EXTRAS = ("bench", "demo", "joblib", "lab", "terminal")
"""The extras for users; the others are for working on gpunb."""

CHECK = """
import importlib.metadata as metadata
from packaging.requirements import Requirement
for text in metadata.requires("gpunb"):
    need = Requirement(text)
    if need.marker is None or need.marker.evaluate({"extra": EXTRA}):
        assert need.specifier.contains(metadata.version(need.name), prereleases=True), text
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = ROOT / "dist" / f"gpunb-{gpunb.__version__}-py3-none-any.whl"
    assert found.exists(), f"`make wheel` first: there is no {found}"
    return found


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda path: Path(path).parent.parent.name)
def install(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Makes an environment of nothing but the wheel and one of its extras."""
    made: dict[str, Path] = {}

    def install(extra: str = "") -> Path:
        if extra not in made:
            folder = tmp_path_factory.mktemp(extra or "bare")
            run([request.param, "-m", "venv", str(folder)])
            target = f"{wheel}[{extra}]" if extra else str(wheel)
            run([str(folder / "bin/python"), "-m", "pip", "install", "-q", target], outside(folder))
            made[extra] = folder
        return made[extra]

    return install


def outside(folder: Path, **more: str) -> dict[str, str]:
    """Variables for programs of that environment, which know of no other and of no user."""
    keep = ("LANG", "PIP_", "SSL_", "XDG_CACHE_HOME", "http", "HTTP", "no_proxy", "NO_PROXY")
    kept = {name: value for name, value in os.environ.items() if name.startswith(keep)}
    (folder / "home").mkdir(exist_ok=True)
    return {
        **kept,
        "HOME": str(folder / "home"),
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "GPUNB_RUNTIME_DIR": str(folder / "run"),
        **more,
    }


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path = Path("/")) -> str:
    """What a program prints, if it does well."""
    done = subprocess.run(
        command,
        env=env,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def python(folder: Path, code: str, **environ: str) -> str:
    command = [str(folder / "bin/python"), "-c", textwrap.dedent(code)]
    return run(command, outside(folder, **environ))


def test_a_wheel_of_the_source_distribution_is_the_same_and_takes_no_node(
    wheel: Path, tmp_path: Path
) -> None:
    source = wheel.parent / f"gpunb-{gpunb.__version__}.tar.gz"
    (tmp_path / "bin").mkdir()  # with everything but Node
    for each in ("sh", "env", "uname"):
        (tmp_path / "bin" / each).symlink_to(shutil.which(each) or each)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    run([*pip, str(source)], {**os.environ, "PATH": str(tmp_path / "bin")})
    (again,) = tmp_path.glob("*.whl")
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist() if "RECORD" not in str(each)}


def test_without_extras_there_are_tasks_cells_and_the_command(
    install: Callable[..., Path],
) -> None:
    folder = install()
    run([str(folder / "bin/python"), "-m", "pip", "check"], outside(folder))
    assert run([str(folder / "bin/gpunb"), "--version"]) == f"gpunb {gpunb.__version__}\n"
    command = [str(folder / "bin/gpunb"), "status", "--json"]
    assert "devices" in json.loads(run(command, outside(folder)))
    shown_text = python(
        folder,
        """
        import gpunb
        @gpunb.remote(num_gpus=0.5)
        def ids():
            return gpunb.get_gpu_ids()
        with gpunb.init(simulate="2xA100"):
            print(gpunb.get([ids.remote(), ids.remote()]))

        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpunb")
        shell.run_cell("import gpunb; gpunb.init(simulate='2xA100')", silent=True)
        shell.run_cell("%%gpu 0.5\\nimport os\\nvisible = os.environ['CUDA_VISIBLE_DEVICES']")
        print("visible:", shell.user_ns["visible"])
        """,
    )
    assert shown_text.splitlines()[0] == "[[0], [0]]"
    assert shown_text.splitlines()[-1] == "visible: 0"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_what_it_promises(install: Callable[..., Path], extra: str) -> None:
    folder = install(extra)
    pip = [str(folder / "bin/python"), "-m", "pip", "-q"]
    run([*pip, "check"], outside(folder))
    run([*pip, "install", "packaging"], outside(folder))
    python(folder, CHECK.replace("EXTRA", repr(extra)))


def test_a_cell_in_a_kernel(install: Callable[..., Path], tmp_path: Path) -> None:
    """As a notebook does it, through the kernel that the extra for notebooks brings."""
    shown_text = python(
        install("demo"),
        """
        import json
        from jupyter_client.manager import start_new_kernel
        manager, client = start_new_kernel(kernel_name="python3")
        def cell(code):
            said = []
            reply = client.execute_interactive(
                code, timeout=120, output_hook=lambda message: said.append(message["content"])
            )["content"]
            assert reply["status"] == "ok", reply
            return said
        try:
            cell("%load_ext gpunb")
            cell("import gpunb; gpunb.init(simulate='2xA100')")
            cell("%%gpu 0.5\\nimport os\\nvisible = os.environ['CUDA_VISIBLE_DEVICES']")
            printed = cell("print('visible:', visible)")
            pictures = cell("gpunb.monitor()")
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
        kinds = sorted({kind for each in pictures if "data" in each for kind in each["data"]})
        print(json.dumps([[each.get("text") for each in printed], kinds]))
        """,
        JUPYTER_RUNTIME_DIR=str(tmp_path),
    )
    texts, kinds = json.loads(shown_text.splitlines()[-1])
    assert "visible: 0\n" in texts
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert "text/html" in kinds, "what is left of it in a saved notebook"


def test_the_demo_runs_from_the_source_distribution(
    install: Callable[..., Path], wheel: Path, tmp_path: Path
) -> None:
    folder = install("demo")
    with tarfile.open(wheel.parent / f"gpunb-{gpunb.__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    notebooks = tmp_path / f"gpunb-{gpunb.__version__}/notebooks"
    shutil.copytree(notebooks, tmp_path / "notebooks")  # where no gpunb lies beside them
    run(
        [str(folder / "bin/python"), "run_demo.py"],
        outside(folder, JUPYTER_RUNTIME_DIR=str(tmp_path / "run")),
        cwd=tmp_path / "notebooks",
    )


def test_jupyterlab_has_the_extension_and_its_server_answers(
    install: Callable[..., Path], tmp_path: Path
) -> None:
    folder = install("lab")
    env = outside(folder, JUPYTER_RUNTIME_DIR=str(tmp_path), JUPYTER_CONFIG_DIR=str(tmp_path))
    listed = plain(run([str(folder / "bin/jupyter"), "labextension", "list"], env))
    assert f"gpunb v{gpunb.__version__} enabled OK (python, gpunb)" in listed
    listed = plain(run([str(folder / "bin/jupyter"), "server", "extension", "list"], env))
    assert "gpunb.server enabled" in listed
    assert f"gpunb.server {gpunb.__version__} OK" in listed or "gpunb.server OK" in listed

    with served(folder, env, tmp_path) as ask:
        machine = json.loads(ask("gpunb/api/machine"))
        assert machine["sessions"] == {}
        assert "devices" in machine["machine"]
        page = ask("lab")
        settings = re.search(r'id="jupyter-config-data"[^>]*>(.*?)</script>', page, re.DOTALL)
        assert settings is not None
        extensions = json.loads(settings[1])["federated_extensions"]
        (load,) = (each["load"] for each in extensions if each["name"] == "gpunb")
        assert "gpunb" in ask(f"lab/extensions/gpunb/{load}")
        licences = json.loads(ask("lab/extensions/gpunb/static/third-party-licenses.json"))
        assert all(each["extractedText"] for each in licences["packages"])


@contextlib.contextmanager
def served(folder: Path, env: dict[str, str], tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Runs a Jupyter server; what is yielded asks it for a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        *("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *(f"--ServerApp.root_dir={tmp_path}", "--IdentityProvider.token=secret"),
    )
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [str(folder / "bin/jupyter"), "lab", *options], env=env, stdout=log, stderr=log
    )

    def ask(path: str) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}", headers={"Authorization": "token secret"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        try:
            ask("api/status")
        except (urllib.error.URLError, OSError):
            return False
        return True

    try:
        eventually(answers, "the server answers", within=120)
        yield ask
    finally:
        server.terminate()
        server.wait(60)
        log.close()


def plain(text: str) -> str:
    """The text without the colours of a terminal."""
    return re.sub(r" +", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))
