"""Cells under %%gpu, in a real kernel: each does what it does as a plain cell."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.notebook.kernels import Kernel, Result

pytestmark = pytest.mark.kernel

DIFFERENCES: dict[str, str] = {}
"""Snippets that differ from a plain cell for now, with the reason."""

LOOK = r"""
import types
own = set()
def names():
    hidden = shell.user_ns_hidden.keys() | own
    return {name: f"module {each.__name__}" if isinstance(each, types.ModuleType) else repr(each)
            for name, each in list(shell.user_ns.items())
            if name not in hidden and name.strip("_ih0123456789")}
def forget():
    for name in names():
        del shell.user_ns[name]
own |= names().keys()
"""
"""Run in a namespace of its own, so that cells may shadow what they like."""


@pytest.fixture(scope="module", autouse=True)
def prepared(cell: Kernel) -> None:
    cell.ok(f"_look = {{'shell': get_ipython()}}\nexec({LOOK!r}, _look)")


# Each is (what, a plain cell before it, the cell). A name in the first says what it is about.
SNIPPETS: list[tuple[str, str, str]] = [
    # ------------------------------------------------------------------------------ binding names
    ("assign", "", "x = 1\ny, *z = 'abc'\na = b = [1]"),
    ("assign from names", "a = 2\nb = [3]", "c = a + b[0]"),
    ("augment", "n = 5\nw = 'a'", "n += 1\nw *= 3"),
    ("augment a list", "v = [1]\nalias = v", "v += [2]"),
    ("annotate", "", "q: int = 3\nr: str"),
    ("walrus", "data = [3, 4]", "[last := each for each in data]\nif (n := len(data)) > 1: pass"),
    ("delete", "x = 1\ny = 2", "del x"),
    ("delete in a branch", "x = 1\ny = 2", "if y > 1:\n    del x\nelse:\n    del y"),
    ("delete and bind", "x = 1", "del x\nx = 2"),
    ("delete what is not there", "", "del nothing_there"),
    ("loop leaves its names", "", "for i in range(3):\n    square = i * i"),
    ("with", "import io", "with io.StringIO('text') as f:\n    line = f.read()\ndel f"),
    ("match", "p = {'k': [1, 2]}", "match p:\n    case {'k': [a, *rest]}: pass"),
    ("except deletes its name", "e = 1", "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    k = str(e)"),
    ("global in a function", "", "def f():\n    global g\n    g = 3\nf()"),
    ("global of another cell's function", "count = 0\ndef up():\n    global count\n    count += 1", "up()\ncount"),
    ("star import", "", "from math import *\nr = floor(pi)"),
    ("import", "", "import json, os.path as p\nfrom collections import OrderedDict as D"),
    ("import of a submodule", "", "import xml.dom.minidom\nxml.dom.minidom.Node.TEXT_NODE"),
    ("module alias", "import math as m", "m2 = m\nm2 is m"),
    ("underscore names", "_a = 1\n__b = 2", "_c = _a + __b\n_a = 5"),
    ("dunder name", "", "__version__ = '1'\n__name__"),
    ("shadowed builtin", "", "sum = 3\nlist = [sum]"),
    ("builtin shadowed before", "len = lambda x: 42", "n = len('a')"),
    ("unicode names", "é = 1", "π = é + 2\nprint('π', π)"),
    # --------------------------------------------------------------------- functions and classes
    ("function", "", "def f(a, *, b=2):\n    'doc'\n    return a + b\nf(1)"),
    ("function of the notebook", "k = 10\ndef f(a):\n    return a + k", "k = 20\nf(1)"),
    ("functions calling each other", "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)", "even(10), odd(10)"),
    ("recursion", "def fact(n): return 1 if n < 2 else n * fact(n - 1)", "fact(10)"),
    ("closure", "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up\nc = counter()", "values = [c(), c()]\nd = counter()\nd()"),
    ("lambda with default", "", "fs = [lambda x, i=i: x + i for i in range(3)]\n[f(1) for f in fs]"),
    ("decorator", "def twice(f):\n    return lambda *a: f(f(*a))", "@twice\ndef inc(n): return n + 1\ninc(1)"),
    ("generator function", "", "def g():\n    yield from range(3)\nlist(g())"),
    ("class", "class A:\n    n = 1\n    def m(self): return self.n\na = A()", "a.n = 5\nclass B(A): pass\nb = B()\nsame = isinstance(b, A), isinstance(a, A)\ndel a, b"),
    ("class identity at home", "class A: pass", "a = A()\nok = type(a) is A\ndel a"),
    ("dataclass", "from dataclasses import dataclass, replace\n@dataclass\nclass P:\n    x: int\n    y: list", "p = P(1, [2])\nq = replace(p, x=3)\np == P(1, [2])"),
    ("enum", "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2", "c = Color.RED\nc is Color(1)"),
    ("enum made there", "", "import enum\nclass Kind(enum.IntFlag):\n    A = 1\n    B = 2\nk = Kind.A | Kind.B"),
    ("namedtuple", "from collections import namedtuple\nP = namedtuple('P', 'x y')", "p = P(1, 2)\nPoint = namedtuple('Point', 'a')\nt = Point(3)"),
    ("class attribute", "class A:\n    log = []", "A.log.append(1)\nlen(A.log)"),
    ("super and property", "class A:\n    @property\n    def v(self): return 1", "class B(A):\n    @property\n    def v(self): return super().v + 1\nB().v"),
    ("partial and method", "import functools\ndef add(a, b): return a + b", "p3 = functools.partial(add, 3)\nv = p3(4)\ndel p3"),
    # ---------------------------------------------------------------------------- changed in place
    ("list changed", "v = [1]\nw = v", "v.append(2)"),
    ("list changed through an alias", "v = [1]\nw = v", "w.append(2)\nv is w"),
    ("nested change", "d = {'a': {'b': []}}", "d['a']['b'].append(1)\nd['c'] = 2"),
    ("set and deque", "from collections import deque\ns = {1}\nq = deque([1, 2], maxlen=2)", "s.add(2)\nq.append(3)"),
    ("two names share a part", "part = []\na = [part]\nb = {'p': part}", "part.append(1)\na[0] is part, b['p'] is part"),
    ("changed by a function", "log = []\ndef note(x): log.append(x)", "note(1)\nnote(2)"),
    ("array changed", "import numpy as np\na = np.zeros(4)\nview = a[1:3]", "a[1] = 7\na.sum()"),
    ("large array changed", "import numpy as np\na = np.zeros(100_000)", "a += 1\na[5] = 2\nfloat(a.sum())"),
    ("frame changed", "import pandas as pd\ndf = pd.DataFrame({'a': [1, 2]})", "df['b'] = df['a'] * 2\ndf.loc[0, 'a'] = 9"),
    ("estimator fitted", "import numpy as np\nfrom sklearn.linear_model import LinearRegression\nm = LinearRegression()\nX = np.arange(6.).reshape(3, 2)\ny = np.array([1., 2., 3.])", "m.fit(X, y)\nscore = round(m.score(X, y), 6)"),
    ("attribute of an instance", "class A: pass\na = A()\na.v = 1", "a.v += 1\na.w = [a.v]\nr = vars(a)\ndel a"),
    ("object in a list", "class A:\n    n = 0\n    def __repr__(self): return f'A{self.n}'\nitems = [A(), A()]\nfirst = items[0]", "items[0].n = 5\nfirst.n"),
    ("function attribute", "def f(): pass\nf.calls = 0", "f.calls += 1\nf.calls"),
    ("random state", "import random\nr = random.Random(3)", "v = r.random()"),
    ("iterator advanced", "it = iter([1, 2, 3])", "n = next(it)"),
    ("unchanged names", "a = [1]\nb = {2: 3}\nc = (4, [5])", "s = len(a) + len(b) + len(c)"),
    # -------------------------------------------------------------------------- the last expression
    ("last expression", "", "1 + 1"),
    ("last expression with semicolon", "", "1 + 1;"),
    ("semicolon and comment", "", "2 + 2;  # quiet"),
    ("None last", "", "None"),
    ("print last", "", "print(3)"),
    ("underscore", "41", "_ + 1"),
    ("last expression is a name", "v = [1]", "v.append(2)\nv"),
    ("string last", "", "'a\\nb'"),
    ("long list last", "", "list(range(2000))"),
    ("dict last", "", "{'a': list(range(40)), 'b': {'c': 'd' * 80}}"),
    ("rich repr", "", "class R:\n    def _repr_html_(self): return '<b>r</b>'\n    def __repr__(self): return 'R'\nR()"),
    ("mimebundle", "", "class R:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/plain': 'p', 'x/y': {'k': [1]}}\nR()"),
    ("repr raises", "", "class R:\n    def __repr__(self): raise ValueError('no repr')\nr = R()\ntry:\n    repr(r)\nexcept ValueError as e:\n    print(e)\ndel r"),
    ("frame shown", "import pandas as pd", "pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})"),
    ("assignment last", "", "x = 5"),
    ("function last", "", "def f(): pass\nf"),
    ("lock last", "import threading", "threading.Lock().locked\nthreading.get_ident() > 0"),
    # ------------------------------------------------------------------------------------- display
    ("display", "", "display(1, 'a', [2])"),
    ("display html and print", "from IPython.display import HTML", "print('before')\ndisplay(HTML('<i>i</i>'))\nprint('after')"),
    ("display metadata", "", "display({'text/plain': 'p'}, raw=True, metadata={'text/plain': {'k': 1}})"),
    ("display id and update", "", "h = display('one', display_id='some-id')\nh.update('two')\ndel h"),
    ("clear output", "from IPython.display import clear_output", "print('a')\nclear_output(wait=True)\nprint('b')\nclear_output()"),
    ("image bytes", "from IPython.display import Image", "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n0000', format='png', embed=True))"),
    ("markdown last", "from IPython.display import Markdown", "Markdown('*m*')"),
    ("display in a loop", "", "for i in range(20):\n    print(i)\n    display(i)"),
    ("pprint and textwrap", "from pprint import pprint", "pprint({'a': [1] * 40})"),
    # --------------------------------------------------------------------------------------- text
    ("partial line", "", "print('a', end='')\nprint('b', end='...')"),
    ("carriage return", "", "for i in range(3):\n    print(f'\\r{i}', end='', flush=True)\nprint()"),
    ("standard error", "import sys", "print('oops', file=sys.stderr)\nprint('fine')"),
    ("write and writelines", "import sys", "n = sys.stdout.write('four')\nsys.stdout.writelines(['a', 'b'])"),
    ("odd characters", "", "print('é ☃ \\U0001f600 \\x1b[31mred\\x1b[0m \\t|')\nprint('no line end', end='')"),
    ("much text", "", "for i in range(5000):\n    print(i, 'x' * 40)"),
    ("one long line", "", "print('y' * 300_000)"),
    ("raw writes", "import os", "print('a')\nn = os.write(1, b'raw\\n')\nprint('b')"),
    ("raw writes to standard error", "import os", "n = os.write(2, b'raw error\\n')"),
    ("subprocess", "import subprocess, sys", "r = subprocess.run([sys.executable, '-c', 'print(6 * 7)']).returncode"),
    ("logging", "import logging", "logging.getLogger('some').warning('careful')"),
    ("redirected", "import contextlib, io", "buffer = io.StringIO()\nwith contextlib.redirect_stdout(buffer):\n    print('kept')\nkept = buffer.getvalue()\ndel buffer"),
    ("encoding and isatty", "import sys", "sys.stdout.encoding.lower(), sys.stdout.isatty()"),
    # ------------------------------------------------------------------------------------ warnings
    ("warning", "import warnings", "x = 1\nwarnings.warn('watch out')\ny = 2"),
    ("warning in a function", "import warnings\ndef f():\n    warnings.warn('in f', UserWarning)", "f()\nf()"),
    ("warning in a loop", "import warnings", "for i in range(3):\n    warnings.warn('same')"),
    ("syntax warning", "", "x = 1\nx is 1"),
    ("deprecation", "import warnings", "warnings.warn('old', DeprecationWarning)"),
    ("numpy warning", "import numpy as np", "np.array([1.]) / np.array([0.])"),
    # ---------------------------------------------------------------------- IPython and its magics
    ("await", "import asyncio", "async def f():\n    await asyncio.sleep(0)\n    return 3\nv = await f()\nv"),
    ("async for and with", "", "async def g():\n    for i in range(3):\n        yield i\nout = [i async for i in g()]"),
    ("gather", "import asyncio", "r = await asyncio.gather(*(asyncio.sleep(0, i) for i in range(3)))"),
    ("capture", "", "%%capture got\nprint('hidden')\n1 + 1"),
    ("capture shown", "", "%%capture got --no-stderr\nprint('hidden')"),
    ("line time", "def f(): return 3", "%time f()"),
    ("cell time", "", "%%time\nv = 3\nprint(v)"),
    ("timeit", "def f(): return 3", "%timeit -n1 -r1 f()"),
    ("timeit result", "v = [1]", "t = %timeit -o -q -n1 -r1 len(v)\nok = t.loops\ndel t"),
    ("shell", "", "!echo hello"),
    ("shell with name", "word = 'hi there'", "!echo {word} $word"),
    ("shell result", "word = 'hi'", "out = !echo a; echo $word\nlist(out)"),
    ("shell fails", "", "!exit 3"),
    ("bash", "", "%%bash\necho one\necho two >&2"),
    ("bash out", "", "%%bash --out text\necho one"),
    ("writefile", "", "%%writefile some.txt\nfirst\nsecond"),
    ("matplotlib inline", "", "%matplotlib inline\nprint('set')"),
    ("question mark", "def f():\n    'its doc'", "f.__doc__"),
    ("unknown line magic", "", "%nosuchmagic"),
    ("unknown cell magic", "", "%%nosuchmagic\nx = 1"),
    ("pwd", "", "%pwd"),
    ("who", "some_name = 1", "some_name\n'some_name' in dir()"),
    ("get_ipython", "", "type(get_ipython()).__name__ != 'NoneType', get_ipython() is not None"),
    ("blank lines and comments", "", "\n\n# a comment\n\nx = 1\n\n"),
    ("empty", "", "\n"),
    ("only a comment", "", "# nothing"),
    ("indented as a whole", "", "    x = 1\n    print(x)"),
    ("multi-line string", "", 's = """\n%%gpu\n!ls\n"""\nprint(s)'),
    ("automagic name", "", "ls_ = 3\nls_"),
    # -------------------------------------------------------------------------------------- errors
    ("error", "", "x = 1\n1 / 0\ny = 2"),
    ("error with args", "", "raise ValueError('a', 2)"),
    ("names before an error", "v = [1]", "v.append(2)\nbefore = 1\nraise KeyError('k')\nafter = 1"),
    ("output before an error", "", "print('out', end='')\ndisplay('shown')\nraise RuntimeError('x')"),
    ("error in a function", "", "def inner(n):\n    return 1 / n\ndef outer():\n    return inner(0)\nouter()"),
    ("error in the notebook's function", "def inner(n):\n    a = 1\n    return a / n", "\ninner(0)"),
    ("error in a library", "import json", "json.loads('{')"),
    ("chained", "", "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('bad') from e"),
    ("in handling", "", "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['k']"),
    ("from none", "", "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('bad') from None"),
    ("suggestion", "alphabet = 1", "print(alphabt)"),
    ("attribute suggestion", "import math", "math.sqr(2)"),
    ("import error", "", "import no_such_module_at_all"),
    ("syntax error", "", "x = 1\ny = = 2"),
    ("indentation error", "", "if True:\nx = 1"),
    ("unclosed", "", "x = (1,\ny = 2"),
    ("tab error", "", "if True:\n        x = 1\n\ty = 2"),
    ("return outside", "", "x = 1\nreturn x"),
    ("break outside", "", "x = 1\nbreak"),
    ("null byte", "", "x = 'a\0b'"),
    ("syntax error at run time", "", "x = 1\nexec('y = = 2')"),
    ("type of its own", "class Mine(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a}-{b}')\n        self.a = a", "raise Mine(1, 2)"),
    ("type made there", "", "class Local(ValueError): pass\nraise Local('here')"),
    ("error in a property repr", "", "class E(Exception):\n    def __str__(self): return 'line one\\nline two'\nraise E"),
    ("group", "", "raise ExceptionGroup('many', [ValueError(1), KeyError('k')])"),
    ("note", "", "e = ValueError('v')\ne.add_note('a note')\nraise e"),
    ("assert", "v = 3", "assert v == 4, f'v is {v}'"),
    ("recursion error", "", "def f(): return f()\nf()"),
    ("keyboard interrupt raised", "", "print('a')\nraise KeyboardInterrupt"),
    ("system exit", "import sys", "print('a')\nsys.exit(3)"),
    ("system exit with text", "import sys", "x = 1\nsys.exit('stop here')"),
    ("exit", "", "exit"),
    ("stop iteration", "", "next(iter([]))"),
    ("os error", "", "open('no/such/file')"),
    ("await error", "import asyncio", "async def f():\n    raise ValueError('in f')\nawait f()"),
    ("magic error", "", "%cd /no/such/dir/at/all"),
    ("cell magic body error", "", "%%time\nx = 1\n1 / 0"),
    ("capture body error", "", "%%capture\n1 / 0"),
    ("frozen error", "", "class F(Exception):\n    __slots__ = ()\nraise F('slots')"),
    # ------------------------------------------------------------------------------- surroundings
    ("directory, path, arguments", "import os, sys", "os.getcwd(), sys.path, sys.argv"),
    ("environment", "import os\nos.environ['SOME_VARIABLE'] = 'set'", "os.environ['SOME_VARIABLE']"),
    ("file written", "", "with open('note.txt', 'w') as f:\n    n = f.write('text')\ndel f"),
    ("globals and locals", "a = 1", "'a' in globals(), 'a' in vars()"),
    ("main module", "", "import __main__\n__name__, __main__.__name__"),
    ("main sees names", "a = 5", "import sys\nmain = sys.modules['__main__']\na, main.a"),
    ("In and Out", "", "type(In).__name__, type(Out).__name__"),
    ("threads", "import threading", "out = []\nt = threading.Thread(target=out.append, args=(1,))\nt.start()\nt.join()\ndel t"),
    ("thread prints", "import threading", "t = threading.Thread(target=print, args=('from a thread',))\nt.start()\nt.join()\ndel t"),
    ("multiprocessing", "import multiprocessing", "with multiprocessing.get_context('fork').Pool(2) as pool:\n    r = pool.map(abs, [-1, -2])\ndel pool"),
    ("annotations", "", "def f(x: int) -> 'str': ...\nf.__annotations__"),
    ("doctest-like prompt", "", ">>> x = 1\n>>> x + 1"),
    ("figure", "import matplotlib.pyplot as plt", "fig, ax = plt.subplots()\nax.plot([1, 2])\ndel fig, ax"),
]


def _normal(text: Any) -> Any:
    """Without what differs from run to run, be it plain or not."""
    if isinstance(text, str):
        text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
        text = re.sub(r"\bIn\[\d+\]", "In[n]", text)
        text = re.sub(r"ipykernel_\d+/\d+\.py|\b\d{6,}\.py", "file.py", text)
        text = re.sub(r"\d+(\.\d+)?(e[+-]\d+)? ?(ns|[μu]s|ms|s)\b", "time", text)
        text = re.sub(r"^%%gpu$", "#%%gpu", text, flags=re.M)
        return re.sub(r"\b1 #?%%gpu$", "1 #%%gpu", text, flags=re.M)
    if isinstance(text, dict):
        return {key: _normal(each) for key, each in text.items()}
    if isinstance(text, (list, tuple)):
        return [_normal(each) for each in text]
    return text


def _seen(result: Result, names: dict[str, str]) -> dict[str, Any]:
    counts = {content["execution_count"] - result.count for content in result.of("execute_result")}
    return _normal(
        {
            "outputs": result.outputs(),
            "counts": list(counts),
            "status": result.status,
            "error": (result.ename, result.evalue),
            "traceback": result.traceback,
            "names": names,
        }
    )


def _run(cell: Kernel, before: str, body: str, first: str) -> dict[str, Any]:
    cell.ok("_look['forget']()")
    if before:
        cell.ok(before)
    result = cell(f"{first}{body}")
    return _seen(result, cell.value("_look['names']()"))


@pytest.mark.parametrize(
    ("what", "before", "body"),
    [
        pytest.param(
            *each,
            id=each[0].replace(" ", "-"),
            marks=pytest.mark.xfail(reason=DIFFERENCES[each[0]]) if each[0] in DIFFERENCES else (),
        )
        for each in SNIPPETS
    ],
)
def test_does_what_a_plain_cell_does(cell: Kernel, what: str, before: str, body: str) -> None:
    nested = body.startswith("%%")
    plain = _run(cell, before, body, "" if nested else "#%%gpu\n")
    under = _run(cell, before, body, "%%gpu\n")
    assert under == plain
