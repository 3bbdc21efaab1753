"""Messages whose values have very many containers inside each other."""

from __future__ import annotations

from gpunb.protocol import messages as msg
from gpunb.protocol.plain import framed

_LISTS = b"]" * 20_000 + b"a" * 19_999
_TUPLES = b")" + b"\x85" * 2_000_000

DEEP = {
    # The text of such a list cannot be made.
    "deep lists": framed(b"\x80\x05K%c%b\x85\x86." % (msg.NUMBER[msg.Used], _LISTS)),
    # The hash of such a key needs more stack than a thread has.
    "a deep key": framed(b"\x80\x05K%c}%bK\x01s\x86." % (msg.NUMBER[msg.Used], _TUPLES)),
}
