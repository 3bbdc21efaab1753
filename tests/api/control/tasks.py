"""Tasks and actors that tests cancel and wait for."""

from __future__ import annotations

import asyncio
import os
import pickle

import pytest

import gpunb
from gpunb.exceptions import TaskCancelledError
from tests.waiting import PATIENCE, eventually


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


def raises_cancelled(*refs):
    for ref in refs:
        with pytest.raises(TaskCancelledError):
            get(ref)


@gpunb.remote
def same(value):
    return value


@gpunb.remote
def hold(gate, name="held"):
    gate.enter(name)
    return name


@gpunb.remote(num_gpus=1)
def on_gpu(*_):
    return gpunb.get_gpu_ids()


@gpunb.remote
class Worker:
    def hold(self, gate, name="held"):
        gate.enter(name)
        return name

    def same(self, value):
        return value

    def get(self, refs):
        return gpunb.get(refs)

    def call(self, function, *args):
        return function(*args)

    def pid(self):
        return os.getpid()


@gpunb.remote
class AsyncWorker:
    async def hold(self, gate, name="held"):
        await gate.enter_async(name)
        return name

    async def get(self, refs):
        return await asyncio.gather(*refs)

    async def same(self, value):
        return value


def kept(gate, name, ref):
    """Pass a ref out of a task while the task runs."""
    (gate.folder / f"new-{name}").write_bytes(pickle.dumps(ref.id))
    (gate.folder / f"new-{name}").rename(gate.folder / f"ref-{name}")


def found(gate, name):
    path = gate.folder / f"ref-{name}"
    eventually(path.exists, f"the ref {name}")
    return gpunb.ObjectRef(pickle.loads(path.read_bytes()))
