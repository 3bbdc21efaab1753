"""Blocks that an interrupt must not divide."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from gpunb.system import signals
from gpunb.system.signals import HEARTBEAT, UNDIVIDED, Divisible, interrupt_later, wait_for_gate
from tests.sessions import script
from tests.stepping import every_step
from tests.waiting import PATIENCE, until_main_sleeps


@pytest.fixture(autouse=True)
def _own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_after_the_block():
    done = []

    def block():
        with UNDIVIDED:
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_after_the_outermost_block():
    done = []

    def block():
        with UNDIVIDED:
            with UNDIVIDED:
                signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["whole"]


def test_many_interrupts_in_a_block_are_raised_once():
    def block():
        with UNDIVIDED:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        block()
    with UNDIVIDED:
        pass


def test_handler_after_the_block_is_the_callers_own():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with UNDIVIDED:
        signal.raise_signal(signal.SIGINT)
        assert not seen
    assert seen == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signal_that_python_does_not_handle_is_left_alone(handler):
    signal.signal(signal.SIGINT, handler)
    with UNDIVIDED:
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_the_block_is_the_context_of_the_interrupt():
    def block():
        with UNDIVIDED:
            signal.raise_signal(signal.SIGINT)
            raise LookupError

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, LookupError)


def test_block_in_another_thread_leaves_signals_alone():
    handlers = []

    def look():
        with UNDIVIDED:
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    with UNDIVIDED:
        thread.start()
        thread.join()
        own = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert own is not signal.default_int_handler
    assert handlers == [own, signal.default_int_handler]


def test_an_interrupt_comes_again_after_a_destructor():
    def wait():
        interrupt_later()
        time.sleep(PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        wait()


def test_an_interrupt_between_any_two_steps_is_raised_once_and_no_later():
    for steps in every_step(lambda: signal.raise_signal(signal.SIGINT), signals):
        body, raised = [], False
        try:
            with steps.counted(), UNDIVIDED, UNDIVIDED:
                body.append("begun")
                body.append("ended")
        except KeyboardInterrupt:
            raised = True
        assert raised == (steps.left == 0)
        assert body in ([], ["begun", "ended"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with UNDIVIDED:  # and none is left over
            body.clear()


def test_a_destructor_just_after_the_handler_is_back_loses_no_interrupt(monkeypatch):
    """Garbage may be collected there, and destructors have blocks of their own."""
    restored = []

    def set_handler(number, handler):
        signal.signal(number, handler)
        if handler is signal.default_int_handler and not restored:
            restored.append(number)
            with UNDIVIDED:
                pass

    names = {"SIGINT": signal.SIGINT, "getsignal": signal.getsignal, "signal": set_handler}
    monkeypatch.setattr(signals, "_signal", SimpleNamespace(**names))
    with pytest.raises(KeyboardInterrupt), UNDIVIDED:
        signal.raise_signal(signal.SIGINT)
    assert restored
    with UNDIVIDED:  # and none is left over
        pass


def test_two_interrupts_at_the_end_of_a_block_are_raised_once(monkeypatch):
    def set_handler(number, handler):
        signal.signal(number, handler)
        if handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)

    names = {"SIGINT": signal.SIGINT, "getsignal": signal.getsignal, "signal": set_handler}
    monkeypatch.setattr(signals, "_signal", SimpleNamespace(**names))
    with pytest.raises(KeyboardInterrupt), UNDIVIDED:
        signal.raise_signal(signal.SIGINT)
    monkeypatch.undo()
    with UNDIVIDED:
        pass


def test_an_interrupt_comes_at_once_in_a_divisible_part():
    done = []

    def block():
        with UNDIVIDED:
            try:
                with Divisible():
                    signal.raise_signal(signal.SIGINT)
                    done.append("not reached")
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("undone")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["undone"]


def test_an_interrupt_from_before_comes_where_the_divisible_part_begins():
    done = []

    def block():
        with UNDIVIDED:
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
            with Divisible():
                done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["whole"]


def test_only_the_innermost_block_is_divisible():
    done = []

    def block():
        with UNDIVIDED:
            with UNDIVIDED, Divisible():
                signal.raise_signal(signal.SIGINT)
                done.append("whole")
            with Divisible(), UNDIVIDED:
                done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["whole"]


def test_a_handler_that_raises_nothing_leaves_the_part_divisible():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(frame is not None))
    with UNDIVIDED, Divisible():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert seen == [True, True]


def test_an_interrupt_between_any_two_steps_of_a_divisible_part_leaves_the_block_whole():
    for steps in every_step(lambda: signal.raise_signal(signal.SIGINT), signals):
        done, raised = [], False
        try:
            with steps.counted(), UNDIVIDED:
                try:
                    with Divisible(), UNDIVIDED, Divisible():
                        done.append("begun")
                finally:
                    done.append("ended")
        except KeyboardInterrupt:
            raised = True
        assert raised == (steps.left == 0)
        assert not done or done[-1] == "ended"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with UNDIVIDED:  # and none is left over
            pass


class _Owner:
    """Owns a resource."""

    def __init__(self, gone):
        self.gone = gone

    @signals.whole
    def __del__(self):
        gone, self.gone = self.gone, None
        if gone is not None:
            gone.append("gone")


def _interrupted_while(let_go):
    """Interrupt the release of an owner at each of its steps, and wait for the interrupt."""
    for steps in every_step(lambda: signal.raise_signal(signal.SIGINT), signals):
        gone, raised = [], False
        owner = [_Owner(gone)]
        try:
            with steps.counted():
                let_go(owner)
            if steps.left <= 0:
                time.sleep(PATIENCE)
        except KeyboardInterrupt:
            raised = True
        yield raised, steps, gone


def test_an_interrupt_in_a_destructor_comes_a_moment_later():
    script_ = """
        import signal, sys, _thread, time
        from gpunb.system import signals
        from tests.stepping import every_step
        from tests.system.test_signals import _Owner, _interrupted_while
        from tests.waiting import PATIENCE, until_main_sleeps

        signals.watch_destructors()
        signals.watch_destructors()
        for raised, steps, gone in _interrupted_while(list.clear):
            assert raised == (steps.left <= 0), steps.left
            assert gone == ["gone"], gone
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        class Late:
            __slots__ = ("__del__",)  # a destructor without a step of Python's

        # The signal is there when the destructor begins, where nothing in it could catch it.
        gone = []
        owner, late = _Owner(gone), Late()
        late.__del__ = _thread.interrupt_main
        try:
            del late, owner
            time.sleep(PATIENCE)
            print("lost")
        except KeyboardInterrupt:
            print("raised", gone)
    """
    done = script(script_)
    assert (done.stdout, done.stderr) == ("raised ['gone']\n", "")


def test_other_errors_that_python_drops_are_shown_as_before():
    script_ = """
        from gpunb.system import signals
        from tests.system.test_signals import _Owner

        signals.watch_destructors()
        owner = _Owner(1)  # which has no append()
        del owner
    """
    assert "AttributeError: 'int' object has no attribute 'append'" in script(script_).stderr


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_wait_for_a_gate_sees_an_interrupt_that_does_not_wake_it(timeout):
    def interrupt():
        until_main_sleeps()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait_for_gate(_closed_gate(), timeout)
    thread.join()


@pytest.mark.parametrize("timeout", [0, -1, 0.5 * HEARTBEAT, 1.5 * HEARTBEAT])
@pytest.mark.parametrize("in_main", [True, False])
def test_a_wait_for_a_gate_ends_after_its_timeout(timeout, in_main):
    waited = []

    def wait():
        begin = time.monotonic()
        waited.append((wait_for_gate(_closed_gate(), timeout), time.monotonic() - begin))

    if in_main:
        wait()
    else:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    [(opened, seconds)] = waited
    assert not opened
    assert seconds >= timeout


@pytest.mark.parametrize("timeout", [None, float("inf"), PATIENCE])
def test_a_wait_for_a_gate_ends_when_it_opens(timeout):
    gate = _closed_gate()
    threading.Timer(1.5 * HEARTBEAT, gate.release).start()
    assert wait_for_gate(gate, timeout)
