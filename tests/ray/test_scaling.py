"""A cluster whose autoscaler can bring nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_ray, pytest.mark.usefixtures("by_value")]
WITHIN = 120

CONFIG = {
    "cluster_name": "scales",
    "max_workers": 2,
    "provider": {"type": "fake_multinode"},
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "with-gpu": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "max_workers": 1},
    },
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 5,
    "docker": {},
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
"""A head without GPUs, and a node that its autoscaler asks for, and does not get."""


@contextlib.contextmanager
def started(*options: str) -> Iterator[None]:
    """A node, by Ray's own command."""
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--block", "--object-store-memory=100000000", *options]
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a cluster with an autoscaler, which this process has joined."""
    import ray

    config = tmp_path / "cluster.json"
    config.write_text(json.dumps(CONFIG))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    head = ("--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false")

    def joined() -> Any:
        with contextlib.suppress(Exception):
            return ray.init(address, log_to_driver=False, logging_level="CRITICAL")

    with started(*head, f"--autoscaling-config={config}"):
        eventually(joined, "the head answers", within=WITHIN)
        try:
            with gpunb.init("ray"):
                yield address
        finally:
            ray.shutdown()


def test_what_no_node_can_give_waits_for_the_autoscaler(address: str) -> None:
    from gpunb.ray.scaling import scaling

    eventually(scaling, "the autoscaler reports", within=WITHIN)
    task = gpunb.remote(num_gpus=1)(gpunb.get_gpu_ids).remote()

    def warned() -> bool:
        (text,) = gpunb.status()["warnings"]
        return "the autoscaler is bringing 1 more node" in text

    eventually(warned, within=WITHIN)
    assert "2 CPU" in gpunb.status()["waiting"][0]["waits_for"]
    with started(f"--address={address}", "--num-cpus=1", "--num-gpus=1"):
        assert gpunb.get(task, timeout=WITHIN) == [0]
    assert not gpunb.status()["warnings"]
