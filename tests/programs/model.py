"""What may come of a program: for each ref the value that it has, and the errors that it may have
instead for what was done to it and to what it depends on.

A task to which nothing was done, and nothing to what it takes, has its value and no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.programs import steps as st
from tests.programs.steps import Child, Plan, mix

MANY = 1 << 30


@dataclass(frozen=True)
class Value:
    """A value: a number in one of several forms.

    Attributes:
        form: ``"number"``, ``"large"``, ``"refs"`` (a list of the number and refs), ``"dynamic"``
            (refs only), ``"call"`` (the number and a count of calls), ``"none"``.
        inner: what the refs in it may come to.
        low, high: of the count of calls.
        ends: of refs only, the number of refs after which another one may be the last, with this
            error; None if that cannot be.
    """

    number: int
    form: str = "number"
    inner: tuple[Expected, ...] = ()
    low: int = 1
    high: int = MANY
    ends: tuple[int, str] | None = None


@dataclass(frozen=True)
class Expected:
    """What a ref may come to: the value, if it may have it, or one of these errors."""

    value: Value | None
    errors: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Input:
    """What a ref gives to who gets it, and all that is in it."""

    number: int | None
    errors: frozenset[str]


def taken(expected: Expected) -> Input:
    value = expected.value
    if value is None:
        return Input(None, expected.errors)
    if value.form not in ("refs", "dynamic"):
        return Input(value.number, expected.errors)
    inner = [taken(each) for each in value.inner]
    errors = expected.errors.union(*(each.errors for each in inner), (value.ends or ())[1:])
    own = () if value.form == "dynamic" else (value.number,)
    numbers = _numbers(inner)
    return Input(None if numbers is None else mix(*own, *numbers), errors)


def _numbers(inputs: Sequence[Input]) -> list[int] | None:
    numbers = [each.number for each in inputs if each.number is not None]
    return numbers if len(numbers) == len(inputs) else None


@dataclass(eq=False)
class Node:
    """A ref, a generator or an actor, under the step that made it.

    Attributes:
        args, nested: the nodes of what it takes.
        uses: the actors that it calls, or is a call of.
        source: the generator that it was taken from, and as the how-many-th.
        cancelled: whether somebody tried to; `recursive` if its children, too.
        interrupted: whether it was; strikes: how often its process may have been killed.
        killed: for good, whether there are calls after that or not.
        revived: how often it was killed to start again.
        late: made after its actor was killed.
        dropped: its last name in the program is gone.
        calls: of an actor, from the kernel, in order.
        shared: others may call it.
    """

    step: st.Step
    args: tuple[Node, ...] = ()
    nested: tuple[Node, ...] = ()
    uses: tuple[Node, ...] = ()
    source: Node | None = None
    index: int = 0
    cancelled: bool = False
    recursive: bool = False
    interrupted: bool = False
    strikes: int = 0
    killed: bool = False
    revived: int = 0
    late: bool = False
    dropped: bool = False
    shared: bool = False
    calls: list[Node] = field(default_factory=list)
    taken: int = 0

    @property
    def pooled(self) -> bool:
        """Whether its worker may serve others as well."""
        step = self.step
        return isinstance(step, st.Task | st.Generate) and (
            not step.gpus or getattr(step, "reuse", False)
        )

    @property
    def stopped(self) -> frozenset[str]:
        """What it may come to because of what was done to it."""
        return frozenset({"cancelled"} if self.cancelled or self.interrupted else ())


class Model:
    """Follows a program, step by step."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.pool_strikes = 0

    # -------------------------------------------------------------------------------- what is done

    def made(self, step: st.Step, name: str) -> Node:
        """A step was carried out that makes something."""
        nodes = self.nodes
        names = (*getattr(step, "args", ()), *getattr(step, "holds", ()))
        uses = getattr(step, "handles", ()) or tuple(filter(None, [getattr(step, "actor", "")]))
        node = Node(
            step,
            tuple(nodes[each] for each in names),
            tuple(nodes[each] for each in getattr(step, "nested", ())),
            tuple(nodes[each] for each in uses),
        )
        if isinstance(step, st.Find):
            node = nodes[step.actor]
        elif isinstance(step, st.Call | st.Leave):
            (actor,) = node.uses
            node.late = actor.killed
            actor.calls.append(node)
        elif isinstance(step, st.Take):
            source = nodes[step.source]
            node.source, node.index = source, source.taken
            source.taken += 1
        elif isinstance(step, st.Task):
            for actor in node.uses:
                actor.shared = True
            nodes[f"{name}'"] = node
        nodes[name] = node
        return node

    def cancel(self, name: str, *, recursive: bool) -> None:
        node = self.nodes[name]
        node.cancelled = True
        node.recursive |= recursive

    def interrupt(self, name: str) -> None:
        self.nodes[name].interrupted = True

    def strike(self, name: str) -> None:
        node = self.nodes[name]
        if node.pooled:
            self.pool_strikes += 1
        else:
            node.strikes += 1

    def kill(self, name: str, *, restart: bool) -> None:
        node = self.nodes[name]
        if restart:
            node.revived += 1
        else:
            node.killed = True

    def drop(self, name: str) -> None:
        self.nodes[name].dropped = True

    # ---------------------------------------------------------------------------- what comes of it

    def endless(self, node: Node) -> bool:
        """Whether somebody has to do something before it ends."""
        step = node.step
        if isinstance(step, st.Task) and step.plan.endless and step.timeout is None:
            # The next attempt knows nothing of an interrupt.
            return not (node.cancelled or (node.interrupted and not self._strikes(node)))
        others = [*node.args, *node.nested, *node.uses]
        if node.source is not None:
            others.append(node.source)
        if isinstance(step, st.Call | st.Leave):
            (actor,) = node.uses
            others += actor.calls[: actor.calls.index(node)]
        return any(map(self.endless, others))

    def sleepers(self) -> list[str]:
        """The names of those that still have to be ended."""
        return [
            name
            for name, node in self.nodes.items()
            if not name.endswith("'")
            and getattr(getattr(node.step, "plan", None), "endless", False)
            and self.endless(node)
        ]

    def expected(self, name: str) -> Expected:
        node = self.nodes[name]
        found = self._of(node)
        if name.endswith("'") and found.value is not None:
            return Expected(Value(mix(found.value.number, 2), "large"), found.errors)
        return found

    def stream(self, node: Node, index: int) -> tuple[Expected, bool]:
        """What the ref of that index from a generator may come to, and whether it may be its
        end instead."""
        step = node.step
        assert isinstance(step, st.Generate)
        inputs = self._inputs(node, "args")
        numbers = _numbers(inputs)
        errors = self._errors(node, inputs)
        crash, possible = self._produced(node, step)
        certain = 1 if step.plan.late else 0
        errors |= crash
        there = numbers is not None and index < step.count and (possible or index < certain)
        value = None
        if there and numbers is not None:
            form = "large" if step.plan.shape == "large" else "number"
            value = Value(mix(step.plan.salt, *numbers, index), form)
        after = numbers is not None and possible and index >= step.count
        return Expected(value, errors), after or (index > 0 and bool(errors))

    def _of(self, node: Node) -> Expected:
        step = node.step
        match step:
            case st.Put():
                inner = tuple(self._of_ref(each, name) for each, name in self._held(node))
                form = "large" if step.large else "refs" if step.holds else "number"
                return Expected(Value(step.salt, form, inner))
            case st.Task():
                return self._task(node, step)
            case st.Generate():
                return self._dynamic(node, step)
            case st.Take():
                assert node.source is not None
                return self.stream(node.source, node.index)[0]
            case st.Call():
                return self._call(node, step)
            case st.Leave():
                return self._leave(node)
        raise AssertionError(f"{step} makes no ref")

    def _held(self, node: Node) -> list[tuple[Node, str]]:
        assert isinstance(node.step, st.Put)
        return list(zip(node.args, node.step.holds, strict=True))

    def _of_ref(self, node: Node, name: str) -> Expected:
        return self.expected(name) if name.endswith("'") else self._of(node)

    def _inputs(self, node: Node, which: str) -> list[Input]:
        nodes, names = getattr(node, which), getattr(node.step, which)
        return [taken(self._of_ref(each, name)) for each, name in zip(nodes, names, strict=True)]

    def _strikes(self, node: Node) -> int:
        return node.strikes + (self.pool_strikes if node.pooled else 0)

    @staticmethod
    def _errors(node: Node, inputs: Sequence[Input]) -> frozenset[str]:
        return node.stopped.union(*(each.errors for each in inputs))

    @staticmethod
    def _faults(plan: Plan, retries: int, strikes: int) -> tuple[frozenset[str], bool]:
        """The errors for what a plan does to itself, and others to its process; whether it may
        come to its value."""
        crashes = plan.fails if plan.fault in ("kill", "exit") else 0
        errors = set()
        possible = True
        if crashes + strikes > retries:
            errors.add("crashed")
            possible = crashes <= retries
        if plan.fault == "raise":
            errors.add(f"{st.PLANNED} {plan.salt}")
            possible = strikes >= plan.fails
        return frozenset(errors), possible

    def _task(self, node: Node, step: st.Task) -> Expected:
        inputs = self._inputs(node, "args")
        nested = self._inputs(node, "nested")
        strikes = self._strikes(node)
        calls = [
            taken(self._called(actor, Plan(step.plan.salt + 1), [], None))
            for actor in node.uses
            for _ in range(step.plan.calls)
        ]
        result = self._planned(step.plan, step.retries, strikes, [*inputs, *nested, *calls], nested)
        errors = result.errors | node.stopped
        value = result.value
        if step.plan.endless:
            value = None
            if step.timeout is not None:
                errors |= {"timeout"}
        if value is not None and node.recursive:
            # Its children are stopped, too, even if it is over.
            stopped = {"cancelled", "died"}
            inner = tuple(Expected(e.value, e.errors | stopped) for e in value.inner)
            value = Value(value.number, value.form, inner)
        return Expected(value, errors)

    def _planned(
        self,
        plan: Plan,
        retries: int,
        strikes: int,
        inputs: Sequence[Input],
        nested: Sequence[Input],
    ) -> Expected:
        errors, possible = self._faults(plan, retries, strikes)
        inputs = list(inputs)
        returned = []
        for child in plan.children:
            made = self._child(child, nested)
            if child.use in ("get", "wait"):
                inputs.append(taken(made))
            elif child.use == "return":
                returned.append(made)
        own = mix(plan.salt)
        inputs += [Input(mix(plan.salt + 2, own), frozenset())] * plan.own
        if plan.own:
            returned.append(Expected(Value(mix(1, own), "call")))
        errors = errors.union(*(each.errors for each in inputs))
        numbers = _numbers(inputs)
        if numbers is None or not possible:
            return Expected(None, errors)
        number = mix(plan.salt, *numbers)
        if plan.shape != "refs":
            return Expected(Value(number, "large" if plan.shape == "large" else "number"), errors)
        inner = (Expected(Value(mix(number, 1))), *returned)
        return Expected(Value(number, "refs", inner), errors)

    def _child(self, child: Child, nested: Sequence[Input]) -> Expected:
        passed = nested if child.passes else []
        strikes = 0 if child.gpus else self.pool_strikes
        return self._planned(child.plan, child.retries, strikes, passed, passed)

    def _produced(self, node: Node, step: st.Generate) -> tuple[frozenset[str], bool]:
        # A late fault comes after the first value, if there is one.
        plan = Plan(0) if step.plan.late and not step.count else step.plan
        return self._faults(plan, step.retries, self._strikes(node))

    def _dynamic(self, node: Node, step: st.Generate) -> Expected:
        inputs = self._inputs(node, "args")
        numbers = _numbers(inputs)
        plan = step.plan
        crash, possible = self._produced(node, step)
        raised = {error for error in crash if error.startswith(st.PLANNED)}
        errors = self._errors(node, inputs) | crash - raised
        if numbers is None or not (possible or raised):
            return Expected(None, errors)
        form = "large" if plan.shape == "large" else "number"
        values = [Value(mix(plan.salt, *numbers, index), form) for index in range(step.count)]
        inner = tuple(map(Expected, values))
        if not raised:
            return Expected(Value(0, "dynamic", inner), errors)
        # The values from before the error are there, and then the error.
        before, error = 1 if plan.late else 0, max(raised)
        if possible:
            return Expected(Value(0, "dynamic", inner, ends=(before, error)), errors)
        failed = (*inner[:before], Expected(None, frozenset(raised)))
        return Expected(Value(0, "dynamic", failed), errors)

    # -------------------------------------------------------------------------------------- actors

    def _call(self, node: Node, step: st.Call) -> Expected:
        (actor,) = node.uses
        args, nested = self._inputs(node, "args"), self._inputs(node, "nested")
        found = self._called(actor, step.plan, [*args, *nested], node, nested)
        return Expected(found.value, found.errors | self._errors(node, [*args, *nested]))

    def _leave(self, node: Node) -> Expected:
        return Expected(None, frozenset({"died", "unavailable"}) | node.stopped)

    def _called(
        self,
        actor: Node,
        plan: Plan,
        inputs: list[Input],
        node: Node | None,
        nested: Sequence[Input] = (),
    ) -> Expected:
        make = actor.step
        assert isinstance(make, st.Make)
        made = self._inputs(actor, "args")
        start = _numbers(made)
        errors: frozenset[str] = frozenset()
        if make.fails or start is None or any(each.errors for each in made):
            errors |= {"died"}
        left = any(isinstance(each.step, st.Leave) for each in actor.calls)
        if actor.killed or left:
            errors |= {"died"}
        others = actor.strikes + actor.revived
        crashes = sum(self._crashes(each, make.retries) for each in actor.calls)
        if deaths := others + crashes:
            lives = make.restarts == -1 or make.restarts >= deaths
            if not lives:
                errors |= {"died", "unavailable"}
            elif make.retries < deaths:
                # One that nobody has a handle to is not started again.
                errors |= {"died", "unavailable"} if actor.dropped else {"unavailable"}
        # What the plan does to its process was looked at just now.
        quiet = (
            plan if plan.fault == "raise" else Plan(plan.salt, plan.pause, children=plan.children)
        )
        begin = Input(None if start is None else mix(make.salt, *start), frozenset())
        strikes = deaths if plan.fault == "raise" else 0
        found = self._planned(quiet, MANY, strikes, [begin, *inputs], nested)
        errors |= found.errors
        crashing = plan.fault in ("kill", "exit") and plan.fails > make.retries and not others
        sure_end = make.fails or (node is not None and node.late) or crashing
        if found.value is None or sure_end:
            return Expected(None, errors)
        low, high = self._counts(actor, node, deaths)
        return Expected(Value(found.value.number, "call", (), low, high), errors)

    @staticmethod
    def _crashes(call: Node, retries: int) -> int:
        plan = getattr(call.step, "plan", None)
        if plan is None or plan.fault not in ("kill", "exit"):
            return 0
        return min(plan.fails, retries + 1)

    def _counts(self, actor: Node, node: Node | None, deaths: int) -> tuple[int, int]:
        make = actor.step
        assert isinstance(make, st.Make)
        if node is None or actor.shared or make.kind != "plain":
            return 1, MANY
        before = [
            each
            for each in actor.calls[: actor.calls.index(node)]
            if not isinstance(each.step, st.Leave)
        ]
        if deaths:
            return 1, 1 + len(before)
        sure = sum(self._runs(each) for each in before)
        return 1 + sure, 1 + len(before)

    def _runs(self, call: Node) -> bool:
        """Whether it is sure that the call begins."""
        if call.cancelled or call.interrupted or call.late:
            return False
        return all(not each.errors for each in self._inputs(call, "args"))
