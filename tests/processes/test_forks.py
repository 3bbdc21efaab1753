"""Forks that a user makes of a kernel with a session, and forks of these."""

from __future__ import annotations

import pytest

from tests.sessions import script

BEGIN = """
    import contextlib, gc, multiprocessing, os, sys, warnings
    import gpunb

    # Newer Pythons warn of a fork of a process with threads, which is what is tried here.
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    @gpunb.remote(num_gpus=1)
    def job(value):
        return value

    def there():
        "Which descriptors are open, and on what."
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return found

    def in_child(function):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function()
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"

    def session():
        "One that shares its devices with other sessions, so that it has a ledger, too."
        gpunb.init(simulate="1xA100:1GiB", num_cpus=2, preload=())
        kept = gpunb.put(bytes(3_000_000))
        assert gpunb.get(job.remote("done")) == "done"
        return kept
"""


def run(text, tmp_path):
    done = script(BEGIN + text, env={"GPUNB_LEDGER_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_fork_of_a_fork_of_the_kernel_keeps_its_own_descriptors(tmp_path):
    """New descriptors have the numbers that the first fork has closed."""
    text = """
    def first():
        pipes = [os.pipe() for _ in range(64)]  # they take all the numbers that are free
        mine = there()
        def second():
            assert there() == mine, set(mine.items()) ^ set(there().items())
        in_child(second)

    if __name__ == "__main__":
        kept = session()
        in_child(first)
        assert gpunb.get(job.remote("again")) == "again"
        print("well")
    """
    assert run(text, tmp_path) == "well\n"


def test_a_pool_of_processes_works_in_a_fork_of_the_kernel(tmp_path):
    text = """
    def first():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map_async(abs, range(-3, 0)).get(20))

    if __name__ == "__main__":
        kept = session()
        in_child(first)
    """
    assert run(text, tmp_path) == "[3, 2, 1]\n"


def test_a_fork_of_the_kernel_has_none_of_the_sessions_descriptors(tmp_path):
    """They would delay the session's end and keep the memory of its objects."""
    text = """
    def trackers():
        "Descriptors of other libraries, which are there as long as the process is."
        from loky.backend import resource_tracker as loky
        from multiprocessing import resource_tracker as own
        return {loky._resource_tracker._fd, own._resource_tracker._fd}

    def first(before):
        left = {each: what for each, what in there().items()
                if each not in before and each not in trackers() and "/fd" not in what}
        assert not left, left

    if __name__ == "__main__":
        os.urandom(1)
        before = there()
        kept = session()
        for attempt in range(10):
            try:
                in_child(lambda: first(before))
                break
            except AssertionError:
                # Another thread may have had a file open, for a moment, when it forked.
                assert attempt < 9
        assert gpunb.get(kept) == bytes(3_000_000)
        assert gpunb.get(job.remote("again")) == "again"
        print("well")
    """
    assert run(text, tmp_path) == "well\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_daemon_that_closed_all_descriptors_keeps_its_new_ones(tmp_path, method):
    """The parent's session must not close them by its old numbers."""
    text = f"""
    os.environ["GPUNB_START_METHOD"] = {method!r}

    def first():
        global kept
        os.closerange(3, 1024)
        pipes = [os.pipe() for _ in range(64)]
        mine = there()
        del kept
        gpunb.shutdown()
        gc.collect()
        assert there() == mine, set(mine.items()) ^ set(there().items())
        def second():
            assert there() == mine
        in_child(second)

    if __name__ == "__main__":
        kept = session()
        in_child(first)
        print("well")
    """
    assert run(text, tmp_path) == "well\n"


def test_a_fork_of_an_attached_kernel_has_none_of_its_descriptors(tmp_path):
    text = """
    import subprocess

    def command(*words):
        subprocess.run([sys.executable, "-m", "gpunb", *words], check=True,
                       stdout=subprocess.DEVNULL)

    def first(before):
        left = {each: what for each, what in there().items()
                if each not in before and "/fd" not in what}
        assert not left, left
        pipes = [os.pipe() for _ in range(64)]
        mine = there()
        gpunb.shutdown()
        gc.collect()
        assert there() == mine
        def second():
            assert there() == mine
        in_child(second)

    if __name__ == "__main__":
        command("start", "--head", "--name", "forks", "--simulate", "1xA100:1GiB", "--preload", "")
        try:
            os.urandom(1)
            before = there()
            gpunb.init("forks")
            assert gpunb.get(job.remote("done")) == "done"
            in_child(lambda: first(before))
            assert gpunb.get(job.remote("again")) == "again"
            gpunb.shutdown()
        finally:
            command("stop", "forks")
        print("well")
    """
    assert run(text, tmp_path) == "well\n"
