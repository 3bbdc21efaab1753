"""The functions and classes for users. `gpunb` exports the public names."""

from __future__ import annotations

from gpunb.protocol import backend


def _start() -> backend.Backend:
    from gpunb.api import session

    return session.start_with_defaults()


backend.start_with(_start)
