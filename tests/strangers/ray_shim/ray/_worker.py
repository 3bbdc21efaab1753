"""`ray._private.worker`: what Ray's tests ask the process about objects."""

from __future__ import annotations

from typing import Any

import gpunb
from gpunb.protocol import backend
from ray._lookup import NotThere


class _Refs(type):
    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, gpunb.ObjectRef)


class ObjectRef(metaclass=_Refs):
    """The id of an object from its bytes. It keeps no object alive."""

    __class_getitem__ = gpunb.ObjectRef.__class_getitem__

    def __init__(self, data: bytes) -> None:
        self.id = int.from_bytes(data[:8]), int.from_bytes(data[8:], signed=True)


class _CoreWorker:
    def object_exists(self, ref: Any) -> bool:
        """Whether the session has the value."""
        current: Any = backend.current()
        return current.store.get(ref.id) is not None

    def __getattr__(self, name: str) -> Any:
        raise NotThere(f"core_worker.{name}")


class _Worker:
    core_worker = _CoreWorker()
    put_object = staticmethod(gpunb.put)

    @property
    def current_node_id(self) -> str:
        return gpunb.get_runtime_context().get_node_id()

    def __getattr__(self, name: str) -> Any:
        raise NotThere(f"global_worker.{name}")


global_worker = _Worker()
