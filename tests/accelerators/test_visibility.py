import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.accelerators import declared, parse_simulate, take, visible
from gpunb.accelerators.simulated import logical
from gpunb.scheduler.resources import UNIT, Device

UUIDS = ["GPU-1a2b3c4d-0", "GPU-1a2bffff-1", "GPU-9fb42d6f-2", "GPU-00000000-3"]
MACHINE = tuple(
    Device(key=uuid, id=id, name="Tesla T4", type="T4", memory=2**34, vendor="nvidia")
    for id, uuid in enumerate(UUIDS)
)


def ids(value, devices=MACHINE):
    return [device.id for device in visible(devices, value)[0]]


def keys(value, devices=MACHINE):
    return [device.key for device in visible(devices, value)[0]]


def notes(value, devices=MACHINE):
    return visible(devices, value)[1]


# ------------------------------------------------------------------ the machine has devices


def test_a_variable_that_is_not_set_shows_all_devices():
    assert visible(MACHINE, None) == (MACHINE, ())
    assert visible((), None) == ((), ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1,3", [1, 3]),
        ("3,1", [3, 1]),
        (" 1 , 3 ", [1, 3]),
        ("0,", [0]),
        ("01", [1]),
        ("0,1,2,3", [0, 1, 2, 3]),
    ],
)
def test_indices_keep_their_ids_and_order(value, expected):
    assert ids(value) == expected
    assert keys(value) == [UUIDS[id] for id in expected]
    assert notes(value) == ()


@pytest.mark.parametrize("value", ["", " ", ",", "NoDevFiles", "-1", "-1,0", "-2"])
@pytest.mark.parametrize("devices", [MACHINE, ()])
def test_all_devices_can_be_hidden(value, devices):
    assert ids(value, devices) == []
    (note,) = notes(value, devices)
    assert note.startswith(f"CUDA_VISIBLE_DEVICES={value!r} hides all devices: ")


@pytest.mark.parametrize(
    ("value", "expected", "words"),
    [
        ("0,2,-1,1", [0, 2], "'-1' ends the list; ignored from there on: -1, 1"),
        ("1,9,2", [1], "'9' is not the index of a device: this machine has 4 devices, from 0"),
        ("9", [], "'9' is not the index"),
        ("0,,1", [0], "'' is neither an index nor a UUID"),
        ("0,all", [0], "'all' is neither"),
        ("1gpu2,2", [], "'1gpu2' is neither"),
        ("+1", [], "'+1' is neither"),
        ("\N{ARABIC-INDIC DIGIT ONE}", [], "is neither"),
        ("1" * 5000, [], "is neither"),
        ("0,GPU-9f", [0], "'GPU-9f' is no index, and the first entry is one"),
        ("GPU-9f,0", ["GPU-9f"], "'0' is no GPU UUID, and the first entry is one"),
        ("MIG-x,GPU-9f", ["MIG-x"], "'GPU-9f' is no MIG id"),
        ("GPU-9f,GPU-77", ["GPU-9f"], "'GPU-77' is the UUID of no device here"),
        ("GPU-9f,GPU-1a2b,0", ["GPU-9f"], "'GPU-1a2b' fits more than one device"),
    ],
)
def test_the_list_ends_at_its_first_invalid_entry(value, expected, words):
    assert ids(value) == expected
    (note,) = notes(value)
    assert note.startswith(f"CUDA_VISIBLE_DEVICES={value!r}: ")
    assert words in note


@pytest.mark.parametrize("value", ["1,1", "1,3,1", "GPU-9f,GPU-9fb42d"])
def test_a_device_named_twice_counts_once(value):
    assert len(ids(value)) == len(set(keys(value))) == len(value.split(",")) - 1
    (note,) = notes(value)
    assert "names a device twice" in note


def test_each_repetition_is_noted():
    assert len(notes("0,0,0")) == 2


def test_uuids_stay_as_written():
    value = "GPU-9fb42d6f-2,GPU-1A2B3"
    assert ids(value) == ["GPU-9fb42d6f-2", "GPU-1A2B3"]
    assert keys(value) == [UUIDS[2], UUIDS[0]]
    assert notes(value) == ()
    devices, _ = visible(MACHINE, value)
    assert devices[0].memory == 2**34


@pytest.mark.parametrize("devices", [MACHINE, ()])
def test_mig_slices_that_were_not_found_become_devices(devices):
    entries = ["MIG-5c89", "MIG-GPU-9fb42d6f-2/1/0"]
    found, _ = visible(devices, ",".join(entries))
    assert found == tuple(
        Device(key=entry, id=entry, name="MIG slice", vendor="nvidia") for entry in entries
    )


def test_another_vendors_variable():
    assert visible(MACHINE[:1], "5", variable="HIP_VISIBLE_DEVICES")[1][0].startswith(
        "HIP_VISIBLE_DEVICES='5': '5' is not the index of a device: this machine has 1 device"
    )
    found, _ = visible((), "GPU-1", vendor="amd")
    assert found[0].vendor == "amd"


# -------------------------------------------------------------- the machine has no devices


def test_indices_without_hardware_are_logical_devices():
    found, (note,) = visible((), "1,3")
    assert found == (logical(1), logical(3))
    assert note.startswith("CUDA_VISIBLE_DEVICES='1,3', but no such hardware was found: ")
    assert "ids 1 and 3 are logical" in note


def test_one_index_without_hardware():
    assert "id 7 is logical" in notes("7", ())[0]


def test_uuids_without_a_driver_library_become_devices():
    found, (note,) = visible((), "GPU-9f")
    assert found == (Device(key="GPU-9f", id="GPU-9f", name="GPU", vendor="nvidia"),)
    assert "taken as it stands" in note


def test_the_list_ends_at_an_invalid_entry_without_hardware_too():
    found, reported = visible((), "2,x,3")
    assert [device.id for device in found] == [2]
    assert len(reported) == 2


# ----------------------------------------------------------------------------------- take


def taken(devices, num_gpus, value=None):
    return [device.id for device in take(devices, num_gpus, value)[0]]


def test_all_are_taken_by_default_by_ascending_id():
    devices, _ = visible(MACHINE, "3,1,2")
    assert take(devices, None, "3,1,2") == ((MACHINE[1], MACHINE[2], MACHINE[3]), ())


@pytest.mark.parametrize(
    ("num_gpus", "expected"), [(0, []), (1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (2.0, [0, 1])]
)
def test_the_first_ones_are_taken(num_gpus, expected):
    assert taken(MACHINE, num_gpus) == expected
    assert take(MACHINE, num_gpus, None)[1] == ()


def test_the_first_ones_of_the_variable_are_taken():
    devices, _ = visible(MACHINE, "3,1,2")
    assert taken(devices, 1, "3,1,2") == [3]
    assert taken(devices, 2, "3,1,2") == [1, 3]


def test_texts_ascend_after_numbers():
    devices = [Device(key=str(id), id=id, name="x") for id in ("MIG-b", 10, "GPU-a", 9)]
    assert taken(devices, None) == [9, 10, "GPU-a", "MIG-b"]


def test_devices_beyond_the_existing_ones_are_logical():
    devices, (note,) = take(MACHINE[:2], 4, None)
    assert devices == (*MACHINE[:2], logical(2), logical(3))
    assert devices[3].memory is None
    assert note.startswith("num_gpus=4, but 2 devices found: ids 2 and 3 are logical")


def test_without_hardware_all_devices_are_logical():
    devices, (note,) = take((), 1, None)
    assert devices == (logical(0),)
    assert note.startswith("num_gpus=1, but 0 devices found: id 0 is logical")


def test_simulated_devices_can_be_taken_and_extended():
    devices, _ = take(parse_simulate("2xA100"), 3, None)
    assert [device.key for device in devices] == ["sim:0", "sim:1", "logical:2"]


@pytest.mark.parametrize(
    ("value", "num_gpus", "words"),
    [
        ("1,3", 3, "num_gpus=3, but CUDA_VISIBLE_DEVICES='1,3' names only 2 devices: "),
        ("1", 2, "num_gpus=2, but CUDA_VISIBLE_DEVICES='1' names only 1 device: "),
        ("", 1, "num_gpus=1, but CUDA_VISIBLE_DEVICES='' names no device: "),
        # The ids that the user left out must not come back as logical ones.
        ("0,9", 2, "names only 1 device that is here: "),
        ("0,1,9", 3, "names only 2 devices that are here: "),
        ("9", 1, "names no device that is here: "),
    ],
)
def test_more_than_the_variable_names(value, num_gpus, words):
    devices, _ = visible(MACHINE, value)
    with pytest.raises(ValueError, match="lower the one or change the other") as caught:
        take(devices, num_gpus, value)
    assert words in str(caught.value)


def test_more_than_another_variable_names():
    with pytest.raises(ValueError, match="HIP_VISIBLE_DEVICES='0'"):
        take(MACHINE[:1], 2, "0", variable="HIP_VISIBLE_DEVICES")


@pytest.mark.parametrize("num_gpus", [-1, 1.5, -0.5, float("nan"), float("inf")])
def test_not_a_whole_number(num_gpus):
    with pytest.raises(ValueError, match="must be a whole number, 0 or more"):
        take(MACHINE, num_gpus, None)


@pytest.mark.parametrize("num_gpus", [True, "2", 1j, [1]])
def test_not_a_number(num_gpus):
    with pytest.raises(TypeError, match="num_gpus must be a whole number"):
        take(MACHINE, num_gpus, None)


# --------------------------------------------------------------------------- properties

ENTRIES = ["0", "1", "3", "9", "-1", "", " 2", "GPU-9f", "GPU-1a2b", "GPU-1a2b3", "MIG-1", "x"]


@given(
    st.one_of(st.lists(st.sampled_from(ENTRIES)).map(",".join), st.text("01 ,-GPUMIx", max_size=9)),
    st.sampled_from([MACHINE, MACHINE[:1], ()]),
)
def test_any_value_gives_different_devices_with_the_written_ids(value, devices):
    found, reported = visible(devices, value)
    assert len({device.key for device in found}) == len(found)
    written = [entry.strip() for entry in value.split(",")]
    for device in found:
        assert isinstance(device.id, int) or device.id in written
    if len(found) < len([entry for entry in written if entry]):
        assert reported, "devices left out without a note"


@given(st.lists(st.sampled_from("0123"), max_size=4).map(",".join), st.integers(0, 5))
def test_taken_devices_are_always_among_the_visible_ones(value, num_gpus):
    devices, _ = visible(MACHINE, value)
    try:
        found, _ = take(devices, num_gpus, value)
    except ValueError:
        assert num_gpus > len(devices)
    else:
        assert len(found) == num_gpus
        assert set(found) <= set(devices)


# ----------------------------------------------------------------- slices, and other kinds

CARD = Device(key="GPU-aa", id=1, name="T4", vendor="nvidia")
SLICE = Device(key="MIG-1234", id="MIG-1234", name="1g.5gb", vendor="nvidia", part_of="GPU-bb")
TPUS = tuple(Device(key=f"tpu:{at}", id=at, name="TPU", resource="TPU") for at in range(3))


def test_a_slice_that_is_listed_is_looked_up():
    assert visible([SLICE, CARD], "MIG-1234") == ((SLICE,), ())
    shown, notes = visible([SLICE, CARD], "MIG-9999")
    assert shown == ()
    assert "is the UUID of no device here" in notes[0]
    assert visible([SLICE, CARD], "1") == ((CARD,), ())


def test_num_gpus_counts_gpus_only():
    assert take([*TPUS, CARD], 1, None) == ((CARD, *TPUS), ())
    assert take([*TPUS, CARD], None, None) == ((CARD, *TPUS), ())
    assert take([*TPUS, CARD], 0, None) == (TPUS, ())
    devices, (note,) = take([*TPUS], 1, None)
    assert devices == (logical(0), *TPUS)
    assert "num_gpus=1, but 0 devices found" in note


def test_fewer_devices_of_another_kind_may_be_declared():
    resources = {"TPU": 2 * UNIT, "port": UNIT}
    assert declared((CARD, *TPUS), resources) == (CARD, *TPUS[:2])
    assert resources == {"port": UNIT}
    assert declared((CARD, *TPUS), {"TPU": 0}) == (CARD,)
    assert declared((CARD,), {"TPU": 9 * UNIT}) == (CARD,), "a mere number, as nothing is there"


@pytest.mark.parametrize("units", [4 * UNIT, UNIT // 2])
def test_more_devices_of_another_kind_than_there_are_are_refused(units):
    with pytest.raises(ValueError, match=r"but this machine has 3 TPU: declare a whole number"):
        declared((CARD, *TPUS), {"TPU": units})
