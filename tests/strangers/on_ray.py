"""A plugin for pytest: the module `ray` is the shim, with the fixtures that Ray's tests ask for."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import unittest.mock  # noqa: F401 - Ray imports it, and some of its tests use it
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SHIM = str(Path(__file__).parent / "ray_shim")
sys.path.insert(0, SHIM)
os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, os.environ.get("PYTHONPATH", "")])

import ray  # noqa: E402
from ray import _lookup, cluster_utils  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Some test modules import helpers from others."""
    os.environ[_lookup.TESTS] = str(config.rootpath)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{each: pyfuncitem.funcargs[each] for each in names}))
    return True


@contextmanager
def _session(request: pytest.FixtureRequest, **settings: Any) -> Iterator[Any]:
    usual = {"num_cpus": 1, "namespace": "default_test_namespace", **settings}
    try:
        yield ray.init("local", **{**usual, **getattr(request, "param", {})})
    finally:
        ray.shutdown()


def _starts(scope: Any = "function", **settings: Any) -> Any:
    """A fixture with a session."""

    @pytest.fixture(scope=scope)
    def start(request: pytest.FixtureRequest) -> Iterator[Any]:
        with _session(request, **settings) as started:
            yield started

    return start


ray_start_regular = _starts()
ray_start_regular_shared = _starts("module")
ray_start_no_cpu = _starts(num_cpus=0)
ray_start_2_cpus = _starts(num_cpus=2)
ray_start_10_cpus = _starts(num_cpus=10)
ray_start_1_cpu = _starts(num_cpus=1)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """End the session that a test has started, also implicitly."""
    shared = ray.is_initialized()
    yield
    if not shared:
        ray.shutdown()


@pytest.fixture
def shutdown_only() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture(scope="class")
def class_ray_instance() -> Iterator[Any]:
    yield ray.init()
    ray.shutdown()


@pytest.fixture(scope="module", params=[{"local_mode": True}, {"local_mode": False}])
def ray_start_shared_local_modes(request: pytest.FixtureRequest) -> Iterator[Any]:
    with _session(request) as started:
        yield started


@pytest.fixture
def ray_start_object_store_memory(request: pytest.FixtureRequest) -> Iterator[int]:
    ray.init("local", num_cpus=1, object_store_memory=request.param)
    yield request.param
    ray.shutdown()


def _cluster(nodes: int = 0) -> Any:
    """A fixture with a cluster of `nodes` nodes."""

    @pytest.fixture
    def start(request: pytest.FixtureRequest) -> Iterator[cluster_utils.Cluster]:
        settings = {**getattr(request, "param", {})}
        count = settings.pop("num_nodes", nodes)
        connect = settings.pop("do_init", count > 0)
        cluster = cluster_utils.Cluster()
        for _ in range(count):
            cluster.add_node(**settings)
        if connect:
            ray.init(cluster.address, namespace="default_test_namespace")
        yield cluster
        ray.shutdown()
        cluster.shutdown()

    return start


ray_start_cluster = _cluster()
ray_start_cluster_enabled = _cluster()
ray_start_cluster_init = _cluster()
ray_start_cluster_head = _cluster(1)
ray_start_cluster_2_nodes = _cluster(2)


@pytest.fixture
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()


@pytest.fixture
def maybe_external_redis() -> None:
    """There is no Redis."""


@pytest.fixture
def propagate_logs() -> None:
    """Logs of gpunb are propagated."""


def _absent(name: str) -> Any:
    @pytest.fixture
    def absent() -> None:
        raise ray.NotThere(f"the fixture {name}")

    return absent


for _name in """
    call_ray_start call_ray_start_shared call_ray_start_with_external_redis call_ray_stop_only
    cloned_virtualenv enable_mac_large_object_store enable_pickle_debug error_pubsub external_redis
    fs_only_object_spilling_config init_and_serve listen_port log_pubsub
    make_sure_dashboard_http_port_unused multi_node_object_spilling_config object_spilling_config
    ray_start_chaos_cluster ray_start_cluster_head_with_env_vars
    ray_start_cluster_head_with_external_redis ray_start_regular_with_external_redis
    ray_start_with_dashboard runtime_env_disable_URI_cache set_bad_runtime_env_cache_ttl_seconds
    set_enable_auto_connect set_runtime_env_plugin_schemas set_runtime_env_plugins
    set_runtime_env_retry_times slow_spilling_config start_cluster start_http_proxy
    tmp_working_dir two_node_cluster unstable_spilling_config use_tls
    """.split():
    globals()[_name] = _absent(_name)
