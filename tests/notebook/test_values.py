"""Values of cells at home, and what cells do to functions, classes and arrays of the notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel
from tests.waiting import eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """A kernel before which a user sits."""
    cell.stdin = True
    cell.ok(
        "@gpunb.remote(num_gpus=1)\nclass Model:\n"
        "    def ids(self):\n        return gpunb.get_gpu_ids()"
    )
    return cell


@pytest.fixture(autouse=True)
def idle_afterwards(notebook: Kernel) -> Iterator[None]:
    yield
    notebook.ok("%gpu wait")


def free(notebook: Kernel) -> bool:
    return bool(notebook.value("gpunb.available_resources().get('GPU', 0.0)") == 2.0)


# ---------------------------------------------------------------------------------------- outputs


def outputs(number: int) -> str:
    return f"(_, __, Out[{number}], _{number}, Out is _oh)"


def test_the_value_is_the_output_as_of_a_plain_cell(notebook: Kernel) -> None:
    notebook.ok("'before'")
    result = notebook.ok("%%gpu 0\n40 + 2")
    assert notebook.value(outputs(result.count)) == (42, "before", 42, 42, True)
    assert notebook.ok("_ + 1").value == "43"
    assert notebook.ok("%%gpu 0\n_ + 1").value == "44"
    quiet = notebook.ok("%%gpu 0\n5;")
    assert notebook.value(f"(_, {quiet.count} in Out)") == (44, False)
    assert notebook.ok("%gpu 0 2 * _").value == "88"
    assert notebook.ok("_").value == "88"


def test_a_cell_sees_the_history_that_its_text_names(notebook: Kernel) -> None:
    first = notebook.ok("[1, 2]").count
    second = notebook.ok("'second'").count
    assert notebook.ok("%%gpu 0\n_, __, _i").value == "('second', [1, 2], \"'second'\")"
    notebook.ok("'second'")
    text = f"(Out[{first}], Out[{first}] is _{first}, _oh[{second}], In[{second}], _i{second})"
    assert notebook.ok(f"%%gpu 0\n{text}").value == (
        "([1, 2], True, 'second', \"'second'\", \"'second'\")"
    )
    assert notebook.ok("%%gpu 0\nIn[-2]").value == repr(notebook.value("In[-2]"))
    assert notebook.ok(f"%%gpu 0\nOut[{first}].append(3)\nOut[{first}]").value == "[1, 2, 3]"
    assert notebook.value(f"(Out[{first}], _{first} is Out[{first}])") == ([1, 2, 3], True)
    lock = notebook.ok("import threading\nthreading.Lock()").count
    assert notebook.ok(f"%%gpu 0\nOut[{first}], {lock + 1000} in Out").value == (
        "([1, 2, 3], False)"
    )
    refused = notebook(f"%%gpu 0\nOut[{lock}]")
    assert f"_{lock} cannot be sent to a worker: it is a _thread.lock" in refused.stderr


def test_a_value_that_cannot_come_home_is_no_output(notebook: Kernel) -> None:
    notebook.ok("'before'")
    result = notebook.ok("%%gpu 0\n(i for i in 'ab')")
    assert result.value is not None
    assert "generator" in result.value
    assert notebook.value(f"(_, {result.count} in Out)") == ("before", False)


def test_a_name_like_an_output_that_the_user_bound_stays(notebook: Kernel) -> None:
    notebook.ok("_ = 'mine'")
    result = notebook.ok("%%gpu 0\n7")
    assert notebook.value(f"(_, Out[{result.count}])") == ("mine", 7)
    notebook.ok("del _, __, ___")  # with that they are IPython's again


def test_in_the_background_the_value_takes_the_place_of_the_handle(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu 0 --bg\nlate = 1\n40 + 2")
    notebook.ok("job = _\njob.wait(); None")
    assert notebook.value(f"(Out[{result.count}], _{result.count})") == (42, 42)
    assert notebook.value("(_ is job, job.result, job.names)") == (True, 42, {"late": 1})
    without = notebook.ok("%%gpu 0 --bg\nlate = 2")
    assert notebook.value(f"Out[{without.count}].wait().state") == "done"
    assert notebook.value(f"Out[{without.count}].names") == {"late": 2}


def test_the_handle_has_values_of_names_that_stayed(notebook: Kernel) -> None:
    notebook.ok("import os\nos.mkfifo('until')")
    result = notebook.ok("%%gpu 0 --bg\nopen('until').close()\nrebound = 'there'\n42")
    notebook.ok("rebound = 'here'\nopen('until', 'w').close()")
    notebook.ok(f"Out[{result.count}].wait()\nos.remove('until')")
    assert notebook.value(f"Out[{result.count}].names") == {"rebound": "there"}
    assert notebook.value(f"(Out[{result.count}].result, rebound)") == (42, "here")


def test_the_value_replaces_the_handle_where_background_cells_run_first(notebook: Kernel) -> None:
    notebook.stdin = False
    try:
        result = notebook.ok("%%gpu 0 --bg\n40 + 2")
        assert notebook.value(f"(Out[{result.count}], _.result)") == (42, 42)
    finally:
        notebook.stdin = True


@pytest.mark.parametrize("session", ["", " -s keeps"])
def test_an_actor_that_only_an_output_has_lives_for_one_more_cell(
    notebook: Kernel, session: str
) -> None:
    shown = notebook.ok(f"%%gpu 0{session}\nModel.remote()")
    assert "Model" in (shown.value or "")
    assert notebook.ok("gpunb.get(_.ids.remote())").value == "[0]"
    eventually(lambda: free(notebook), "the device is free")
    assert "past handle" in notebook.value(f"repr(Out[{shown.count}])")
    if session:
        notebook.ok("%gpu stop keeps")


def test_an_actor_in_a_late_output_lives_until_the_end_of_the_next_cell(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu 0 --bg\nModel.remote()")
    notebook.ok("job = _\njob.wait(); None")
    assert notebook.ok(f"gpunb.get(Out[{result.count}].ids.remote())").value == "[0]"
    notebook.ok("'one more'")
    eventually(lambda: free(notebook), "the device is free")
    assert notebook.value(f"repr(job.result) == repr(Out[{result.count}])")
    assert "past handle" in notebook.value("repr(job.result)")


# ---------------------------------------------------------------------------- names of functions


def test_an_expression_in_a_function_sees_its_names(notebook: Kernel) -> None:
    notebook.ok("a, x = 100, 1\ndef f(): return x")
    code = (
        "def g(a):\n    x = 10\n    r = %gpu 0 a + x + f() + sum([x for _ in 'ab'])\n    return r"
    )
    assert notebook.ok(f"{code}\ng(3)").value == "34"
    assert notebook.value("(a, x)") == (100, 1)
    nested = "def h(n):\n    def inner(): return n + x\n    r = %gpu 0 inner() + (lambda: n)()\n"
    nested += "    return r"
    assert notebook.ok(f"{nested}\nh(5)").value == "11"
    method = (
        "class A:\n    v = 4\n    def go(self):\n        r = %gpu 0 self.v + 1\n        return r"
    )
    assert notebook.ok(f"{method}\nA().go()").value == "5"
    each = "[get_ipython().run_line_magic('gpu', '0 k * 2') for k in range(2)]"
    assert notebook.ok(each).value == "[0, 2]"


def test_an_expression_that_awaits_sees_the_names_of_its_function(notebook: Kernel) -> None:
    code = "async def co(x): return x\ndef g(x):\n    r = %gpu 0 await co(x)\n    return r"
    assert notebook.ok(f"{code}\ng(5)").value == "5"


def test_errors_of_an_expression_name_the_line_and_the_names(notebook: Kernel) -> None:
    failed = notebook("def g(x):\n    y = 0\n    r = %gpu 0 x / y\n    return r\ng(5)")
    assert failed.ename == "ZeroDivisionError"
    assert "line 3, in <lambda>(x, y)" in failed.traceback
    refused = notebook(
        "import threading\ndef g():\n    lock = threading.Lock()\n    r = %gpu 0 id(lock)\ng()"
    )
    assert "lock cannot be sent to a worker: it is a _thread.lock" in refused.stderr
    assert "Make it inside the cell" in refused.stderr


def test_a_loop_of_expressions_starts_no_interpreters(notebook: Kernel) -> None:
    """Each runs in a fork of a zygote. There are two of these: one has preloaded modules."""
    loop = "for i in range(n):\n        r = %gpu 0 (i + n, os.getppid())\n        got.append(r)"
    notebook.ok(f"import os\ndef g(n):\n    got = []\n    {loop}\n    return got")
    got = notebook.value("g(10)")
    assert [each for each, _ in got] == list(range(10, 20))
    parents = {parent for _, parent in got}
    assert len(parents) <= 2
    assert notebook.value("os.getpid()") not in parents


# ------------------------------------------------------------------------------ functions, classes


def test_functions_with_magics_travel_both_ways(notebook: Kernel) -> None:
    notebook.ok("def f():\n    said = !echo hi\n    return list(said)")
    assert notebook.ok("%%gpu 0\nf()").value == "['hi']"
    notebook.ok("%%gpu 0\ndef back():\n    said = !echo there\n    return list(said)")
    assert notebook.ok("back()").value == "['there']"


def test_attributes_of_functions_and_classes_come_home(notebook: Kernel) -> None:
    notebook.ok(
        "def f(n=1): return n\nf.calls = 0\ng = f\n"
        "class A:\n    log, seen, n = [], {}, 0\n    def m(self): return 1\n"
        "    __slots__ = ('slot',)\nlog, obj = A.log, A()"
    )
    notebook.ok(
        "%%gpu 0\nf.calls += 1\nf.new = [1]\nf.__defaults__ = (2,)\n"
        "A.log.append(3)\nA.seen = {1: 2}\nA.m = lambda self: 7\nA.other = A"
    )
    assert notebook.value("(f.calls, f.new, f(), g is f)") == (1, [1], 2, True)
    assert notebook.value("(A.log, log is A.log, A.seen, obj.m())") == ([3], True, {1: 2}, 7)
    assert notebook.value("(A.other is A, type(obj) is A)") == (True, True)
    result = notebook.ok(
        "%%gpu 0\ntype(obj).n = 6\ndel A.seen, f.new\nA.bad = (i for i in 'ab')\nobj.m()"
    )
    assert "'A.bad' stays in the worker: it is a generator" in result.stderr
    assert "--session" in result.stderr
    assert notebook.value("[hasattr(*each) for each in ((A, 'seen'), (A, 'bad'), (f, 'new'))]") == (
        [False, False, False]
    )
    assert notebook.value("A.n") == 6
    notebook.ok("%%gpu 0 --out none\nA.n = 7\nf.calls = 7")
    assert notebook.value("(A.n, f.calls)") == (6, 1)
    notebook.ok("%%gpu 0 --out f\nA.n = 7\nf.calls = 7")
    assert notebook.value("(A.n, f.calls)") == (6, 7)


def test_a_class_that_keeps_a_register_comes_home_with_it(notebook: Kernel) -> None:
    notebook.ok(
        "class Base:\n    kinds = []\n    def __init_subclass__(cls):\n"
        "        Base.kinds.append(cls.__name__)\nkinds = Base.kinds"
    )
    notebook.ok("%%gpu 0\nclass One(Base): pass")
    assert notebook.value("(Base.kinds, kinds is Base.kinds)") == (["One"], True)


def test_a_background_cell_changes_no_attributes_of_the_notebook(notebook: Kernel) -> None:
    notebook.ok("class A:\n    n = 0")
    notebook.ok("%%gpu 0 --bg\nA.n = 5")
    notebook.ok("%gpu wait")
    assert notebook.value("A.n") == 0


# ------------------------------------------------------------------------------------------ arrays


def test_an_array_that_is_changed_stays_the_same_array(notebook: Kernel) -> None:
    notebook.ok(
        "import numpy as np\na = np.zeros(300_000)\nview, other, held = a[5:7], a, {'a': a}\n"
        "b = np.zeros(3)\npair = [b]"
    )
    notebook.ok("%%gpu 0\na[5] = 7\nagain = a\nb += 1\npair")
    assert notebook.value("(view.tolist(), other is a, held['a'] is a, again is a)") == (
        ([7.0, 0.0], True, True, True)
    )
    assert notebook.value("(b.tolist(), pair[0] is b)") == ([1.0, 1.0, 1.0], True)
    notebook.ok("%%gpu 0\npair.append(1)\npair[0] += 1")
    assert notebook.value("(pair[0].tolist(), len(pair))") == ([2.0, 2.0, 2.0], 2)


# ----------------------------------------------------------------------------------------- wording


def test_values_that_stay_in_the_worker_are_named_with_a_way_to_get_them(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu 0\nimport threading\nboth = {'lock': threading.Lock()}")
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunb: 'both' stays in the worker: ['lock'] is a _thread.lock; ")
    assert "Bind what it gives" in line
    assert "--session NAME" in line
    assert "sent" not in line
    asked = notebook("%%gpu 0 --out gen\ngen = (i for i in 'ab')")
    assert asked.evalue.startswith("--out gen: it is a generator; ")
    class_of_it = "class Odd:\n    def __reduce__(self): raise ValueError('odd')"
    result = notebook.ok(f"%%gpu 0\n{class_of_it}\nodd = Odd()")
    assert (
        "'odd' stays in the worker: it is a __main__.Odd, and pickling it raised" in result.stderr
    )
    assert "Bind what it gives" in result.stderr
