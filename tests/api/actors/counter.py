"""An actor for many tests, and waits for what its process does."""

from __future__ import annotations

import os
import sys

import gpunb
from gpunb.exceptions import ActorUnavailableError
from tests.sessions import alive
from tests.waiting import PATIENCE, eventually

echo = print  # what the code in workers does


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


def gone(pid):
    eventually(lambda: not alive(pid), f"process {pid} is gone")


def back(method, *args):
    """The result of a call once its actor, which was started again, can be reached."""

    def tries():
        try:
            return [get(method.remote(*args))]
        except ActorUnavailableError:
            return None

    return eventually(tries, "the actor is back")[0]


@gpunb.remote
class Counter:
    """Counts."""

    kind = "counter"

    def __init__(self, start=0, *, step=1):
        self.value = start
        self.step = step
        self.seen = []

    def add(self, n=1, *, times=1):
        self.value += n * times * self.step
        self.seen.append(n)
        return self.value

    def read(self):
        return self.value

    def order(self):
        return self.seen

    def pid(self):
        return os.getpid()

    def hold(self, gate, name="held"):
        gate.enter(name)
        return self.value

    def fail(self, error):
        raise error

    def crash(self, text=""):
        if text:
            echo(text, file=sys.stderr)
        os._exit(3)

    def call(self, function, *args):
        return function(self, *args)

    def leave(self):
        gpunb.actor.exit_actor()

    def _private(self):
        return "private"

    @property
    def double(self):
        return 2 * self.value

    @staticmethod
    def plus(a, b=1):
        return a + b

    @classmethod
    def name_of_class(cls, suffix=""):
        return cls.__name__ + suffix

    def __call__(self, x):
        return x + self.value

    def __len__(self):
        return 7


@gpunb.remote
def same(value):
    return value


@gpunb.remote
def use(handle, n=1):
    return gpunb.get(handle.add.remote(n))
