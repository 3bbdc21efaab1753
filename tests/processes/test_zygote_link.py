"""What the kernel's end of the socket to a zygote knows of it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gpunb.processes.zygote_link import Link, parse_answer
from gpunb.protocol import plain


class Quiet:
    """A loop that watches nothing."""

    def watch(self, *_: Any) -> None:
        """Do nothing."""

    after = unwatch = watch


def test_a_zygote_is_known_to_be_gone_before_its_last_answers_are_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loop: Any = Quiet()
    link = Link(loop, lambda _: None, lambda _: None)
    assert not link.is_gone(), "it is not connected yet"
    link.connect(ours)
    theirs.send(plain.dumps(("pong",)))
    assert not link.is_gone()
    theirs.close()
    assert link.is_gone()
    link.close()
    assert link.is_gone()


@pytest.mark.parametrize(
    "answer",
    [
        ("loaded", ["numpy"], {"A": "1", "B": None}, "out", "err"),
        ("preloaded", {"numpy": None, "torch": "no"}, None, ""),
    ],
)
def test_answers_about_imports_are_valid_only_whole(answer: tuple[Any, ...]) -> None:
    parsed = parse_answer(plain.dumps(answer))
    assert parsed is not None
    assert list(parsed[1]) == list(answer[1])
    assert parse_answer(plain.dumps(answer[:-1])) is None
    assert parse_answer(plain.dumps((*answer[:-1], 3))) is None
    assert parse_answer(plain.dumps((answer[0], {3: "x"}, *answer[2:]))) is None
