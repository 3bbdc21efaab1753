"""The rules of `name_analysis`, one by one, and then against what Python really looks up."""

from __future__ import annotations

import ast
import asyncio
import inspect
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from gpunb.notebook.name_analysis import CellNames, analyse


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# (cell, names read, names bound)
PLAIN = [
    # loads and plain bindings
    ("", "", ""),
    ("x", "x", ""),
    ("x = 1", "", "x"),
    ("x = y", "y", "x"),
    ("x = x + 1", "x", "x"),
    ("x = 1\nprint(x)", "print", "x"),
    ("print(x)\nx = 1", "print x", "x"),
    ("x = y = z", "z", "x y"),
    ("x, (y, *z) = w", "w", "x y z"),
    ("[x, y] = y, x", "x y", "x y"),
    ("x.a = 1", "x", ""),
    ("x[0] = 1", "x", ""),
    ("x[i:j, k] = 1", "x i j k", ""),
    ("x = 1\nx.a = y", "y", "x"),
    ("x = x.y = z", "z", "x"),
    ("x.y = x = z", "x z", "x"),
    ("x.y.z(a, *b, c=d, **e)", "x a b d e", ""),
    ("tot += 1", "tot", "tot"),
    ("tot = 0\ntot += n", "n", "tot"),
    ("x.a += y", "x y", ""),
    ("x[i] += y", "x i y", ""),
    ("x: int", "int", ""),
    ("x: int = y", "int y", "x"),
    ("x: x = 1", "", "x"),
    ("x: list[a] | None = None", "list a", "x"),
    ("x.a: t = y", "x t y", ""),
    ("x: 'Later' = y", "y", "x"),
    ("from __future__ import annotations\nx: t = y\ndef f(a: b) -> c: ...", "y", "annotations x f"),
    ("from __future__ import division\nx: t = y", "t y", "division x"),
    ("list = [1]\nlist(x)", "x", "list"),
    ("__name__, _, __, _3, In, Out, exit, quit", "__name__ _ __ _3 In Out exit quit", ""),
    ("assert x, y", "x y", ""),
    ("raise x from y", "x y", ""),
    ("'a name in a string'", "", ""),
    ("f'{x!r:>{width}.{digits}}'", "x width digits", ""),
    ("f'{x}' f'{(y := z)}'\ny", "x z", "y"),
    ("{a: b, **c}, {d}, [*e], (f,)", "a b c d e f", ""),
    ("{(y := a): y, b: c}", "a y b c", "y"),
    ("{a: y, (y := b): c}", "a y b c", "y"),
    # what imports bind
    ("import a", "", "a"),
    ("import a.b.c", "", "a"),
    ("import a.b as c", "", "c"),
    ("import a, b.c as d", "", "a d"),
    ("from a.b import c, d as e", "", "c e"),
    ("import a\na.f(x)", "x", "a"),
    ("a.f()\nimport a", "a", "a"),
    # branches and loops
    ("if c:\n    x = 1\nprint(x)", "c x print", "x"),
    ("if c:\n    x = 1\n    print(x)", "c print", "x"),
    ("if c:\n    x = 1\nelse:\n    x = 2\nx", "c", "x"),
    ("if c:\n    x = 1\nelif d:\n    x = 2\nx", "c d x", "x"),
    ("for i in n:\n    x = i\nelse:\n    y = i\nx, y", "n i x y", "i x y"),
    ("for i in i:\n    i", "i", "i"),
    ("for i in n:\n    print(i, last)\n    last = i", "n print last", "i last"),
    ("for x.a, y[z] in n: pass", "x y z n", ""),
    ("for i in n:\n    if c: break\nelse:\n    d", "n c d", "i"),
    ("while c:\n    c = f(c)", "c f", "c"),
    ("while (c := f()):\n    c\nc", "f", "c"),
    ("while True:\n    x = 1\n    break\nx", "x", "x"),
    ("x = a if (c := b) else c", "a b", "x c"),
    ("a and (x := b) and x\nx", "a b x", "x"),
    ("(x := a) and b\nx", "a b", "x"),
    ("a < (x := b) < x\nx", "a b x", "x"),
    ("x if c else y", "x c y", ""),
    # with
    ("with f() as x:\n    y = x\ny", "f y", "x y"),
    ("with a as x, x.b() as (y, *z):\n    x, y, z", "a", "x y z"),
    ("with a as x.b:\n    pass", "a x", ""),
    ("with suppress(E):\n    x = f()\nx", "suppress E f x", "x"),
    # try
    ("try:\n    x = f()\nexcept E:\n    pass\nx", "f E x", "x"),
    ("try:\n    x = f()\nexcept E:\n    x = 0\nx", "f E", "x"),
    ("try:\n    x = f()\nexcept E:\n    y = x", "f E x", "x y"),
    ("try:\n    f()\nexcept E:\n    x = 1\nelse:\n    x = 2\nx", "f E", "x"),
    ("try:\n    x = f()\nfinally:\n    x", "f x", "x"),
    ("try:\n    f()\nfinally:\n    x = 1\nx", "f", "x"),
    ("try:\n    f()\nexcept* E:\n    x\nx = 1", "f E x", "x"),
    # match
    ("match x:\n    case y: pass\ny", "x y", "y"),
    ("match x:\n    case [a, *b] if c: d = a, b", "x c", "a b d"),
    ("match x:\n    case {'k': a, **rest}: a, rest", "x", "a rest"),
    ("match x:\n    case C(a, k=b) | D.E(a, b): f(a, b)", "x C D f", "a b"),
    ("match x:\n    case m.v | 1 | None: pass\n    case _: y = 1", "x m", "y"),
    ("match x:\n    case [*_] | {**kw} as whole: whole", "x", "kw whole"),
    ("match x:\n    case 1: a = 1\n    case 2: a", "x a", "a"),
    # functions
    ("def f(): return g(x)", "g x", "f"),
    ("def f(): return f()", "", "f"),
    ("@d\ndef f(): return f()", "d f", "f"),
    ("@d(e)\ndef f(): pass", "d e", "f"),
    ("def f(a, /, b, *c, d, **e): return a, b, c, d, e, g", "g", "f"),
    ("def f(a=x, *, b=y): pass", "x y", "f"),
    ("def f(a: A, *b: B, c: C | None, **d: D) -> E: pass", "A B C D E", "f"),
    ("def f(a: f): pass", "f", "f"),
    ("def f():\n    x: T = y\n    return x", "y", "f"),
    ("def f():\n    x = 1\n    return x, y", "y", "f"),
    ("def f():\n    print(x)\n    x = 1", "print", "f"),
    ("def f():\n    import a.b, c as d\n    from e import g\n    a, d, g", "", "f"),
    ("def f():\n    for i in n: i\n    with w as x: x\n    del x", "n w", "f"),
    ("def f():\n    try: g()\n    except E as e: e\n    return e", "g E", "f"),
    ("def f():\n    match x:\n        case [a, *b] | {'k': a, **b}: return a, b", "x", "f"),
    ("def f():\n    global x\n    x = y", "x y", "f x"),
    ("def f():\n    global x\n    return x", "x", "f"),
    ("def f():\n    global x\n    x += 1", "x", "f x"),
    (
        "def f():\n    global m, g, C\n    import m\n    def g(): ...\n    class C: ...",
        "m g C",
        "f m g C",
    ),
    ("def f():\n    global x\n    def g(): return x\n    for x in y: pass", "x y", "f x"),
    ("def f():\n    x = 1\n    def g():\n        global x\n        return x", "x", "f"),
    ("def f():\n    def g():\n        global x\n        x = 1", "x", "f x"),
    ("def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1", "", "f"),
    ("def f():\n    x = 1\n    def g(y): return lambda z: (w, x, y, z)", "w", "f"),
    ("def f(x):\n    def g(): return h(x)\n    def h(y): return k(y)", "k", "f"),
    ("def f():\n    [y := x for x in xs]\n    return y", "xs", "f"),
    ("x = 1\ndef f(): return x", "", "x f"),
    ("x = 1\ndef f():\n    global x\n    x += y", "y", "x f"),
    ("def f(): return x\nx = 1", "x", "f x"),
    ("if c: x = 1\ndef f(): return x", "c x", "x f"),
    ("def f(): return g()\ndef g(): return f()", "g", "f g"),
    ("def f():\n    yield x\n    yield from y\n    return (yield)", "x y", "f"),
    ("f = lambda a, *b, c=x, **d: (a, b, c, d, e)", "x e", "f"),
    ("f = lambda: (y := x) + y", "x", "f"),
    ("f = lambda n: f(n - 1)", "f", "f"),
    # classes
    ("class C(B, metaclass=M, k=v): pass", "B M v", "C"),
    ("@d\nclass C: pass", "d", "C"),
    ("class C:\n    a = x\n    b = a", "x", "C"),
    ("class C:\n    x = x", "x", "C"),
    ("class C:\n    if c: x = 1\n    y = x", "c x", "C"),
    ("class C:\n    x = 1\n    del x\n    y = x", "x", "C"),
    ("class C:\n    x = 1\n    def f(self): return x", "x", "C"),
    ("class C:\n    x = 1\n    def f(self, y=x): return y", "", "C"),
    ("class C:\n    x: T = y\n    z: x", "T y", "C"),
    ("class C:\n    xs = [1]\n    ys = [x for x in xs if x in xs]", "xs", "C"),
    ("class C:\n    xs = [1]\n    ys = [x for x in xs]", "", "C"),
    ("class C:\n    def f(self): return C", "C", "C"),
    ("class C:\n    def f(self): return super().f(__class__)", "super __class__", "C"),
    ("class C:\n    global x\n    x = 1\n    y = x", "x", "C x"),
    ("class C:\n    try: f()\n    except E as e: e\n    e", "f E e", "C"),
    ("class C:\n    class D(x): y = z\n    D, y", "x z y", "C"),
    ("def f(x):\n    class C:\n        x = x\n        y = g", "x g", "f"),
    ("def f(x):\n    class C:\n        def g(self): return x", "", "f"),
    ("def f(x):\n    class C:\n        x = 1\n        def g(self): return x", "", "f"),
    ("C = 1\nclass C(C): pass", "", "C"),
    # comprehensions
    ("[x for x in xs]", "xs", ""),
    ("[x for x in x]", "x", ""),
    ("x, [x for x in xs]", "x xs", ""),
    ("{k: v for k, v in d if c}", "d c", ""),
    ("{f(x, y) for x in xs for y in x.ys if y}", "f xs", ""),
    ("(g(x) for x in xs)", "g xs", ""),
    ("[[a for a in b] for b in c if a]", "c a", ""),
    ("[lambda: x + y for x in xs]", "y xs", ""),
    ("[x for a in b for x in f(x)]", "b f", ""),
    ("[y := f(x) for x in xs]\ny", "f xs y", "y"),
    ("[y for x in xs if (y := f(x))]", "f xs", "y"),
    ("any((hit := x) for x in xs)", "any xs", "hit"),
    ("[x.y for x.a in xs]", "x xs", ""),
    # walrus
    ("if (n := f(x)) > n: n", "f x", "n"),
    ("print(n, n := 1)", "print n", "n"),
    ("f(n := 1, n)", "f", "n"),
    # async
    ("await x", "x", ""),
    ("x = await f(y)\nx", "f y", "x"),
    ("async for i in x:\n    j = i", "x", "i j"),
    ("async with a as b:\n    await b", "a", "b"),
    ("[await f(x) async for x in y if await z]", "f y z", ""),
    ("async def f(x=y):\n    async with x as a: return await a, b", "y b", "f"),
    ("@d\nasync def f(): await f()", "d f", "f"),
]

# (cell, names read, names bound, names that may be gone)
DELETING = [
    ("del x", "x", "", "x"),
    ("x = 1\ndel x", "", "x", "x"),
    ("del x\nx = 1", "x", "x", ""),
    ("del x\nif c: x = 1", "x c", "x", "x"),
    ("if c:\n    del x", "c x", "", "x"),
    ("if c:\n    del x\nimport x", "c x", "x", ""),
    ("del x, (y, z)", "x y z", "", "x y z"),
    ("del x.a, y[i]", "x y i", "", ""),
    ("try:\n    f()\nexcept E as e:\n    e", "f E", "", "e"),
    ("try:\n    f()\nexcept E as e:\n    pass\ne", "f E e", "", "e"),
    ("try:\n    f()\nexcept E as e:\n    e = 1", "f E", "e", "e"),
    ("try:\n    f()\nexcept (E, F) as e:\n    err = e", "f E F", "err", "e"),
    ("e = 1\ntry:\n    f()\nexcept E as e:\n    pass\ne", "f E", "e", "e"),
    ("try:\n    f()\nexcept E as e:\n    pass\ne = 1", "f E", "e", ""),
    ("try:\n    f()\nexcept* E as e:\n    e", "f E", "", "e"),
    ("for i in n:\n    i\ndel i", "n i", "i", "i"),
    ("def f():\n    del x", "", "f", ""),
    ("def f():\n    global x\n    del x\nf()", "x", "f", "x"),
    ("class C:\n    del x", "x", "C", ""),
]


@pytest.mark.parametrize(("cell", "reads", "binds"), PLAIN, ids=[case[0] for case in PLAIN])
def test_reads_and_binds_are_found(cell: str, reads: str, binds: str) -> None:
    expected = CellNames(words(reads), words(binds), frozenset(), (), frozenset(), frozenset())
    assert replace(analyse(cell), imports=frozenset(), attributes=frozenset()) == expected


@pytest.mark.parametrize(
    ("cell", "reads", "binds", "deletes"), DELETING, ids=[case[0] for case in DELETING]
)
def test_deletes_are_found(cell: str, reads: str, binds: str, deletes: str) -> None:
    deleted = words(deletes)
    expected = CellNames(words(reads), words(binds), deleted, (), frozenset(), frozenset())
    assert replace(analyse(cell), attributes=frozenset()) == expected


def test_attributes_are_found_everywhere() -> None:
    cell = "a.b.c(x.d, [f.e for f in g.h])\ndef i(): a.j = 1\nclass C: k = l.m[n].o"
    assert analyse(cell).attributes == words("b c d e h j m o")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
@pytest.mark.parametrize(
    ("cell", "reads", "binds"),
    [
        ("def f[T: B](x: T) -> C[T]: return T, g", "B C g", "f"),
        ("class D[*Ts](B[Ts]):\n    def f(self, *x: *Ts): return Ts", "B", "D"),
        ("def f[T](x: U): return T\nT", "U T", "f"),
        ("type L = list[L] | x", "list x", "L"),
    ],
)
def test_type_parameters_are_not_the_cells(cell: str, reads: str, binds: str) -> None:
    names = analyse(cell)
    assert (names.reads, names.binds) == (words(reads), words(binds))


@pytest.mark.parametrize(
    ("cell", "modules"),
    [
        ("from m import *", ("m",)),
        ("from a.b import *\nfrom c import *\nfrom a.b import *", ("a.b", "c")),
        ("if c:\n    from . import *\n    from ..m import *", (".", "..m")),
    ],
)
def test_star_imports_are_listed_by_module(cell: str, modules: tuple[str, ...]) -> None:
    names = analyse(cell)
    assert names.star_imports == modules
    assert names.binds == frozenset()


@pytest.mark.parametrize(
    ("cell", "modules"),
    [
        ("import a.b.c, d, e.f as g", "a.b.c e.f"),
        ("from a.b import c\nfrom d import e\nfrom f.g import *", "a.b f.g"),
        ("if c:\n    import a.b\ntry:\n    import d.e\nexcept ImportError: pass", "a.b d.e"),
        ("from .a.b import c\nfrom . import d", ""),
        ("def f():\n    import a.b\nclass C:\n    import d.e", ""),
        ("get_ipython().run_cell_magic('time', '', 'import a.b')", "a.b"),
    ],
)
def test_modules_within_packages_are_listed(cell: str, modules: str) -> None:
    assert analyse(cell).imports == words(modules)


def test_a_star_import_hides_no_read() -> None:
    assert analyse("from m import *\nf(x)").reads == {"f", "x"}


@pytest.mark.parametrize("cell", ["x =", "if x:", "def f(:", "%time x", "  x = 1\n y"])
def test_a_syntax_error_is_raised(cell: str) -> None:
    with pytest.raises(SyntaxError):
        analyse(cell)


def test_warnings_are_left_to_the_run() -> None:
    assert analyse(r"'\d'; x is 1").reads == {"x"}  # pytest makes errors of warnings


def test_the_value_is_frozen_and_hashable() -> None:
    names = analyse("x = y")
    assert hash(names) == hash(analyse("x = y"))
    with pytest.raises(AttributeError):
        names.reads = frozenset()  # type: ignore[misc]


def test_the_module_does_not_import_ipython() -> None:
    code = "import sys, gpunb.notebook.name_analysis; print('IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---------------------------------------------------------------------------------------- magics

transform = TransformerManager().transform_cell

# (cell as typed, names read besides get_ipython, names bound, names mentioned)
MAGICS = [
    # line magics
    ("%timeit f(x)", "", "", "f x"),
    ("%timeit -n 10 -r3 -q f(x)", "", "", "f x n r3 q"),
    ("%timeit y = f(x)", "", "", "y f x"),
    ("%timeit -o f(x)\nx", "x", "", "o f"),
    ("t = %timeit -o f(x)", "", "t", "o f x"),
    ("%timeit -q -v t f(x)", "", "t", "q v t f x"),
    ("x = 1\n%timeit f(x)", "", "x", "f"),
    ("if c:\n    x = 1\n%timeit f(x)", "c", "x", "f x"),
    ("%time x = f(y)\nx", "", "x", "x f y"),
    ("%time x, y = f(); z = x", "", "x y z", "x y z f"),
    ("%time --no-raise-error x = f()\nx", "x", "x", "no error f"),
    ("r = %time f(x)", "", "r", "f x"),
    ("%time f(lambda a: a.b)", "", "", "f a b"),
    ("%time -x + y", "", "", "x y"),
    ("%time del x", "", "", "x"),
    ("%time", "", "", ""),
    ("%time !ls {x}", "", "", "ls x"),
    ("%prun -s cumulative -l 5 x = f(y)", "", "x", "s cumulative l x f y"),
    ("%memit -r 1 x = f(y)", "", "x", "r x f y"),
    ("%matplotlib inline", "", "", "inline"),
    ("%env A=$x", "", "", "A x"),
    ("%cd {path}", "", "", "path"),
    ("f?", "", "", "f"),
    ("f??", "", "", "f"),
    ("for i in n:\n    %time x = f(i)\nx", "n x", "i x", "f"),
    ("def f(a):\n    %time b = g(a)\n    !ls {c}", "", "f", "b g a ls c"),
    ("%time x = not python", "", "x", "x python"),
    ("%time x = = 1", "", "", "x"),
    # shell commands
    ("!cmd {x} $y", "", "", "cmd x y"),
    ("!cmd {x[k] + f(z)} $$HOME", "", "", "cmd x k f z HOME"),
    ("out = !cmd {x}", "", "out", "cmd x"),
    ("out, = !cmd\nout", "", "out", "cmd"),
    ("!!cmd $x", "", "", "cmd x"),
    ("x = 1\n!cmd {x}", "", "x", "cmd"),
    ("x\n!cmd {x}", "x", "", "cmd"),
    ("!cmd {x}\nx = 1", "", "x", "cmd x"),
    # cell magics that run Python
    ("%%time\nx = f(y)\nx", "f y", "x", ""),
    ("%%time\ndel x", "x", "", ""),
    ("%%time\nimport a.b\nfrom m import c", "", "a c", ""),
    ("%%time --no-raise-error\nx = f(y)", "f y", "x", ""),
    ("%%time\nx = await f(y)", "f y", "x", ""),
    ("%%time\n!cmd {x}\n%timeit f(y)", "", "", "cmd x f y"),
    ("%%time\n%%capture out\nx = f(y)", "f y", "out x", ""),
    ("%%timeit\nx = f(y)", "f y", "", ""),
    ("%%timeit -n 3 x = setup(n)\nf(x, z)", "setup n f z", "", ""),
    ("%%timeit -v t\nf(x)", "f x", "t", ""),
    ("%%timeit\ntot += x", "x", "", ""),
    ("%%timeit\nglobal x\nx = f(y)", "x f y", "x", ""),
    ("%%prun -q -T file x = f(y)\nz = x", "f y", "x z", ""),
    ("%%memit\nx = f(y)", "f y", "x", ""),
    ("%%capture\nx = f(y)", "f y", "x", ""),
    ("%%capture out\nx = f(y)", "f y", "out x", ""),
    ("%%capture out --no-stderr\nout.show(x)", "out x", "out", ""),
    ("%%capture --no-display out\nx", "x", "out", ""),
    ("%%capture out\nx = = y", "", "out", "out x y"),
    # cell magics that do not
    ("%%bash\necho $x {y} | grep if", "", "", "echo x y grep"),
    ("%%bash -s {x}\necho", "", "", "s x echo"),
    ("%%bash --out x --err=y\necho", "", "x y", "out x err y echo"),
    ("%%script --bg --proc p --out o sh\nls", "", "p o", "bg proc p out o sh ls"),
    ("%%sx --out=x\nls", "", "x", "out x ls"),
    ("%%html\n<b>bold</b>", "", "", "b bold"),
    ("%%writefile a.py\nx = y", "", "", "a py x y"),
    ("%%mystery opt\nx = f(y)", "", "", "opt x f y"),
]


@pytest.mark.parametrize(
    ("cell", "reads", "binds", "mentioned"), MAGICS, ids=[case[0] for case in MAGICS]
)
def test_magics_are_analysed_as_ipython_transforms_them(
    cell: str, reads: str, binds: str, mentioned: str
) -> None:
    source = transform(cell)
    assert "get_ipython()" in source
    names = analyse(source, transform)
    assert names.reads - {"get_ipython"} == words(reads)
    assert names.binds == words(binds)
    assert names.mentioned == words(mentioned)


def test_deletes_come_out_of_magics() -> None:
    assert analyse(transform("%%time\ndel x"), transform).deletes == {"x"}
    assert analyse(transform("%time del x"), transform).deletes == {"x"}
    assert analyse(transform("%timeit del x"), transform).deletes == frozenset()


def test_get_ipython_is_read_like_any_name() -> None:
    assert analyse(transform("!ls")).reads == {"get_ipython"}


def test_without_transform_plain_bodies_are_still_analysed() -> None:
    names = analyse(transform("%%time\nx = f(y)"))
    assert (names.reads, names.binds) == ({"get_ipython", "f", "y"}, {"x"})


@pytest.mark.parametrize(
    ("cell", "mentioned"),
    [
        ("'a' in globals(), vars()['b'], locals().get('c')", "a b c"),
        ("eval('a + 1')\nexec(f'b = {c} + d')", "a b d"),
        ("def f():\n    return eval('a')", "a"),
        ("dir(), 'a', b'b', 3", "a"),
        ("model.eval('a')", ""),
        ("eval = print\neval('a')", ""),
        ("b = 1\neval('a + b')", "a"),
        ("x = 'a'", ""),
    ],
)
def test_strings_mention_where_names_are_looked_up_by_their_text(cell: str, mentioned: str) -> None:
    assert analyse(cell).mentioned == words(mentioned)


def test_without_transform_other_bodies_are_only_mentioned() -> None:
    names = analyse(transform("%%time\nx = f(y)\n!ls"))
    assert (names.binds, names.mentioned) == (frozenset(), {"x", "f", "y", "ls"})


def test_a_transform_that_refuses_costs_only_precision() -> None:
    def refuse(body: str) -> str:
        raise SyntaxError(body)

    names = analyse("get_ipython().run_cell_magic('time', '', 'x = y')", refuse)
    assert names.mentioned == {"x", "y"}


@pytest.mark.parametrize(
    "cell",
    [
        "get_ipython().run_line_magic('time', statement)",
        "get_ipython().run_cell_magic('time', '', body=text)",
        "get_ipython().system(*words)",
        "get_ipython().user_ns['x']",
        "os.system('ls x')",
    ],
)
def test_other_calls_are_ordinary_python(cell: str) -> None:
    assert analyse(cell).mentioned == frozenset()


def test_cell_magics_inside_functions_only_mention() -> None:
    cell = "def f():\n    get_ipython().run_cell_magic('time', '', 'x = y')"
    assert (analyse(cell).binds, analyse(cell).mentioned) == ({"f"}, {"x", "y"})


# ------------------------------------------------------------- against what Python really looks up


class TooLong(BaseException):
    """A generated program looked up more names than any terminating one needs."""


class Namespace(dict[str, Any]):
    """A namespace that remembers which names were looked up before the code bound them.

    A `global` in a function and a walrus in a comprehension make Python bind a name past
    `__setitem__`. Such a name was bound before if its value is another one than at first, and of
    one that is missing nothing is known.
    """

    def __init__(self, source: str, before: dict[str, Any]) -> None:
        super().__init__(before)
        self.before = before
        self.unseen = set(re.findall(r"\w+(?= :=)|(?<=global )\w+", source))
        self.bound: set[str] = set()
        self.looked_up: set[str] = set()
        self.patience = 3000

    def __getitem__(self, name: str) -> Any:
        self.patience -= 1
        if self.patience < 0:
            raise TooLong
        missing, initial = name not in self, self.get(name) is self.before.get(name)
        if name not in self.bound and initial and not (missing and name in self.unseen):
            self.looked_up.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.bound.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.bound.add(name)


def plain(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("__")}


def check(source: str, before: dict[str, Any], *may_raise: type[BaseException]) -> Namespace:
    """Run a program, and compare what it did to its namespace with what was told of it."""
    names, space = analyse(source), Namespace(source, before)
    code = compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    try:
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, space))
        else:
            exec(code, space)
    except may_raise:
        pass  # what was looked up and bound until then counts
    else:
        assert plain(before.keys() - space.keys()) <= names.deletes
    assert plain(space.looked_up) <= names.reads
    bound = {name for name in space if space.get(name) is not before.get(name)}
    assert plain(bound | space.bound) <= names.binds | names.deletes
    return space


SNIPPETS = [
    "y = x\nx = 1\nz = x + y",
    "x += 1\nn = [x for _ in range(x)]",
    "def f(n): return 1 if n == 0 else n * f(n - 1)\nr = f(x)",
    "def f(): return g()\ndef g(): return x\nr = f()",
    "try: 1 / 0\nexcept ArithmeticError as e: r = str(e)\nelse: x\nfinally: s = 1",
    "try:\n    1 / 0\nexcept ZeroDivisionError as x:\n    pass",
    "for i in range(x):\n    if i > 5: break\n    last = i\nelse:\n    i = None\nr = i, last",
    "while x:\n    x -= 1\n    t = x\nr = t",
    "import contextlib\nwith contextlib.suppress(ValueError):\n    int('a')\n    r = 1\nr = r",
    "class A:\n    k = x\n    def f(self): return x + self.k\nr = A().f()",
    "class M(type): pass\nclass A(metaclass=M): pass\nr = type(A) is M",
    "class A:\n    x = x + 1\n    ys = [x for _ in 'ab']\nr = A.ys",
    "def f():\n    global x\n    x = x + 1\nf()\nr = x",
    "def deco(fn):\n    fn(0)\n    return fn\n@deco\ndef x(n): return x\nr = x",
    "r = [(y := i) for i in range(x)]\ns = y",
    "r = {k: v for k, v in d.items() if v in d.values()}",
    "r = f'{x:>{w}}'\nw = 1",
    "match d:\n    case {'a': a, **rest}: r = a, rest\n    case _: r = None",
    "match [x, w, 3]:\n    case [a, *b] if a: r = b",
    "match x:\n    case int() | str(): r = x",
    "del x\nx = 2",
    "del x, d['a']",
    "d['b'] = x\nd['a'] += w\nr = d",
    "from math import pi as p, e\nimport os.path, json as j\nr = os.path.join(j.dumps(p), 'a')",
    "a = b = c = x\n(a, [b, *c]) = 1, (2, 3)\nr = a, b, c",
    "r = (lambda a, *b, k=x, **c: (a, b, k, w))(1)",
    "def f(n=x):\n  def g():\n    nonlocal n\n    n += w\n    return n\n  return g()\nr = f()",
    "x: int = 3\ny: list[int]\nr = x",
    "def f(a: d = x) -> w: return a\nr = f()",
    "r = x if w else later\nlater = 1",
    "r = w < x < 9 and (q := x) and q",
    "import asyncio\nawait asyncio.sleep(0)\nr = x",
    "async def g(): yield x\nr = [i async for i in g() if i < w]\nasync for j in g(): s = j\ns",
    "from contextlib import AsyncExitStack\nasync with AsyncExitStack() as s: r = s, x\nt = r",
    "assert (y := x), w\nr = y",
    "r = sorted([3, 1], key=lambda v: -v * x)\nlist = r\nr = list",
    "try:\n    raise ExceptionGroup('g', [ValueError(x)])\nexcept* ValueError as eg:\n    r = eg",
    "r = any((hit := n) > 1 for n in range(x))\ns = hit",
    "def f(x=x): return x\nx = f",
    "x = lambda: x\nr = x()",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_what_python_looks_up_is_read(source: str) -> None:
    check(source, {"x": 3, "w": 4, "d": {"a": 1, "b": 2}, "r": 0})


def test_the_check_sees_what_is_looked_up_and_bound() -> None:
    space = check("y = x\nx = len([x])\ndef f(): return x, y\nf()", {"x": 3})
    assert (space.looked_up, space.bound) == ({"x", "len"}, {"x", "y", "f"})


class Chance:
    """Can be called, iterated, entered, compared, indexed; whether it is true, Python must ask."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def __bool__(self) -> bool:
        return self.dice.random() < 0.6

    def __call__(self, *_: object, **__: object) -> Chance:
        if self.dice.random() < 0.02:
            raise ValueError
        return self

    def __iter__(self) -> Iterator[Chance]:
        return iter([self] * self.dice.randrange(3))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not TooLong and bool(self)

    def __format__(self, _: str) -> str:
        return ""

    __add__ = __delitem__ = __enter__ = __getattr__ = __getitem__ = __lt__ = __radd__ = __call__
    __setitem__ = __call__


# N, E and B stand for a name, an expression, an indented block; no name or block is local to two.
EXPRESSIONS = """
N
N
N
N(E)
(N := E)
(E and E)
(E or E or E)
(E if E else E)
(E < E < E)
(E + E)
E[E]
[E for N in N]
[E for N in N if E for N in N]
{E: E for N in N if (N := N)}
next(iter(E for N in N))
(lambda N=E: E)
(lambda *N: E)()
{N: E, N: E, **E}
f'{E:{E}}'
"""
STATEMENTS = """
N = E
N = N = E
N, *N = E
N += E
N.attr = E
N[E] += E
N: E = E
N: E
del N
import math as N
E
N()
assert E, E
raise ValueError(E)
if E:/B/else:/B
if E:/B
for N in E:/B/else:/B
for N in E:/B/    if E: break/B
for N in E:/B/    if E: continue/B
while E:/B
with E as N, E as N:/B
try:/B/except E as N:/B/else:/B/finally:/B
try:/B/except ValueError as N:/B/except Exception:/B
try:/B/finally:/B
match E:/    case [N, *N]:/    B/    case N if E:/    B
def N(N=E, *, k: E = E) -> E:/B/    return E
def N(*_):/B/    return E
def N(*_):/    global N/B
@E/def N(*_):/B
class N:/B
class N(metaclass=E):/B
"""


class Author:
    """Writes programs over a few names, at random."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def fill(self, template: str, depth: int) -> str:
        parts = {"N": self.name, "E": self.expression}
        return re.sub(r"\b[NE]\b", lambda part: parts[part[0]](depth - 1), template)

    def name(self, _: int = 0) -> str:
        return self.dice.choice("abcde")

    def expression(self, depth: int) -> str:
        choices = EXPRESSIONS.split("\n")[1:-1]
        return self.fill(self.dice.choice(choices if depth > 0 else ["N"]), depth)

    def block(self, depth: int) -> list[str]:
        templates = STATEMENTS.split("\n")[1:-1]
        lines: list[str] = []
        for _ in range(self.dice.randint(1, 3)):
            choices = templates if depth > 0 else [each for each in templates if "/" not in each]
            for line in self.dice.choice(choices).split("/"):
                if line.endswith("B"):
                    lines += [f"    {line[:-1]}{inner}" for inner in self.block(depth - 1)]
                else:
                    lines.append(self.fill(line, 3))
        return lines

    def program(self) -> str:
        while True:  # a few break Python's rules for `global` or `break`
            lines = [line for _ in range(self.dice.randint(1, 3)) for line in self.block(2)]
            try:
                compile("\n".join(lines), "<cell>", "exec", dont_inherit=True)
            except SyntaxError:
                continue
            return "\n".join(lines)


@pytest.mark.parametrize("start", range(0, 800, 200))
def test_no_program_looks_up_a_name_that_is_not_read(start: int) -> None:
    for seed in range(start, start + 200):
        dice = random.Random(seed)
        source = Author(dice).program()
        check(
            source,
            {name: Chance(dice) for name in "abcde" if dice.random() < 0.7},
            Exception,
            TooLong,
        )
