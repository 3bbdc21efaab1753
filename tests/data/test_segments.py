"""Memory segments: written once, sealed, mapped privately, and completely released."""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunb.data import files, segments
from gpunb.data.segments import PAGE, Segment, untouched
from gpunb.exceptions import OutOfMemoryError

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs memory files")


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:gpunb" in line for line in maps)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = open_descriptors(), mappings()
    in_shm = set(os.listdir("/dev/shm"))
    yield
    if (open_descriptors(), mappings()) != before:
        gc.collect()
    assert open_descriptors() <= before[0]
    assert mappings() <= before[1]
    assert not set(os.listdir("/dev/shm")) - in_shm


@pytest.fixture
def without_memory_files(monkeypatch):
    monkeypatch.setattr("gpunb.system.linux.has_memory_files", lambda: False)


def written(*buffers):
    segment, spans = Segment.write(buffers)
    with segment:
        view = segment.map()
    return [bytes(view[start : start + length]) for start, length in spans]


# --------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "buffers",
    [
        (),
        (b"",),
        (b"x",),
        (b"", b"abc", b"", bytes(100)),
        (bytes(range(256)) * 300, b"tail", b"y" * 70_000, b"z"),
        (bytearray(b"abc"), memoryview(b"def"), pickle.PickleBuffer(b"ghi")),
        (memoryview(b"abcdefgh").cast("I"), array.array("d", [1.5, 2.5])),
        tuple(bytes([n % 256]) * (n % 130) for n in range(3_000)),
    ],
    ids=["nothing", "empty", "one", "empties", "large", "kinds", "formats", "many"],
)
def test_what_is_written_is_what_is_mapped(buffers):
    assert written(*buffers) == [bytes(memoryview(part).cast("B")) for part in buffers]


def test_pieces_of_one_buffer_stand_without_gaps():
    segment, spans = Segment.write([[b"ab", b"", b"c" * 100_000, bytearray(b"de")], b"other"])
    with segment:
        assert spans == ((0, 100_004), (102_400, 5))
        assert bytes(segment.map()) == b"ab" + b"c" * 100_000 + b"de" + bytes(2_396) + b"other"


@given(st.lists(st.integers(0, 3) | st.integers(0, 200_000), max_size=12))
@settings(max_examples=40, deadline=None)
def test_every_layout_is_aligned_and_free_of_overlap(lengths):
    buffers = [bytes([n + 1]) * length for n, length in enumerate(lengths)]
    segment, spans = Segment.write(buffers)
    with segment, segment.map() as view:
        end = 0
        for buffer, (start, length) in zip(buffers, spans, strict=True):
            assert start % 64 == 0
            assert start >= end
            assert view[start : start + length] == buffer
            end = start + length
            if length >= 64 * 1024:
                assert start % PAGE == 0
                end = -(-end // PAGE) * PAGE
        assert segment.size == max((start + length for start, length in spans), default=0)


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_partial_writes_are_continued(monkeypatch, most):
    whole = os.pwritev

    def partial(descriptor, batch, offset):
        assert sum(map(len, batch)) > 0
        return whole(descriptor, [batch[0][:most]], offset)

    monkeypatch.setattr(os, "pwritev", partial)
    buffers = [bytes(range(200)), b"", b"abc" * 50, b"d" * (5 * most)]
    assert written(*buffers) == buffers


def test_writes_are_split_at_the_limits_of_the_system(monkeypatch):
    calls = []
    whole = os.pwritev

    def watched(descriptor, batch, offset):
        calls.append((len(batch), sum(map(len, batch))))
        return whole(descriptor, batch, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    monkeypatch.setattr(files, "_MOST_BYTES", 1000)
    monkeypatch.setattr(files, "_MOST_PIECES", 5)
    buffers = [os.urandom(n * 97) for n in range(40)]
    assert written(*buffers) == buffers
    assert max(pieces for pieces, _ in calls) <= 5
    assert max(total for _, total in calls) <= 1000


def test_segments_work_without_pwritev(monkeypatch):
    monkeypatch.delattr(os, "pwritev")
    buffers = [b"abc", b"d" * 70_000, b"e"]
    assert written(*buffers) == buffers


def test_a_buffer_with_gaps_is_refused():
    with pytest.raises(BufferError):
        Segment.write([memoryview(bytes(10))[::2]])


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC, errno.EFBIG, 0])
def test_full_memory_raises_a_clear_error_and_leaves_no_descriptor(monkeypatch, code):
    def full(*_):
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    monkeypatch.setattr(os, "pwritev", full)
    before = open_descriptors()
    with pytest.raises(OutOfMemoryError, match=r"no room for 3,000,000 bytes \(0.00 GiB\)") as info:
        Segment.write([bytes(3_000_000)])
    assert isinstance(info.value, MemoryError)
    assert open_descriptors() == before  # while the error, with its frames, is still there


def test_other_errors_are_raised_unchanged_and_leave_no_descriptor(monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(os, "pwritev", fails)
    for error in (OSError(errno.EIO, "broken"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            Segment.write([b"abc"])


@linux
def test_file_size_limit_raises_a_clear_error():
    script = (
        "import resource; from gpunb.data.segments import Segment; import os\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try: Segment.write([bytes(1 << 21)])\n"
        "except MemoryError as error: print(error)\n"
        "print(len(os.listdir('/proc/self/fd')) - before)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[0].startswith("no room for 2,097,152 bytes")
    assert done.stdout.splitlines()[1] == "0"


# ---------------------------------------------------------------------------------- one's own copy


def test_a_receiver_writes_to_its_own_copy():
    data = bytearray(b"a" * 200_000)
    segment, _ = Segment.write([data])
    with segment:
        mine, other = segment.map(), segment.map()
        mine[0] = mine[100_000] = ord("b")
        assert not mine.readonly
        assert (other[0], data[0], segment.map()[100_000]) == (ord("a"),) * 3


@linux
def test_a_sealed_segment_cannot_be_changed_by_anybody():
    segment, _ = Segment.write([b"a" * 100])
    with segment:
        for change in (
            lambda: os.pwrite(segment.fileno(), b"b", 0),
            lambda: os.ftruncate(segment.fileno(), 10),
            lambda: os.ftruncate(segment.fileno(), 1000),
            lambda: mmap.mmap(segment.fileno(), 100, flags=mmap.MAP_SHARED),
            lambda: fcntl.fcntl(segment.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
        ):
            with pytest.raises(PermissionError):
                change()
        again = os.open(f"/proc/self/fd/{segment.fileno()}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"b", 0)
        os.close(again)


@linux
def test_a_segment_is_sealed_while_the_system_has_a_page_of_it_in_use(monkeypatch):
    write = segments.write_all

    def write_and_hold(descriptor, pieces):
        write(descriptor, pieces)
        os.splice(descriptor, into, segments.PAGE, offset_src=0)

    out, into = os.pipe()
    monkeypatch.setattr(segments, "write_all", write_and_hold)
    segment, _ = Segment.write([b"abc" * segments.PAGE])
    with segment, open(out, "rb"), open(into, "wb"):
        with pytest.raises(PermissionError):
            os.pwrite(segment.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(segment.fileno(), segments.PAGE)
        assert segment.map()[:3] == b"abc"


def test_another_process_reads_and_cannot_write():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = f"""
import os, socket
from gpunb.data.segments import Segment
link = socket.socket(fileno={theirs.fileno()})
_, descriptors, _, _ = socket.recv_fds(link, 10, 1)
segment = Segment.adopt(descriptors[0], 100_000)
view = segment.map()
view[0] = 7
try: os.pwrite(segment.fileno(), b"x", 0)
except PermissionError: link.send(bytes([view[0], view[99_999]]))
"""
    segment, _ = Segment.write([b"\5" * 100_000])
    with segment, ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", script], pass_fds=[theirs.fileno()], text=True
            )
        socket.send_fds(ours, [b"x"], [segment.fileno()])
        assert ours.recv(10) == b"\7\5"
        assert process.wait() == 0
        assert segment.map()[0] == 5


# ---------------------------------------------------------------------------------- life and death


def test_view_outlives_its_segment_and_is_unmapped_with_its_last_slice():
    before = mappings()
    segment, _ = Segment.write([b"abc" * 1000])
    part = np.frombuffer(segment.map()[3:6].cast("b"), dtype="i1")
    segment.close()
    del segment
    assert mappings() == before + 1
    assert bytes(part) == b"abc"
    part[0] = 1
    del part
    assert mappings() == before


def test_mappings_hold_no_descriptors():
    segment, _ = Segment.write([b"abc" * 1000])
    before = open_descriptors()
    with segment:
        views = [segment.map() for _ in range(50)]
        assert open_descriptors() == before
    assert views[49][:3] == b"abc"


def test_close_is_idempotent_also_from_many_threads():
    segment, _ = Segment.write([b"abc"])
    assert "descriptor" in repr(segment)
    gate = threading.Barrier(8)

    def close():
        gate.wait()
        segment.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    segment.close()
    assert segment.closed
    assert "closed" in repr(segment)
    for use in (segment.fileno, segment.map, segment.dup):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_forgotten_segment_closes_itself():
    gc.collect()  # what other tests left
    before = open_descriptors()
    segment, _ = Segment.write([b"abc"])
    assert open_descriptors() == before + 1
    del segment
    gc.collect()
    assert open_descriptors() == before


def test_duplicate_stays_open_after_the_original_is_closed():
    segment, _ = Segment.write([b"abc"])
    other = segment.dup()
    segment.close()
    assert bytes(other.map()) == b"abc"
    assert not os.get_inheritable(other.fileno())
    other.close()


def test_adopting_checks_the_size_and_owns_the_descriptor():
    segment, _ = Segment.write([b"abc"])
    with segment, Segment.adopt(os.dup(segment.fileno())) as adopted:
        assert adopted.size == 3
        descriptor = os.dup(segment.fileno())
        with pytest.raises(ValueError, match="4 bytes was announced, 3 came"):
            Segment.adopt(descriptor, 4)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_a_segment_cannot_be_pickled():
    segment, _ = Segment.write([b"abc"])
    with segment, pytest.raises(TypeError, match="send its descriptor"):
        pickle.dumps(segment)


def test_failed_mapping_raises_a_clear_error(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segments, "_map_private", refuse)
    segment, _ = Segment.write([b"abc"])
    with segment, pytest.raises(OutOfMemoryError, match="3 bytes"):
        segment.map()


@linux
def test_failed_system_call_raises_its_error():
    descriptor = os.memfd_create("sparse")
    os.ftruncate(descriptor, 1 << 60)
    segment = Segment.adopt(descriptor)
    with segment, pytest.raises(OutOfMemoryError, match="no room for 1,152,921"):
        segment.map()


def test_segments_work_without_memory_files(without_memory_files):
    data = [b"abc", os.urandom(100_000)]
    assert written(*data) == data


def test_segments_work_without_ctypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ctypes", None)
    segment, _ = Segment.write([b"abc" * 1000])
    with segment:
        view = segment.map()
    view[0] = 0
    assert bytes(view[:3]) == b"\0bc"
    assert not untouched(view)


@linux
def test_segments_work_where_executable_memory_files_are_forbidden(monkeypatch):
    make = os.memfd_create
    tried = []

    def strict(name, flags):
        tried.append(flags)
        if not flags & 0x8:
            raise PermissionError(errno.EACCES, "no")
        return make(name, flags & ~0x8)

    monkeypatch.setattr(os, "memfd_create", strict)
    assert written(b"abc") == [b"abc"]
    assert len(tried) == 2


# ----------------------------------------------------------------------------------------- to disk


def kind(descriptor):
    return "memory" if "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}") else "file"


def test_spilled_segment_has_the_same_content(tmp_path):
    data = os.urandom(200_001)
    segment, _ = Segment.write([data])
    before = segment.map()
    with segment, segment.spilled(str(tmp_path)) as moved:
        assert not segment.closed
        assert kind(moved.fileno()) == "file"
        assert moved.size == segment.size == 200_001
        mine, other = moved.map(), moved.map()
        assert mine == other == before == data
        mine[0] ^= 1
        mine[200_000] ^= 1
        assert other == moved.map() == before == data
        assert not os.get_inheritable(moved.fileno())
        with moved.spilled(str(tmp_path)) as again, again.dup() as third:
            assert third.map() == data
        assert os.listdir(tmp_path) == []
    assert other == data


@linux
def test_a_spilled_segment_cannot_be_written_to(tmp_path):
    segment, _ = Segment.write([b"a" * 100])
    with segment, segment.spilled(str(tmp_path)) as moved:
        assert os.fstat(moved.fileno()).st_mode & 0o777 == 0o400
        for change in (
            lambda: os.pwrite(moved.fileno(), b"b", 0),
            lambda: os.ftruncate(moved.fileno(), 10),
            lambda: mmap.mmap(moved.fileno(), 100, flags=mmap.MAP_SHARED),
        ):
            with pytest.raises(OSError, match=r"Bad file|Invalid|Permission"):
                change()
        if os.geteuid():
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{moved.fileno()}", os.O_RDWR)


@linux
def test_untouched_works_for_a_spilled_segment(tmp_path):
    segment, _ = Segment.write([os.urandom(200_000)])
    with segment, segment.spilled(str(tmp_path)) as moved:
        view = moved.map()
    sum(view)
    assert untouched(view)
    view[100_000] = view[100_000]
    assert not untouched(view)
    assert untouched(view[:PAGE])


@pytest.mark.parametrize("size", [0, 1, PAGE, 3 * PAGE + 1])
def test_any_size_can_be_spilled(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "_COPIED_AT_ONCE", PAGE)
    data = os.urandom(size)
    segment, _ = Segment.write([data])
    with segment, segment.spilled(str(tmp_path)) as moved:
        assert moved.map() == data


def unsupported(*_):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.parametrize("without", ["O_TMPFILE", "its file system", "all", "/proc"])
def test_segments_can_be_spilled_on_systems_with_fewer_calls(tmp_path, monkeypatch, without):
    data = os.urandom(200_000)
    segment, _ = Segment.write([data])
    whole = os.open

    def poor(path, flags, *rest, **named):
        if without == "/proc" and str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "no /proc")
        if without != "/proc" and flags & os.O_TMPFILE == os.O_TMPFILE:
            unsupported()
        return whole(path, flags, *rest, **named)

    with segment, monkeypatch.context() as patch:
        if without == "O_TMPFILE":
            patch.delattr(os, "O_TMPFILE")
        else:
            patch.setattr(os, "open", poor)
        if without == "all":
            patch.setattr(os, "sendfile", unsupported)
            patch.setattr(os, "posix_fallocate", unsupported)
        moved = segment.spilled(str(tmp_path))
    with moved:
        assert os.listdir(tmp_path) == []
        assert os.fstat(moved.fileno()).st_mode & 0o777 == 0o400
        assert moved.map() == data


@pytest.mark.parametrize("where", ["posix_fallocate", "sendfile", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_or_broken_disk_raises_a_clear_error_and_leaves_no_descriptor(
    tmp_path, monkeypatch, where, code
):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    segment, _ = Segment.write([bytes(100_000)])
    before = open_descriptors()
    with segment:
        with monkeypatch.context() as patch:
            patch.setattr(os, where, fails)
            expected = OSError if code == errno.EIO else OutOfMemoryError
            with pytest.raises(expected, match=os.strerror(code)) as info:
                segment.spilled(str(tmp_path))
        if code != errno.EIO:
            assert f"100,000 bytes (0.00 GiB) in {tmp_path}" in str(info.value)
        assert open_descriptors() == before
        assert os.listdir(tmp_path) == []


def test_spilling_a_short_segment_raises_an_error(tmp_path):
    short = Segment(os.memfd_create("gpunb"), 100)
    with short, pytest.raises(OSError, match="Input/output"):
        short.spilled(str(tmp_path))


def test_spilling_to_a_missing_folder_raises_an_error(tmp_path):
    segment, _ = Segment.write([b"abc"])
    with segment, pytest.raises(FileNotFoundError):
        segment.spilled(str(tmp_path / "none"))


@linux
def test_file_size_limit_for_a_spilled_segment_raises_a_clear_error(tmp_path):
    script = (
        "import os, resource, sys; from gpunb.data.segments import Segment\n"
        "segment, _ = Segment.write([bytes(1 << 21)])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: segment.spilled(sys.argv[1])\n"
        "except MemoryError as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.startswith(f"no room for 2,097,152 bytes (0.00 GiB) in {tmp_path}: File")
    assert os.listdir(tmp_path) == []


@linux
def test_a_killed_process_leaves_no_file(tmp_path):
    script = (
        "import os, sys; from gpunb.data.segments import Segment\n"
        "segment, _ = Segment.write([bytes(1 << 20)])\n"
        "moved = segment.spilled(sys.argv[1])\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------- untouched


def mapped(*sizes):
    segment, spans = Segment.write([os.urandom(size) for size in sizes])
    with segment:
        view = segment.map()
    return [view[start : start + length] for start, length in spans]


@linux
def test_reading_leaves_a_view_untouched():
    (view,) = mapped(1 << 20)
    assert untouched(view)
    sum(view)
    assert untouched(view)


@linux
@pytest.mark.parametrize("where", [0, 1, 4095, 4096, 500_000, (1 << 20) - 1])
def test_one_written_byte_is_seen(where):
    (view,) = mapped(1 << 20)
    view[where] = view[where]  # the same value counts too: the page was copied
    assert not untouched(view)
    page = where // PAGE * PAGE
    assert untouched(view[:page])
    assert untouched(view[page + PAGE :])


@linux
def test_a_neighbour_does_not_count_for_large_buffers():
    small, large, small_too, large_too = mapped(10, 70_001, 10, 64 * 1024)
    small[0] = small_too[9] = large_too[0] = 1
    assert not untouched(small)
    assert untouched(large)
    assert not untouched(large_too)


@linux
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_either_order(order):
    (raw,) = mapped(80_000)
    values = np.frombuffer(raw, dtype="f8").reshape((100, 100), order=order)
    assert untouched(values)
    values[50, 50] += 1
    assert not untouched(values)


@linux
def test_view_counts_as_changed_if_the_page_map_does_not_show_it(monkeypatch):
    (view,) = mapped(80_000)
    assert not untouched(view[::2])
    assert untouched(view.toreadonly())
    assert not untouched(bytearray(b"x" * 10_000))
    assert untouched(view[:0])
    assert untouched(view)
    short = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: short(fd, count, at)[:4])
    assert not untouched(view)
    monkeypatch.setattr(os, "pread", short)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert not untouched(view)


@linux
@pytest.mark.parametrize("at_once", [1, 7, 64 * 1024])
def test_page_map_is_read_in_parts(monkeypatch, at_once):
    monkeypatch.setattr(segments, "_PAGES_AT_ONCE", at_once)
    (view,) = mapped(100 * PAGE)
    assert untouched(view)
    view[99 * PAGE] = 1
    assert not untouched(view)
    assert untouched(view[: 99 * PAGE])


@linux
def test_a_written_page_still_counts_after_a_fork():
    (view,) = mapped(100_000)
    view[0] = 1
    child = os.fork()
    if not child:
        os._exit(untouched(view))
    assert os.waitpid(child, 0)[1] == 0
    assert not untouched(view)


@linux
def test_untouched_is_fast_for_a_large_view():
    segment = Segment(os.memfd_create("gpunb"), 256 << 20)
    os.ftruncate(segment.fileno(), segment.size)
    with segment:
        view = segment.map()
    assert sum(view[::PAGE]) == 0  # now all its pages are in memory
    start = time.thread_time()
    assert untouched(view)
    assert time.thread_time() - start < 0.1  # 2.5 ms, and room for a busy machine
