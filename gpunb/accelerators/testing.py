"""The tests that every accelerator plug-in should pass, with or without the hardware.

Subclass `AcceleratorSuite` in a test file and define `make`; pytest does the rest:

    from gpunb.accelerators.testing import AcceleratorSuite

    class TestMine(AcceleratorSuite):
        def make(self):
            return Mine()

The suite must pass on a machine with such devices and on one without. Where a stand-in can replace
the vendor's library, run the suite with the stand-in too.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping, Sequence

from gpunb.accelerators.base import Accelerator, DetectionError, Process, Usage
from gpunb.scheduler.resources import GPU, Device

_MISSING = Device(key="no such key", id=99, name="a device that is not here")


class AcceleratorSuite:
    """Tests of one plug-in. pytest collects the subclasses whose names begin with ``Test``."""

    def make(self) -> Accelerator:
        """A new object of the plug-in."""
        raise NotImplementedError("define make() to return the plug-in under test")

    def listed(self) -> list[Device]:
        """The devices of the plug-in; none after a DetectionError, which must have a text."""
        try:
            return list(self.make().devices())
        except DetectionError as error:
            reason = str(error)
        assert reason.strip(), "a DetectionError says why, and what to do"
        return []

    def test_it_has_a_name_a_resource_and_a_variable(self) -> None:
        plugin = self.make()
        assert re.fullmatch(r"[a-z][a-z0-9_-]*", plugin.name), f"a short name, not {plugin.name!r}"
        assert plugin.resource, "the resource that the devices count as, such as 'GPU'"
        assert plugin.variable is None or re.fullmatch(r"[A-Z][A-Z0-9_]*", plugin.variable), (
            f"variable is an environment variable or None, not {plugin.variable!r}"
        )

    def test_its_rules_make_sense(self) -> None:
        plugin = self.make()
        assert type(plugin.whole) is bool, "whole says whether devices have no parts"
        counts = list(plugin.counts)
        assert all(type(each) is int and each > 0 for each in counts), f"{counts}: numbers from 1"
        assert counts == sorted(set(counts)), f"{counts}: ascending, each once"

    def test_it_is_made_without_arguments(self) -> None:
        assert isinstance(type(self.make())(), Accelerator)

    def test_its_devices_are_complete(self) -> None:
        plugin = self.make()
        for device in self.listed():
            assert isinstance(device, Device), f"{device!r} is no Device"
            assert device.vendor == plugin.name, f"{device}: vendor is the plug-in's name"
            assert device.key, f"{device}: key is a stable identity"
            assert type(device.id) in (int, str), f"{device}: id is an int, or a str for a UUID"
            assert isinstance(device.id, str) or device.id >= 0, f"{device}: id counts from 0"
            assert device.name, f"{device}: name is what a user knows the device by"
            assert device.type is None or device.type, f"{device}: type is None if unknown"
            assert device.memory is None or (type(device.memory) is int and device.memory > 0), (
                f"{device}: memory is a number of bytes, or None if unknown"
            )
            assert device.capability is None or device.capability, f"{device}: None if unknown"
            assert device.pin is None or device.pin, f"{device}: pin is None if the id will do"
            assert device.resource in {GPU, plugin.resource}, f"{device}: as the plug-in says"
            assert pickle.loads(pickle.dumps(device)) == device

    def test_no_two_devices_are_the_same(self) -> None:
        devices = self.listed()
        assert len({device.key for device in devices}) == len(devices), "keys differ"
        assert len({device.id for device in devices}) == len(devices), "ids differ"

    def test_listing_again_gives_the_same(self) -> None:
        assert self.listed() == self.listed()

    def test_no_devices_have_a_reason(self) -> None:
        plugin = self.make()
        try:
            devices = plugin.devices()
        except DetectionError:
            return
        assert not isinstance(plugin.notes, str), "notes are a list or tuple of texts"
        assert all(isinstance(note, str) and note for note in plugin.notes), "notes are texts"
        assert devices or plugin.notes, "without devices, notes say why"

    def test_pinning_names_the_ids_in_order(self) -> None:
        plugin = self.make()
        for ids in ([0], [1, 3], [3, 1], ["GPU-1a", "GPU-2b"]):
            environment = _checked(plugin.environment(ids))
            if plugin.variable is not None:
                value = environment.get(plugin.variable, "")
                places = [value.find(str(id)) for id in ids]
                assert -1 not in places, f"{plugin.variable}={value!r} should name {ids}"
                assert places == sorted(places), f"{plugin.variable}={value!r}: not as in {ids}"

    def test_the_variable_can_be_read_again(self) -> None:
        plugin = self.make()
        for ids in ([0], [1, 3]):
            value = plugin.environment(ids).get(plugin.variable or "")
            if value is not None:
                read = plugin.ids_in(value)
                assert read == ",".join(map(str, ids)), f"ids_in({value!r}) is {read!r}, not {ids}"

    def test_pinning_to_nothing_hides_every_device(self) -> None:
        plugin = self.make()
        environment = _checked(plugin.environment([]))
        if plugin.variable is not None:
            value = environment.get(plugin.variable)
            assert value is not None, f"{plugin.variable} has to be set: unset, it shows all"
            for device in self.listed():
                assert value != plugin.environment([device.id]).get(plugin.variable), (
                    f"{plugin.variable}={value!r} shows the device {device.id}"
                )

    def test_pinning_changes_nothing_here(self) -> None:
        plugin = self.make()
        before = dict(os.environ)
        first = plugin.environment([0])
        first["CHANGED"] = "by the caller"
        assert "CHANGED" not in plugin.environment([0]), "each call returns a new dict"
        assert dict(os.environ) == before, "environment() returns variables and sets none"

    def test_use_is_told_for_just_the_devices_asked_for(self) -> None:
        plugin = self.make()
        devices = self.listed()
        for asked in ([], devices[:1], devices, [*devices, _MISSING]):
            usage = plugin.usage(asked)
            assert set(usage) == {device.key for device in asked}
            for key, each in usage.items():
                _check_usage(key, each)

    def test_use_of_a_device_that_is_gone_is_unknown(self) -> None:
        assert self.make().usage([_MISSING]) == {_MISSING.key: Usage()}

    def test_health_is_told_for_just_the_devices_asked_for(self) -> None:
        plugin = self.make()
        devices = self.listed()
        for asked in ([], devices[:1], devices, [*devices, _MISSING]):
            health = plugin.health(asked)
            assert set(health) == {device.key for device in asked}
            for key, text in health.items():
                assert text is None or (isinstance(text, str) and text.strip()), (
                    f"{key}: health is {text!r}: a text that says what is wrong, or None"
                )

    def test_polling_gives_the_same_kind_of_answer(self) -> None:
        plugin = self.make()
        devices = self.listed()
        with plugin.polling():
            for _ in range(2):
                assert set(plugin.usage(devices)) == {device.key for device in devices}


def _checked(environment: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in environment.items():
        assert isinstance(name, str), f"the variable {name!r} is no text"
        assert isinstance(value, str), f"the value {value!r} of {name} is no text"
        assert name, "a variable has a name"
        assert "=" not in name, f"the name {name!r} holds an ="
        assert "\0" not in name + value, f"{name}={value!r} holds a zero byte"
    return environment


def _check_usage(key: str, usage: Usage) -> None:
    assert isinstance(usage, Usage), f"{key}: {usage!r} is no Usage"
    for name in ("memory_used", "memory_total", "utilization", "temperature", "power"):
        value = getattr(usage, name)
        assert value is None or type(value) is int, f"{key}: {name}={value!r}: an int or None"
    used, total = usage.memory_used, usage.memory_total
    assert used is None or used >= 0, f"{key}: memory_used={used}"
    assert total is None or total > 0, f"{key}: memory_total={total}: None if unknown"
    assert used is None or total is None or used <= total, f"{key}: {used} of {total} bytes used"
    busy = usage.utilization
    assert busy is None or 0 <= busy <= 100, f"{key}: utilization={busy} is no percentage"
    _check_processes(key, usage.processes)


def _check_processes(key: str, processes: Sequence[Process] | None) -> None:
    for pid, memory in processes or ():
        assert type(pid) is int, f"{key}: the pid {pid!r} is no int"
        assert pid > 0, f"{key}: the pid {pid} is not positive"
        assert memory is None or (type(memory) is int and memory >= 0), (
            f"{key}: process {pid} has {memory!r} bytes: an int, or None if unknown"
        )
