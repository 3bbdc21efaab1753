"""Messages that are checked when they arrive."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.protocol import messages as msg
from gpunb.protocol.plain import Malformed
from tests.protocol.test_plain import values

GOOD = [
    msg.Ready(1),
    msg.Done(1, 2, "ok", ()),
    msg.Yielded(1, 2, 0, ((b"", (), (), ()), 0)),
    msg.Printed(1, "stdout", "text"),
    msg.Request(1, 2, 3, "put", ()),
    msg.Held((1, 0), -1),
    msg.Shown(1, "display_data", {"data": {}}),
    msg.Stock((((1, 0), 2),)),
    msg.Used(((0, 1, 2),)),
    msg.Prepare({"CUDA_VISIBLE_DEVICES": "0", "CUDA_CACHE_PATH": None}, "nvidia"),
    msg.Prepared("no context"),
    msg.Park("nvidia", back=True),
    msg.ParkReply("", back=False),
    msg.Imported(("json", "json.decoder"), (("A", "1"), ("B", None))),
    msg.Reply(1, None),
    msg.CommMessage("comm_msg", {}),
    msg.Rehearse(),
    msg.Permits(),
    msg.Retired(),
    msg.Output(1, "text", {}),
    msg.ExecuteAhead(7, ((1, 1, "f"), (2, 1, "f"))),
    msg.Execute(1, 1, "f", "call", None, "f", None, ((), 0), (), (), 1, False, False),
]


def test_every_kind_of_message_has_an_example_here():
    assert {type(each) for each in GOOD} == set(typing.get_args(msg.Message))


@pytest.mark.parametrize("message", GOOD)
def test_a_good_message_arrives(message):
    assert msg.checked(msg.pack(message)) == message


@pytest.mark.parametrize(
    "packed",
    [
        None,
        (),
        [3, 1, 2, "ok", ()],
        (99,),
        (-1,),
        ("Done", 1, 2, "ok", ()),
        (msg.NUMBER[msg.Ready],),
        (msg.NUMBER[msg.Ready], "1"),
        (msg.NUMBER[msg.Ready], 1, 2),
        (msg.NUMBER[msg.Done], 1, 2, "perhaps", ()),
        (msg.NUMBER[msg.Printed], 1, "stdin", "text"),
        (msg.NUMBER[msg.Held], (1, "0"), 1),
        (msg.NUMBER[msg.Held], (1, 0, 0), 1),
        (msg.NUMBER[msg.Held], None, 1),
        (msg.NUMBER[msg.Shown], 1, "display_data", None, ()),
        (
            msg.NUMBER[msg.Execute],
            1,
            1,
            "f",
            "call",
            5,
            "f",
            None,
            (),
            (),
            (),
            1,
            True,
            True,
            None,
        ),
        (msg.NUMBER[msg.Stock], (((1, 0), "2"),)),
        (msg.NUMBER[msg.Stock], (5,)),
        (msg.NUMBER[msg.Stock], ((5, 1),)),
        (msg.NUMBER[msg.Yielded], 1, 2, -1, ()),
    ],
)
def test_a_bad_message_is_malformed(packed):
    with pytest.raises(Malformed):
        msg.checked(packed)


@given(st.sampled_from(range(len(msg._TYPES))), st.lists(values, max_size=8))
def test_any_fields_are_a_message_or_malformed(number, fields):
    try:
        msg.checked((number, *fields))
    except Malformed:
        pass
