"""What a worker is sent with a task."""

from __future__ import annotations

import loky

import gpunb
from gpunb.processes.outbox import Outbox
from gpunb.protocol import messages as msg
from tests.waiting import Gate, eventually


@gpunb.remote
def enter(gate, name):
    gate.enter(name)


def test_workers_may_spin_only_while_there_is_a_cpu_for_each_process(start, monkeypatch, tmp_path):
    send, spins = Outbox.send, []

    def noting(outbox, message, *segments):
        if isinstance(message, msg.Execute):
            spins.append(message.spin)
        send(outbox, message, *segments)

    monkeypatch.setattr(Outbox, "send", noting)
    monkeypatch.setattr(loky, "cpu_count", lambda: 3)
    start(num_cpus=3)
    gate = Gate(tmp_path)
    refs = [enter.remote(gate, name) for name in range(3)]
    eventually(lambda: all(map(gate.came, range(3))))
    gate.open()
    gpunb.get(refs)
    assert spins == [True, True, False]
