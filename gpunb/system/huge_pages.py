"""Puts the memory of a process that will be forked into huge pages.

A fork copies an entry for each page that a process has written, and the end of the child takes
each entry apart again. A huge page has one entry in place of 512. What a child writes to is copied
in small pages, as before. Linux does this at once since 6.1 (`MADV_COLLAPSE`); where it cannot, or
where huge pages are switched off, nothing happens.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from gpunb.system import linux

_SETTINGS = "/sys/kernel/mm/transparent_hugepage/"

_OWN = 1 << 63 | 1 << 56
"""Bits of an entry of the page map: the page is in memory, and no other process has it."""

_ENOUGH = 0.9
"""The share of its pages that a range must have in memory: the others are added."""


def collapse(longest: float) -> int:
    """Put into huge pages what is nearly full and belongs to this process alone. Pages that it
    shares with a parent or a child stay shared.

    Args:
        longest: seconds after which no other range is begun. Where memory is fragmented each takes
            some milliseconds.

    Returns:
        the number of huge pages that were made.
    """
    made, deadline = 0, time.monotonic() + longest
    try:
        size = _size()
        for start in _nearly_full(size) if size else ():
            try:
                linux.madvise(start, size, linux.MADV_COLLAPSE)
                made += 1
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    break  # the system has no huge page left, or does not know the request
            if time.monotonic() > deadline:
                break
    except OSError:  # a system without these files
        pass
    return made


def _size() -> int:
    """Return the size of a huge page in bytes; 0 if the administrator wants none."""
    with open(_SETTINGS + "enabled") as enabled, open(_SETTINGS + "hpage_pmd_size") as size:
        return 0 if "[never]" in enabled.read() else int(size.read())


def _nearly_full(size: int) -> list[int]:
    """Return the addresses of the ranges that can become huge pages and are nearly full."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = size // page
    found = []
    with open("/proc/self/pagemap", "rb", buffering=0) as page_map:
        for first, end in _anonymous():
            for start in range(-(-first // size) * size, end - size + 1, size):
                page_map.seek(start // page * 8)
                entries = memoryview(page_map.read(pages * 8)).cast("Q")
                if sum(each & _OWN == _OWN for each in entries) >= _ENOUGH * pages:
                    found.append(start)
    return found


def _anonymous() -> Iterator[tuple[int, int]]:
    """Yield where the mappings of this process begin and end that it may write to and that are of
    no file."""
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        addresses, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, end = addresses.split("-")
            yield int(first, 16), int(end, 16)
