"""The suite for plug-ins passes a small right one, and fails each wrong one."""

import os

import pytest

from gpunb.accelerators import Accelerator, DetectionError, Process, Usage
from gpunb.accelerators.testing import AcceleratorSuite
from gpunb.scheduler.resources import Device


class Example(Accelerator):
    """A whole plug-in: what a new vendor takes."""

    name = "example"
    variable = "EXAMPLE_VISIBLE_DEVICES"

    def devices(self):
        return [self.device(0), self.device(1)]

    def device(self, number, **changes):
        plain = {"key": f"example:{number}", "id": number, "name": "E1", "vendor": "example"}
        return Device(**(plain | changes))


class TestExample(AcceleratorSuite):
    def make(self):
        return Example()


class TestFailing(AcceleratorSuite):
    def make(self):
        return Failing()


class TestExtremes(AcceleratorSuite):
    """Readings that are at their limits, and right."""

    def make(self):
        return Extreme()


class Extreme(Example):
    variable = None
    notes = ("device 2 is left out",)

    def devices(self):
        return [self.device(0, memory=1, type="E"), self.device("GPU-1", key="GPU-1")]

    def usage(self, devices):
        full = Usage(1, 1, 100, 0, (Process(1, 0), Process(2, None)))
        idle = Usage(0, 1, 0, -5, ())
        known = {"example:0": full, "GPU-1": idle}
        return {device.key: known.get(device.key, Usage()) for device in devices}


class Failing(Example):
    def devices(self):
        raise DetectionError("the driver does not answer: restart it")


def listing(*devices):
    return {"devices": lambda self: list(devices)}


def using(**readings):
    def usage(self, devices):
        return {device.key: Usage(**readings) for device in devices}

    return {"usage": usage}


def ailing(answer):
    return {"health": lambda self, devices: {device.key: answer for device in devices}}


def written(ids):
    return {"EXAMPLE_VISIBLE_DEVICES": ",".join(f"e:{id}" for id in ids) or "none"}


def pinning(function):
    return {"environment": lambda self, ids: function(ids)}


def changing_the_environment(ids):
    os.environ["EXAMPLE_VISIBLE_DEVICES"] = "0"
    return {"EXAMPLE_VISIBLE_DEVICES": ",".join(map(str, ids)) or "none"}


SHARED = {"EXAMPLE_VISIBLE_DEVICES": "0"}
A = Example().device
LISTS = iter(range(1_000_000))


@pytest.mark.parametrize(
    ("members", "test"),
    [
        ({"name": "Two Words"}, "it_has_a_name_a_resource_and_a_variable"),
        ({"resource": ""}, "it_has_a_name_a_resource_and_a_variable"),
        ({"variable": "lower=case"}, "it_has_a_name_a_resource_and_a_variable"),
        ({"whole": "yes"}, "its_rules_make_sense"),
        ({"counts": (2, 1)}, "its_rules_make_sense"),
        ({"counts": (0, 1)}, "its_rules_make_sense"),
        ({"counts": (1, 1)}, "its_rules_make_sense"),
        ({"__init__": lambda self, x=None, *, y: None}, "it_is_made_without_arguments"),
        (listing("GPU 0"), "its_devices_are_complete"),
        (listing(A(0, vendor="other")), "its_devices_are_complete"),
        (listing(A(0, key="")), "its_devices_are_complete"),
        (listing(A(0, name="")), "its_devices_are_complete"),
        (listing(A(0, type="")), "its_devices_are_complete"),
        (listing(A(0, id=1.0)), "its_devices_are_complete"),
        (listing(A(0, id=-1)), "its_devices_are_complete"),
        (listing(A(0, memory=0)), "its_devices_are_complete"),
        (listing(A(0, memory=1.5)), "its_devices_are_complete"),
        (listing(A(0, capability="")), "its_devices_are_complete"),
        (listing(A(0, pin="")), "its_devices_are_complete"),
        (listing(A(0, resource="TPU")), "its_devices_are_complete"),
        (listing(A(0), A(1, key="example:0")), "no_two_devices_are_the_same"),
        (listing(A(0), A(1, id=0)), "no_two_devices_are_the_same"),
        ({"devices": lambda self: [self.device(next(LISTS))]}, "listing_again_gives_the_same"),
        (listing(), "no_devices_have_a_reason"),
        ({"notes": "one text"}, "no_devices_have_a_reason"),
        ({"notes": ("",)}, "no_devices_have_a_reason"),
        ({"notes": (None,)}, "no_devices_have_a_reason"),
        (pinning(lambda ids: {}), "pinning_names_the_ids_in_order"),
        (pinning(lambda ids: SHARED), "pinning_names_the_ids_in_order"),
        (
            pinning(lambda ids: {"EXAMPLE_VISIBLE_DEVICES": ",".join(sorted(map(str, ids)))}),
            "pinning_names_the_ids_in_order",
        ),
        (pinning(lambda ids: {"EXAMPLE_VISIBLE_DEVICES": 0}), "pinning_names_the_ids_in_order"),
        (pinning(written), "the_variable_can_be_read_again"),
        (pinning(lambda ids: {}), "pinning_to_nothing_hides_every_device"),
        (pinning(lambda ids: SHARED), "pinning_to_nothing_hides_every_device"),
        (pinning(lambda ids: SHARED), "pinning_changes_nothing_here"),
        (pinning(changing_the_environment), "pinning_changes_nothing_here"),
        ({"usage": lambda self, devices: {}}, "use_is_told_for_just_the_devices_asked_for"),
        (using(memory_used=1.5), "use_is_told_for_just_the_devices_asked_for"),
        (using(memory_used=2, memory_total=1), "use_is_told_for_just_the_devices_asked_for"),
        (using(memory_total=0), "use_is_told_for_just_the_devices_asked_for"),
        (using(utilization=101), "use_is_told_for_just_the_devices_asked_for"),
        (using(temperature="N/A"), "use_is_told_for_just_the_devices_asked_for"),
        (using(processes=[Process(0, 1)]), "use_is_told_for_just_the_devices_asked_for"),
        (using(processes=[Process(1, -1)]), "use_is_told_for_just_the_devices_asked_for"),
        (using(temperature=30), "use_of_a_device_that_is_gone_is_unknown"),
        ({"usage": lambda self, devices: {}}, "polling_gives_the_same_kind_of_answer"),
        ({"health": lambda self, devices: {}}, "health_is_told_for_just_the_devices_asked_for"),
        (ailing(""), "health_is_told_for_just_the_devices_asked_for"),
        (ailing(False), "health_is_told_for_just_the_devices_asked_for"),
    ],
)
def test_the_suite_fails_a_wrong_plug_in(members, test, monkeypatch):
    monkeypatch.setenv("EXAMPLE_VISIBLE_DEVICES", "before")
    suite = AcceleratorSuite()
    wrong = type("Wrong", (Example,), members)
    suite.make = lambda: wrong(y=0) if "__init__" in members else wrong()
    with pytest.raises((AssertionError, TypeError)):
        getattr(suite, f"test_{test}")()


def test_the_suite_fails_an_error_without_a_reason():
    def devices(self):
        raise DetectionError(" ")

    suite = AcceleratorSuite()
    suite.make = type("Silent", (Example,), {"devices": devices})
    with pytest.raises(AssertionError, match="says why"):
        suite.test_listing_again_gives_the_same()


def test_the_suite_wants_a_plug_in():
    with pytest.raises(NotImplementedError, match="define make"):
        AcceleratorSuite().test_it_is_made_without_arguments()
