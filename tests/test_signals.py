"""What an interrupt must not cut in two."""

import signal
import threading
import time

import pytest

from gpunb import signals
from gpunb.signals import UNDIVIDED, interrupt_later
from tests.stepping import every_step


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


def test_many_interrupts_are_one():
    def block():
        with UNDIVIDED:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        block()
    with UNDIVIDED:
        pass


def test_the_handler_is_the_callers_own():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with UNDIVIDED:
        signal.raise_signal(signal.SIGINT)
        assert not seen
    assert seen == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(handler):
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


def test_other_threads_leave_signals_alone():
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
    interrupt_later()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)


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
