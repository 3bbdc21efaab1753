"""What runs in the workers: plans, carried out."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gpunb
from gpunb.actor import exit_actor
from gpunb.exceptions import GpunbError
from tests.programs.steps import PLANNED, Child, Plan, mix

LARGE = 20_000
"""Times that a large value repeats its four bytes, so that it does not fit into a message."""


def large(number: int) -> bytes:
    return number.to_bytes(4, "big") * LARGE


def number(value: Any) -> int:
    """What counts of a value; gets what it has refs to."""
    if isinstance(value, bytes):
        first, last = value[:4], value[-4:]
        assert first == last
        assert len(value) == 4 * LARGE
        return int.from_bytes(first, "big")
    if isinstance(value, gpunb.DynamicObjectRefGenerator):
        value = list(value)
    if isinstance(value, list):
        plain = [each for each in value if isinstance(each, int)]
        refs = [each for each in value if isinstance(each, gpunb.ObjectRef)]
        refs += [used(each) for each in value if isinstance(each, gpunb.ActorHandle)]
        return mix(*plain, *map(number, gpunb.get(refs)))
    if isinstance(value, tuple):
        return int(value[0])
    assert isinstance(value, int), value
    return value


def used(actor: Any) -> Any:
    """What is done with the handle of an actor that came in a value."""
    return actor.work.remote(Plan(1))


def fail(plan: Plan, attempt: int, *, late: bool) -> None:
    """End as the plan says, if it is time for that."""
    if not plan.fault or attempt > plan.fails or plan.late is not late:
        return
    if plan.fault == "raise":
        raise ValueError(f"{PLANNED} {plan.salt}")
    if plan.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    os._exit(3)


def work(plan: Plan, *args: Any, nested: Sequence[Any] = (), handles: Sequence[Any] = ()) -> Any:
    """Carry out a plan."""
    attempt = gpunb.get_runtime_context().attempt or 1
    fail(plan, attempt, late=False)
    numbers = [number(each) for each in args]
    numbers += [number(each) for each in gpunb.get(list(nested))]
    if plan.calls:
        inner = Plan(plan.salt + 1)
        made = [each.work.remote(inner) for each in handles for _ in range(plan.calls)]
        numbers += [number(each) for each in gpunb.get(made)]
    returned = [child for each in plan.children for child in _child(each, numbers, nested)]
    if plan.own:
        actor = actors["plain"].remote(plan.salt, False)
        made = [actor.work.remote(Plan(plan.salt + 2)) for _ in range(plan.own)]
        numbers += [number(each) for each in gpunb.get(made)]
        returned.append(actor)
    if plan.pause:
        time.sleep(plan.pause)
    fail(plan, attempt, late=True)
    return shaped(plan, mix(plan.salt, *numbers), returned)


def _child(child: Child, numbers: list[int], nested: Sequence[Any]) -> list[Any]:
    """Submit a child; what is to be returned of it."""
    options: dict[str, Any] = {"max_retries": child.retries}
    if child.gpus:
        options["num_gpus"] = child.gpus
    passed = list(nested) if child.passes else []
    ref = task.options(**options).remote(child.plan, nested=passed)
    if child.use == "return":
        return [ref]
    if child.use == "wait":
        ready, rest = gpunb.wait([ref])
        assert (ready, rest) == ([ref], [])
    if child.use in ("get", "wait"):
        numbers.append(number(gpunb.get(ref)))
    elif child.use in ("cancel", "force"):
        gpunb.cancel(ref, force=child.use == "force")
        try:
            gpunb.get(ref)
        except GpunbError:
            pass
    return []


def shaped(plan: Plan, result: int, returned: list[Any]) -> Any:
    match plan.shape:
        case "large":
            return large(result)
        case "refs":
            return [result, gpunb.put(mix(result, 1)), *returned]
        case "pair":
            return result, large(mix(result, 2))
    return result


def produce(plan: Plan, count: int, *args: Any) -> Iterator[Any]:
    """Yield values as a plan says; a late fault comes after the first of them."""
    attempt = gpunb.get_runtime_context().attempt or 1
    fail(plan, attempt, late=False)
    numbers = [number(each) for each in args]
    for index in range(count):
        value = mix(plan.salt, *numbers, index)
        yield large(value) if plan.shape == "large" else value
        fail(plan, attempt, late=True)
        if plan.pause:
            time.sleep(plan.pause)


class Plain:
    """Counts its calls, since it was made."""

    def __init__(self, salt: int, fails: bool, *args: Any) -> None:
        if fails:
            raise ValueError(f"{PLANNED} {salt}")
        self.start = mix(salt, *map(number, args))
        self.count = 0

    def work(self, plan: Plan, *args: Any, nested: Sequence[Any] = ()) -> tuple[int, int]:
        # Counted first, so that the order of the calls shows.
        self.count += 1
        count = self.count
        return work(plan, self.start, *args, nested=nested), count

    def leave(self) -> None:
        exit_actor()


class Async:
    """The same in coroutines."""

    def __init__(self, salt: int, fails: bool, *args: Any) -> None:
        Plain.__init__(self, salt, fails, *args)  # type: ignore[arg-type]

    async def work(self, plan: Plan, *args: Any, nested: Sequence[Any] = ()) -> tuple[int, int]:
        self.count += 1
        count = self.count
        fail(plan, gpunb.get_runtime_context().attempt or 1, late=False)
        numbers = [self.start, *map(number, args)]
        numbers += [number(await each) for each in nested]
        await asyncio.sleep(plan.pause)
        fail(plan, gpunb.get_runtime_context().attempt or 1, late=True)
        return mix(plan.salt, *numbers), count

    async def leave(self) -> None:
        exit_actor()


task = gpunb.remote(work)
warm = gpunb.remote(max_calls=0)(work)
generator = gpunb.remote(produce)
actors = {
    "plain": gpunb.remote(Plain),
    "threads": gpunb.remote(Plain),
    "async": gpunb.remote(Async),
}
