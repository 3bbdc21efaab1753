"""Random programs, such as those that people write; the same for the same seed.

They never hang by themselves: whoever holds a device and waits, waits for nothing that needs one,
and what an actor waits for needs no actor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.programs import steps as st
from tests.programs.steps import Child, Plan, Program

PAUSES = (0.0, 0.0, 0.0, 0.0, 0.001, 0.003)
WINDOWS = (0.0, 0.002, 0.005, 0.01)
"""Seconds that a task pauses whose end is going to be tried."""

MOST_STRIKES = 3
"""As many crashes as a task with the usual retries survives."""


def make(seed: int) -> Program:
    """The program of this seed."""
    return _Maker(random.Random(seed)).program()


@dataclass
class _Known:
    """A name that later steps may use; whether what it stands for needs devices or actors."""

    name: str
    gpus: bool = False
    actors: bool = False
    listed: bool = False
    task: bool = False
    strikes: bool = False
    force: bool = True


@dataclass
class _Maker:
    chance: random.Random
    made: Program = field(default_factory=list)
    refs: list[_Known] = field(default_factory=list)
    actors: dict[str, st.Make] = field(default_factory=dict)
    streams: dict[str, _Known] = field(default_factory=dict)
    count: int = 0
    strikes: int = 0
    sleeper: str | None = None

    def program(self) -> Program:
        chance = self.chance
        self.faults = chance.random() < 0.65
        self.whole = chance.random() < 0.3
        kinds: dict[Any, int] = {
            self.task: 40,
            self.put: 12,
            self.generate: 7,
            self.take: 9 if chance.random() < 0.5 else 3,
            self.actor: 5,
            self.call: 16,
            self.find: 2,
            self.get: 8,
            self.wait: 5,
            self.drop: 12,
            self.pause: 2,
        }
        if self.faults:
            kinds |= {self.end: 14, self.strike: 8, self.kill: 4, self.leave: 2, self.sleep: 3}
            kinds |= {self.rush: 5}
        for _ in range(chance.randint(3, 16)):
            chance.choices(list(kinds), list(kinds.values()))[0]()
        return self.made

    # ------------------------------------------------------------------------------------- choices

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def salt(self) -> int:
        return self.chance.randrange(1 << 16)

    def some(self, most: int, **wanted: bool) -> tuple[_Known, ...]:
        """A few refs, of which these things are true or false."""
        fit = [r for r in self.refs if all(getattr(r, n) is v for n, v in wanted.items())]
        # The latest more often: they are not over yet.
        fit = fit[-4:] if self.chance.random() < 0.7 else fit
        return tuple(self.chance.sample(fit, min(len(fit), self.chance.randint(0, most))))

    def add(self, step: Any, *uses: _Known, gpus: float = 0, actors: bool = False, **more: Any):
        self.made.append(step)
        known = _Known(
            step.name,
            gpus=gpus > 0 or any(each.gpus for each in uses),
            actors=actors or any(each.actors for each in uses),
            **more,
        )
        self.refs.append(known)
        return known

    def plan(self, *, shapes: tuple[str, ...] = ("number",), often: float = 0.15) -> Plan:
        chance = self.chance
        pauses = WINDOWS if self.faults else PAUSES
        plan = Plan(self.salt(), chance.choice(pauses), shape=chance.choice(shapes))
        if self.faults and chance.random() < often:
            fault = chance.choice(("raise", "kill", "exit"))
            plan = replace(plan, fault=fault, fails=chance.choice((1, 1, 2, 3, 9)))
            plan = replace(plan, late=chance.random() < 0.5)
        return plan

    def children(self, depth: int, gpus: bool, uses: tuple[str, ...]) -> tuple[Child, ...]:
        chance = self.chance
        found = []
        for _ in range(chance.choice((0, 0, 0, 0, 1, 1, 2)) if depth < 2 else 0):
            share = 0.25 if gpus and chance.random() < 0.3 else 0
            use = chance.choice(uses)
            quiet = use in ("cancel", "force")
            plan = Plan(self.salt(), chance.choice(WINDOWS)) if quiet else self.plan()
            if not quiet:
                below = self.children(depth + 1, gpus and not share, ("get", "wait", "drop"))
                plan = replace(plan, children=below)
            retries = chance.choice((0, 3, 3))
            found.append(Child(plan, share, retries, use, passes=chance.random() < 0.3))
        return tuple(found)

    def share(self) -> float:
        shares = (0, 0, 0, 0, 0.5, 1, 1, 2) if self.whole else (0, 0, 0, 0, 0.1, 0.25, 0.5)
        return self.chance.choice(shares)

    # --------------------------------------------------------------------------------------- steps

    def task(self) -> None:
        chance, gpus = self.chance, self.share()
        shape = chance.choice(("number",) * 5 + ("large", "refs", "pair"))
        args = self.some(2, listed=False) if gpus else self.some(2)
        nested = self.some(2, gpus=False, actors=False) if gpus else self.some(2)
        handles: tuple[str, ...] = ()
        if not gpus and self.actors and chance.random() < 0.3:
            handles = tuple(chance.sample(list(self.actors), 1))
        uses = (
            ("get", "wait", "drop", "cancel", "force") if self.faults else ("get", "wait", "drop")
        )
        uses += ("return",) * 3 if shape == "refs" else ()
        plan = replace(
            self.plan(shapes=(shape,)),
            children=self.children(0, not gpus, uses),
            calls=chance.randint(1, 2) if handles else 0,
            own=0 if gpus else chance.choice((0,) * 9 + (1, 2)),
        )
        step = st.Task(
            self.name("t"),
            plan,
            gpus,
            chance.choice((0, 1, 3, 3, 3)),
            timeout=30 if chance.random() < 0.1 else None,
            reuse=bool(gpus) and chance.random() < 0.2,
            args=tuple(each.name for each in args),
            nested=tuple(each.name for each in nested),
            handles=handles,
        )
        inner = any(child.gpus for child in _all(plan))
        known = self.add(
            step,
            *args,
            *nested,
            gpus=gpus or inner,
            actors=bool(handles),
            listed=shape == "refs",
            task=True,
            strikes=True,
        )
        if shape == "pair":
            self.refs.append(replace(known, name=f"{known.name}'"))

    def put(self) -> None:
        holds = self.some(2) if self.chance.random() < 0.5 else ()
        names = tuple(each.name for each in holds)
        large = not holds and self.chance.random() < 0.3
        step = st.Put(self.name("p"), self.salt(), large, names)
        self.add(step, *holds, listed=bool(holds))

    def generate(self) -> None:
        args = self.some(1, listed=False)
        dynamic, gpus = self.chance.random() < 0.2, min(self.share(), 1)
        step = st.Generate(
            self.name("g"),
            self.plan(shapes=("number", "number", "large"), often=0.4),
            self.chance.randint(0, 4),
            gpus,
            self.chance.choice((0, 3, 3)),
            dynamic,
            tuple(each.name for each in args),
        )
        if dynamic:
            self.add(step, *args, gpus=gpus, listed=True, task=True, strikes=True)
        else:
            self.streams[step.name] = self.add(step, *args, gpus=gpus)
            self.refs.pop()
            for _ in range(self.chance.randint(0, 2)):
                self.take()

    def take(self) -> None:
        if self.streams:
            source = self.chance.choice(list(self.streams))
            known = self.add(st.Take(self.name("r"), source), self.streams[source])
            if self.chance.random() < 0.3:
                self.forget(known.name)

    def actor(self) -> None:
        chance = self.chance
        if len(self.actors) >= 2:
            return
        args = self.some(1, listed=False)
        gpus = 0.25 if not self.whole and chance.random() < 0.4 else 0
        faults = self.faults
        step = st.Make(
            self.name("a"),
            self.salt(),
            chance.choice(("plain", "plain", "plain", "threads", "async")),
            gpus,
            chance.choice((0, 0, 1, -1, -1)) if faults else 0,
            chance.choice((0, 0, 1, 4)) if faults else 0,
            known=chance.random() < 0.3,
            fails=faults and chance.random() < 0.1,
            args=tuple(each.name for each in args),
        )
        self.made.append(step)
        self.actors[step.name] = step
        for _ in range(chance.randint(1, 3)):
            self.call()

    def call(self) -> None:
        if not self.actors:
            return
        name = self.chance.choice(list(self.actors))
        actor = self.actors[name]
        listed = {"listed": False} if actor.kind == "async" else {}
        args = self.some(1, **listed)
        nested = self.some(1, actors=False, **listed)
        if any(each.actors for each in args if each.listed):
            args = ()
        plan = self.plan()
        if actor.kind != "async":
            plan = replace(plan, children=self.children(1, False, ("get", "wait", "drop")))
        step = st.Call(
            self.name("c"),
            name,
            plan,
            tuple(each.name for each in args),
            tuple(each.name for each in nested),
        )
        self.add(step, *args, *nested, gpus=actor.gpus, actors=True, task=True, force=False)

    def find(self) -> None:
        named = [name for name, each in self.actors.items() if each.known]
        if named:
            name = self.chance.choice(named)
            step = st.Find(self.name("a"), name)
            self.made.append(step)
            self.actors[step.name] = self.actors[name]

    def get(self) -> None:
        if self.refs:
            self.made.append(st.Get(self.chance.choice(self.refs).name))

    def wait(self) -> None:
        names = tuple(each.name for each in self.some(4))
        if names:
            timeout = self.chance.choice((None, 0.0, 0.002))
            self.made.append(st.Wait(names, self.chance.randint(1, len(names)), timeout))

    def drop(self) -> None:
        names = [each.name for each in self.refs] + list(self.actors) + list(self.streams)
        if names:
            self.forget(self.chance.choice(names))

    def forget(self, name: str) -> None:
        self.made.append(st.Drop(name))
        self.refs = [each for each in self.refs if each.name != name]
        self.actors.pop(name, None)
        self.streams.pop(name, None)

    def pause(self) -> None:
        self.made.append(st.Pause(self.chance.choice((0.001, 0.004, 0.015))))

    # -------------------------------------------------------------------------------------- faults

    def sleep(self) -> None:
        """A task that has to be ended, by its timeout or by somebody."""
        if self.sleeper is not None:
            return
        gpus = 0 if self.whole else self.chance.choice((0, 0.5))
        timed = self.chance.random() < 0.3
        step = st.Task(
            self.name("t"),
            Plan(self.salt(), st.ENDLESS),
            gpus,
            timeout=0.02 if timed else None,
        )
        self.sleeper = step.name
        self.add(step, gpus=gpus, task=True, strikes=True)

    def end(self) -> None:
        chance = self.chance
        tasks = [each for each in self.refs if each.task]
        if not tasks and not self.streams:
            return
        known = chance.choice(tasks[-3:] if tasks else [None])
        name = known.name if known else chance.choice(list(self.streams))
        if chance.random() < 0.25 and known is not None:
            self.made.append(st.Interrupt(name))
            return
        force = chance.random() < 0.4 and (known is None or known.force)
        self.made.append(st.Cancel(name, force, chance.random() < 0.6))

    def rush(self) -> None:
        """Tasks one after the other on the same workers, one of which is ended as it ends."""
        chance = self.chance
        names = [self.name("t") for _ in range(chance.randint(3, 6))]
        pause = chance.choice((0.0005, 0.001, 0.002))
        for each in names:
            step = st.Task(each, Plan(self.salt(), pause), retries=0)
            self.add(step, task=True, strikes=True)
        self.made.append(st.Pause(round(pause + chance.random() * 0.002, 5)))
        for name in names[:2]:
            step = st.Interrupt(name) if chance.random() < 0.3 else st.Cancel(name)
            self.made.append(step)

    def strike(self) -> None:
        if self.strikes == MOST_STRIKES:
            return
        names = [each.name for each in self.refs if each.strikes][-3:] + list(self.actors)
        names += list(self.streams)
        if names:
            self.strikes += 1
            self.made.append(st.Strike(self.chance.choice(names)))

    def kill(self) -> None:
        if self.actors:
            name = self.chance.choice(list(self.actors))
            self.made.append(st.Kill(name, restart=self.chance.random() < 0.5))

    def leave(self) -> None:
        if self.actors:
            actor = self.chance.choice(list(self.actors))
            self.add(st.Leave(self.name("c"), actor), actors=True, task=True, force=False)


def _all(plan: Plan) -> list[Child]:
    """The children, theirs, and so on."""
    return [each for child in plan.children for each in (child, *_all(child.plan))]
