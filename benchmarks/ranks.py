"""Ranks: one training under torchrun, notebook_launcher, nbdistributed and gpunb, side by side.

`python -m benchmarks.ranks` prints the table of docs/coming-from.md. Each tool runs twice in a
fresh kernel (torchrun: in a process of its own), with two ranks and gloo on CPUs: one run is ended
by Stop, in the other one rank is killed. Both give the time to the first step.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, skipped

INIT = "torch.distributed.init_process_group('gloo')\n"
TRAIN = """\
import os, time, torch
torch.set_num_threads(1)
INIT
rank = torch.distributed.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    if step == 0:
        with open(f"FOLDER/{rank}", "w") as file:
            file.write(f"{os.getpid()} {time.time()}\\n")
    time.sleep(0.01)
"""
RANKS = 2
MOST = 60.0
"""Seconds for a cell to end after Stop or the end of a rank."""

GRACE = 8.0
"""Seconds after the end of the cell, after which a rank counts as left."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A way to run the training.

    Attributes:
        needs: modules without which it is left out.
        setup: cells before it.
        around: makes the code that is run of that of the training.
        ready: a cell that the tool answers at once when its processes are ready.
        lines: lines around the training, in words.
    """

    needs: tuple[str, ...]
    setup: tuple[str, ...]
    around: Callable[[str], str]
    lines: str
    ready: str = ""


def _with_init(train: str) -> str:
    return train.replace("INIT\n", INIT)


def _launched(train: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = f"notebook_launcher(train, num_processes=2, use_port='{port}')"
    body = textwrap.indent(_with_init(train), "    ")
    return f"from accelerate import notebook_launcher\ndef train():\n{body}\n{start}"


TOOLS = {
    "torchrun": Tool((), (), _with_init, "a file, and one command"),
    "notebook_launcher": Tool(
        ("accelerate",), (), _launched, "two, and the training is a function"
    ),
    "nbdistributed": Tool(
        ("nbdistributed",),
        ("%load_ext nbdistributed", "%dist_init -n 2"),
        lambda train: train.replace("INIT\n", ""),
        "`%load_ext`, `%dist_init -n 2`",
        "pass",
    ),
    "gpunb": Tool(
        (),
        ("%load_ext gpunb",),
        lambda train: f"%%gpu 1 --ranks 2\n{_with_init(train)}",
        "`%load_ext`, `%%gpu 1 --ranks 2`",
    ),
}


class _Terminal:
    """A training under torchrun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = 0

    def start(self, code: str) -> None:
        path = self._folder / "train.py"
        path.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        self._process = subprocess.Popen(
            [*command, f"--nproc-per-node={RANKS}", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def stop(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def finish(self) -> tuple[str, str]:
        _, err = self._process.communicate(timeout=MOST)
        errors = re.findall(r"^\S*?(\w+(?:Error|Exception|Interrupt))\b", err, re.MULTILINE)
        return (errors[-1] if errors else ""), err

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class _Notebook:
    """A kernel that runs cells."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        env = {**probe.environment(), "GPUNB_SIMULATE": "2xA100:40GiB"}
        # nbdistributed starts the first "python" that is found there.
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        self._manager, self._client = start_new_kernel(
            kernel_name="python3", cwd=str(folder), env=env
        )
        self.pid = self._manager.provisioner.pid

    def run(self, code: str) -> float:
        """The seconds that a cell took."""
        start = time.monotonic()
        self.start(code)
        error, text = self.finish()
        if error:
            raise RuntimeError(f"{code}: {error}: {text}")
        return time.monotonic() - start

    def start(self, code: str) -> None:
        self._ident = self._client.execute(code, store_history=True)

    def stop(self) -> None:
        self._manager.interrupt_kernel()

    def finish(self) -> tuple[str, str]:
        text, deadline = [], time.monotonic() + MOST
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=0.1)
                text.append(str(message["content"]))
            with contextlib.suppress(queue.Empty):
                reply = self._client.get_shell_msg(timeout=0.1)
                if reply["parent_header"].get("msg_id") == self._ident:
                    content = reply["content"]
                    return content.get("ename", ""), "\n".join([*text, str(content)])
        return "no end", "\n".join(text)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def side(tool: str, end: str) -> Result:
    """One run of a tool, which ends by ``"stop"`` or by ``"kill"``, SIGKILL for the last rank."""
    import psutil

    chosen = TOOLS[tool]
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        where: Any = (_Terminal if tool == "torchrun" else _Notebook)(folder)
        try:
            idle = _cpu(where.pid)
            before = sum(where.run(each) for each in chosen.setup)
            while chosen.ready and where.run(chosen.ready) > 5:
                pass  # the cell was lost
            start = time.time()
            where.start(chosen.around(TRAIN).replace("FOLDER", name))
            pids, last = _first_steps(folder)
            ranks = [psutil.Process(each) for each in pids]
            seconds, cpu = before + last - start, _cpu(where.pid) - idle
            then = time.monotonic()
            if end == "stop":
                where.stop()
            else:
                ranks[-1].kill()
            error, text = where.finish()
            took = time.monotonic() - then
            left = _left(ranks[: RANKS - (end == "kill")])
        finally:
            started = _started_by(where.pid)[1:]
            where.close()
            for each in {*started, *ranks}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    named = all(re.search(each, text) for each in (r"\brank\W*1\b", "SIGKILL"))
    facts = {"took": [took], "left": [left], "named": [named], "error": error}
    return {"seconds": [seconds], "cpu": [cpu], **facts}


def _started_by(pid: int) -> list[Any]:
    """A process and all that it has started, as far as they run."""
    import psutil

    if not pid:
        return []
    try:
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _first_steps(folder: Path) -> tuple[list[int], float]:
    """The processes of the ranks, and the time at which the last of them had done a step."""
    files, deadline = [folder / str(rank) for rank in range(RANKS)], time.monotonic() + MOST
    while not all(each.exists() and each.read_text().endswith("\n") for each in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no first step of both ranks after {MOST:g} s")
        time.sleep(0.01)
    lines = [each.read_text().split() for each in files]
    return [int(pid) for pid, _ in lines], max(float(at) for _, at in lines)


def _cpu(pid: int) -> float:
    """Processor seconds of a process and all that it has started."""
    import psutil

    total, started = 0.0, _started_by(pid)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
            if each == started[0]:  # those of its children that are over
                total += times.children_user + times.children_system
    return total


def _left(ranks: list[Any]) -> int:
    """How many of these processes still run after the grace period."""
    import psutil

    def runs(process: Any) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + GRACE
    while (left := sum(map(runs, ranks))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def results(run: Callable[[probe.Call], Result], rounds: int) -> dict[str, dict[str, Result]]:
    """For each tool the result of each end; times of all rounds are joined."""
    found: dict[str, dict[str, Result]] = {}
    for name, tool in TOOLS.items():
        ends = found[name] = {}
        for end in ("stop", "kill") * rounds:
            call = probe.call(
                "ranks.side", "torch", "ipykernel", *tool.needs, timeout=240, tool=name, end=end
            )
            ends[end] = probe.joined(ends.get(end, {}), run(call))
    return found


def _median(ends: Mapping[str, Result], what: str) -> float | None:
    samples = [each for result in ends.values() for each in result.get(what, ())]
    return statistics.median(samples) if samples else None


def _ended(result: Result, ranks: int) -> str:
    if "skipped" in result:
        return str(result["skipped"])
    error = f"`{result['error']}`" if result["error"] else "no error"
    if any(result["named"]):
        runs = len(result["named"])
        count = "" if all(result["named"]) else f" in {sum(result['named'])} of {runs} runs"
        error += f", which names the rank and the signal{count},"
    left = max(result["left"])
    rest = f"{left} of {ranks} ranks go on" if left else "all ranks end"
    return f"{error} after {statistics.median(result['took']):.1f} s; {rest}"


def table(found: Mapping[str, Mapping[str, Result]]) -> str:
    """The table of the documentation, in Markdown."""

    def number(ends: Mapping[str, Result], what: str) -> str:
        value = _median(ends, what)
        return ends["stop"].get("skipped", "") if value is None else f"{value:.1f}"

    rows = {
        "": list(found),
        "lines around the training": [TOOLS[each].lines for each in found],
        "seconds from the first line to the first step of both ranks": [
            number(each, "seconds") for each in found.values()
        ],
        "processor time for that, in seconds": [number(each, "cpu") for each in found.values()],
        "Stop": [_ended(each["stop"], RANKS) for each in found.values()],
        "a rank dies by SIGKILL": [_ended(each["kill"], RANKS - 1) for each in found.values()],
    }
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---" * (len(found) + 1) + "|", *lines[1:]])


def measure(bench: Any) -> Iterator[Line]:
    found = results(bench.run, bench.n(3, 1))
    own = found.pop("gpunb")
    peers = {name: each for name, each in found.items() if bench.peers}
    bench.note({name: each["stop"] for name, each in peers.items()})
    name = "a training in two ranks, from the first line to the first step"
    if "skipped" in own["stop"]:
        yield skipped(name, "s", own["stop"])
        return
    seconds = {name: _median(each, "seconds") for name, each in peers.items()}
    known = {name: value for name, value in seconds.items() if value is not None}
    yield Line(name, _median(own, "seconds"), "s", peers=known, detail={**found, "gpunb": own})
    for end, words in (("stop", "Stop"), ("kill", "SIGKILL of one")):
        left = {tool: each[end].get("left") for tool, each in peers.items()}
        note = ", ".join(f"{tool} {max(each)}" for tool, each in left.items() if each)
        name = f"ranks that are left after {words}"
        yield Line(name, max(own[end]["left"]), "", goal=0, note=note)


def main() -> None:
    found = results(probe.run, 3)
    versions = []
    for each in ("torch", "accelerate", "nbdistributed", "ipykernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{each} {importlib.metadata.version(each)}")
    print(f"{time.strftime('%F')}, Python {sys.version.split()[0]}, {', '.join(versions)}")
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
