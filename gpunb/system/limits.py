"""Explains errors of the system when descriptors, processes or memory run out."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from gpunb.exceptions import GpunbError

_NO_THREAD = "can't start new thread"


def is_scarce(error: OSError) -> bool:
    """Whether a system call failed because a resource ran out, so that it may work later."""
    return error.errno in _TEXTS


def explain(error: OSError) -> str:
    """Return a text that names the missing resource, its limit and how to raise the limit."""
    text = _TEXTS.get(error.errno or 0)
    if text is None:
        return error.strerror or str(error)
    return text.format(
        files=_limit(resource.RLIMIT_NOFILE), processes=_limit(resource.RLIMIT_NPROC)
    )


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise a GpunbError that begins with `what` if a resource runs out in the block."""
    try:
        yield
    except OSError as error:
        if not is_scarce(error):
            raise
        raise GpunbError(f"{what}: {explain(error)}") from error
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        raise GpunbError(f"{what}: {explain(OSError(errno.EAGAIN, ''))}") from error


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


_TEXTS = {
    errno.EMFILE: (
        "no file descriptor is left: this process may have {files} open (`ulimit -n`). Close some "
        "files, or raise the limit with `ulimit -n NUMBER` before the kernel starts"
    ),
    errno.ENFILE: (
        "the machine has no file descriptor left (`sysctl fs.file-max`): end programs that have "
        "many files open"
    ),
    errno.EAGAIN: (
        "no more processes can be started: this user may have {processes} processes and threads "
        "(`ulimit -u`), and a container or batch job may have fewer (pids.max of its cgroup). End "
        "some, or raise the limit"
    ),
    errno.ENOMEM: "the machine has no memory left for it (`free -h`): end programs that use much",
}
_TEXTS[errno.ETOOMANYREFS] = _TEXTS[errno.EMFILE]
