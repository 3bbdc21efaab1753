"""The book of leases on a disk that fails."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from gpunb.leases import ledger_file
from gpunb.leases.ledger import Ledger


class FailingDisk:
    """The module `os` for the ledger, with so many writes that fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, *args: Any) -> int:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwrite(*args)


def test_lease_is_not_held_if_the_disk_is_full(tmp_path, monkeypatch):
    one = Ledger(tmp_path, ["GPU-0"], {})
    two = Ledger(tmp_path, ["GPU-0"], {})
    monkeypatch.setattr(ledger_file, "os", FailingDisk(1))
    with pytest.raises(OSError, match="Input/output"):
        one.take({"GPU-0": 10_000}, lasting=True, job="train")
    one.publish()
    assert two.take({"GPU-0": 10_000}, lasting=False, job="train")
    two.give({"GPU-0": 10_000}, lasting=False)
    two.publish()
    assert one.take({"GPU-0": 10_000}, lasting=False, job="train")
    two.close()
    one.close()
