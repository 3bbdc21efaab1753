"""Objects of libraries in cells: they come home whatever was or was not imported there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import needs
from tests.notebook.kernels import Kernel, kernel

pytestmark = pytest.mark.kernel

KNOT = {
    "__init__": """
        import sys
        import knot
        from knot import _rebuild
        from knot._values import Value
        names = [name for name in dir(knot) if not name.startswith("__")]
        """,
    "_rebuild": """
        import knot
        def rebuild(number): return knot.Value(number)
        """,
    "_values": """
        from knot import _rebuild
        class Value:
            def __init__(self, number): self.number = number
            def __reduce__(self): return _rebuild.rebuild, (self.number,)
        """,
}
"""A package that asks for its own names while it loads, as PyTorch does."""


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """Beside the package."""
    cell.ok(f"import textwrap, pathlib\npathlib.Path('knot').mkdir()\nKNOT = {KNOT!r}")
    cell.ok(
        "for name, text in KNOT.items():\n"
        "    pathlib.Path(f'knot/{name}.py').write_text(textwrap.dedent(text))\n"
        "del KNOT, name, text"
    )
    return cell


def test_a_value_of_a_library_that_another_cell_imported_travels(notebook: Kernel) -> None:
    assert notebook.ok("%%gpu 0\nimport knot").stderr == ""
    assert notebook.ok("%%gpu 0\nvalue = knot.Value(3)").stderr == ""
    assert notebook.value("(value.number, type(value) is knot.Value)") == (3, True)
    assert notebook.value("__import__('sys').modules['knot'] is knot") is True


def test_a_module_that_only_cells_have_used_is_found_in_its_package(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0\nimport wsgiref.simple_server")
    assert notebook.ok("%%gpu 0\nwsgiref.simple_server.__name__").value == "'wsgiref.simple_server'"
    notebook.ok("def f(): return wsgiref.simple_server.__version__")
    assert notebook.ok("%%gpu 0\nf()").value == "'0.2'"
    assert notebook.value("'wsgiref.simple_server' in __import__('sys').modules") is False


def test_torch_objects_of_a_notebook_travel(notebook: Kernel) -> None:
    needs.pytorch()
    notebook.ok("%%gpu 0\nimport torch\nfrom torch import nn")
    x = "x = torch.tensor([[1, 2], [3, 4]], requires_grad=True, dtype=torch.float32)"
    assert notebook.ok(f"%%gpu 0\n{x}").stderr == ""
    assert notebook.value("(x.tolist(), x.requires_grad)") == ([[1, 2], [3, 4]], True)
    made = notebook.ok(
        "%%gpu 0\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n        self.layer = nn.Linear(2, 1)\n"
        "    def forward(self, rows): return self.layer(rows)\n"
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return 2 * x\n"
        "    @staticmethod\n    def backward(ctx, grad): return 2 * grad\n"
        "net = Net()\noptimizer = torch.optim.Adam(net.parameters())\n"
        "loader = DataLoader(TensorDataset(torch.arange(6.).reshape(3, 2)), batch_size=2)\n"
        "doubled = Double.apply(torch.ones(2))"
    )
    assert made.stderr == ""
    assert notebook.value("optimizer.param_groups[0]['params'][0] is net.layer.weight") is True
    assert notebook.value("[net(rows).shape[0] for rows, in loader]") == [2, 1]
    assert notebook.value("(doubled.tolist(), Double.apply(doubled).tolist())") == ([2, 2], [4, 4])
    assert notebook.value("isinstance(net, Net)") is True


def test_arrays_of_jax_come_home(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    with kernel(tmp_path, JAX_PLATFORMS="cpu") as fresh:
        made = fresh.ok(
            "%%gpu 0\nimport jax, jax.numpy as jnp\nx = jnp.arange(6.0).reshape(2, 3)\n"
            "half = jnp.ones(2, jnp.bfloat16)\nkey = jax.random.key(3)\nold = jax.random.PRNGKey(3)"
        )
        assert made.stderr == ""
        assert fresh.value("[isinstance(x, jax.Array), x.tolist()]") == [
            True,
            [[0, 1, 2], [3, 4, 5]],
        ]
        assert fresh.value("[str(half.dtype), half.tolist()]") == ["bfloat16", [1, 1]]
        drawn = fresh.ok("%%gpu 0\n[float(jax.random.uniform(each)) for each in (key, old)]").value
        assert fresh.ok("[float(jax.random.uniform(each)) for each in (key, old)]").value == drawn
        expected = "[float(jax.random.uniform(jax.random.key(3)))] * 2"
        assert fresh.ok(expected).value == drawn


def test_an_object_of_the_notebook_stays_the_same_within_a_result(notebook: Kernel) -> None:
    notebook.ok(
        "import numpy as np\niris = {'target': np.arange(5), 'rows': [np.zeros(3)]}\n"
        "data = np.arange(20_000)\n"
        "class Data: pass\nclass Model:\n"
        "    def __init__(self, frame): self.data = Data(); self.data.frame = frame"
    )
    notebook.ok(
        "%%gpu 0\ny, row = iris['target'], iris['rows'][0]\n"
        "model = Model(data)\npair = iris, [model]"
    )
    assert notebook.value("(y is iris['target'], row is iris['rows'][0])") == (True, True)
    assert notebook.value("(model.data.frame is data, pair[0] is iris)") == (True, True)
    notebook.ok(
        "%%gpu 0\nother = {'y': iris['target'], 'data': data}\ndata[0] = 7\niris['new'] = 1"
    )
    assert notebook.value("(other['data'] is data, int(data[0]), iris['new'])") == (True, 7, 1)
    assert notebook.value("other['y'] is iris['target']") is True


def test_names_of_parts_follow_a_changed_object(notebook: Kernel) -> None:
    notebook.ok(
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n"
        "data = np.zeros(3)\nmodel = Model(data)"
    )
    notebook.ok("%%gpu 0\nax.plot([1, 2])\nmodel.fitted = True")
    assert notebook.value("(ax.figure is fig, fig.axes[0] is ax, len(ax.lines))") == (True, True, 1)
    assert notebook.value("(model.data.frame is data, model.fitted)") == (True, True)


def test_names_of_parts_in_an_array_of_objects_follow_a_changed_object(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0\nimport matplotlib.pyplot as plt\nfig, axs = plt.subplots(2, 2)")
    notebook.ok("%%gpu 0\naxs[1, 0].plot([1, 2])")
    assert notebook.value("(axs[1, 0].figure is fig, len(fig.axes[2].lines))") == (True, 1)
    notebook.ok("%%gpu 0\nax = axs[0, 1]")
    assert notebook.value("ax is axs[0, 1]") is True
    notebook.ok("%%gpu 0\nax.plot([1, 2])")
    assert notebook.value("(ax is axs[0, 1], ax.figure is fig, len(ax.lines))") == (True, True, 1)


def test_a_figure_can_be_drawn_by_its_canvas_wherever_it_is(notebook: Kernel) -> None:
    notebook.ok(
        "%%gpu 0\nimport matplotlib.pyplot as plt\nfig = plt.figure(figsize=(2, 1), dpi=50)"
    )
    draw = "fig.canvas.draw(); memoryview(fig.canvas.buffer_rgba()).shape"
    assert notebook.ok(f"%%gpu 0\n{draw}").value == "(50, 100, 4)"
    assert notebook.ok(draw).value == "(50, 100, 4)"


@pytest.mark.parametrize("first", ["import matplotlib.pyplot as plt", ""])
def test_a_figure_of_a_cell_is_a_picture_in_a_plain_cell(tmp_path: Path, first: str) -> None:
    """Also if the notebook itself has not plotted."""
    with kernel(tmp_path) as fresh:
        fresh.ok("%%gpu 0\nimport matplotlib.pyplot as plt")
        assert fresh.value("[m for m in __import__('sys').modules if 'matplotlib' in m]") == []
        fresh.ok(first)
        fresh.ok("%%gpu 0.5\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()")
        shown = fresh.ok("display(fig)\nfig")
        assert shown.result is not None
        assert "image/png" in shown.result
        assert ["image/png" in each for each in shown.displayed] == [True]


def test_a_figure_of_a_cell_is_a_text_where_the_notebook_is_not_inline(tmp_path: Path) -> None:
    with kernel(tmp_path) as fresh:
        fresh.ok("import matplotlib\nmatplotlib.use('agg')")
        fresh.ok("%%gpu 0\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()")
        assert [*(fresh.ok("fig").result or ())] == ["text/plain"]
        assert fresh.value("matplotlib.get_backend()") == "agg"


FUSSY = """
class Fussy:
    def __init__(self, here): self.here = here
    def __reduce__(self): return make, (self.here,)
def make(here):
    import os
    if os.getpid() != here: raise LookupError("made there, not here")
    return Fussy(here)
"""


@pytest.fixture
def fussy(notebook: Kernel) -> None:
    """A module whose objects can be made in one process only."""
    notebook.ok(f"pathlib.Path('fussy.py').write_text({FUSSY!r})\nimport os, fussy; None")


def test_a_value_that_the_notebook_cannot_unpickle_loses_no_other(
    notebook: Kernel, fussy: None
) -> None:
    ran = notebook.ok(
        "%%gpu 0\nkept = [1]\nlost = [kept, fussy.Fussy(os.getpid())]\nalso = {'kept': kept}\nlost"
    )
    assert "'lost' stays in the worker: it cannot be made again in the notebook: Lookup" in (
        ran.stderr
    )
    assert "Fussy" in (ran.value or "")
    assert notebook.value("(also['kept'] is kept, 'lost' in globals())") == (True, False)
    asked = notebook("%%gpu 0 --out lost,kept\nkept = 2\nlost = fussy.Fussy(0)")
    assert (asked.ename, notebook.value("kept")) == ("TypeError", 2)
    assert "--out lost: it cannot be made again" in asked.traceback


def test_a_value_that_the_worker_cannot_unpickle_is_named(notebook: Kernel, fussy: None) -> None:
    notebook.ok("settings = {'a': lambda x: x, 'b': fussy.Fussy(os.getpid())}")
    failed = notebook("%%gpu 0\nprint('ran', settings)")
    assert failed.traceback == (
        "GpunbError: 'settings' cannot be made again in the worker: "
        "LookupError: made there, not here"
    )
    assert failed.stdout == ""


def test_a_global_of_a_function_that_the_worker_cannot_unpickle_is_named(
    notebook: Kernel, fussy: None
) -> None:
    notebook.ok(
        "held = fussy.Fussy(os.getpid())\ndef reads(): return held\ndef f(): return reads()"
    )
    assert notebook("%%gpu 0\nf()").traceback == (
        "GpunbError: 'f' cannot be made again in the worker: LookupError: made there, not here "
        "(the cause is 'held', a global of the function 'reads')"
    )
    failed = notebook("gpunb.get(gpunb.remote(f).remote())")
    text = failed.traceback.partition("Traceback (most recent call last):\n  File")[2]
    assert "LookupError: made there, not here\nthe cause is 'held', a global of" in text
    assert "serialize" not in text


# --------------------------------------------------------------------- what libraries keep inside


def test_random_numbers_of_other_cells_do_not_advance_the_notebooks_generator(
    notebook: Kernel,
) -> None:
    notebook.ok("import random\nrandom.seed(7); own = random.getstate()")
    draw = "import random\ndrawn = random.random()"
    drawn = []
    for where in ("--bg", "--bg", "-s stream"):
        notebook.ok(f"%%gpu 0 {where}\n{draw}")
        notebook.ok("%gpu wait")
        drawn.append(notebook.value("drawn"))
    notebook.ok("%%gpu 0\nfound = gpunb.get(gpunb.remote(lambda: random.random()).remote())")
    drawn.append(notebook.value("found"))
    assert notebook.value("random.getstate() == own") is True
    assert len({*drawn, notebook.value("random.Random(7).random()")}) == 5
    notebook.ok("%gpu stop stream")


@pytest.mark.parametrize(
    "kind", ["random.Random", "np.random.RandomState", "np.random.default_rng"]
)
def test_users_of_a_generator_share_the_numbers_that_a_cell_drew(
    notebook: Kernel, kind: str
) -> None:
    notebook.ok(f"import random, numpy as np\nrng = {kind}(0); users = [rng]; others = users * 2")
    drawn = notebook.ok("%%gpu 0\nrng.random()").value
    assert notebook.value("users[0] is others[0] is rng") is True
    again = notebook.value(f"(lambda rng: (rng.random(), rng.random()))({kind}(0))")
    assert drawn in (repr(again[0]), f"np.float64({again[0]!r})")
    assert notebook.value("others[1].random()") == again[1]


def test_the_state_of_pytorch_waits_until_it_is_loaded(notebook: Kernel) -> None:
    """It is loaded in the notebook by its first use there."""
    needs.pytorch()
    notebook.ok(
        "%%gpu 0\nimport torch as t\nt.manual_seed(3); t.set_default_dtype(t.float64)\n"
        "t.set_float32_matmul_precision('high'); t.set_grad_enabled(False); None"
    )
    options = "(str(t.ones(1).dtype), t.get_float32_matmul_precision(), t.is_grad_enabled())"
    notebook.ok(f"%%gpu 0\nfirst = t.rand(1).item()\nthere = {options}")
    notebook.ok("again = t.Generator().manual_seed(3)")
    expected = "[t.rand(1, generator=again).item() for _ in 'ab']"
    assert notebook.value(f"[first, t.rand(1).item()] == {expected}") is True
    assert notebook.value(f"(there, {options})") == (("torch.float64", "high", False),) * 2
    notebook.ok(
        "t.set_default_dtype(t.float32); t.set_float32_matmul_precision('highest'); "
        "t.set_grad_enabled(True); None"
    )


def test_settings_travel_in_and_come_home(notebook: Kernel) -> None:
    pytest.importorskip("pandas")
    notebook.ok(
        "import matplotlib as mpl, pandas as pd\nmpl.rcParams['figure.figsize'] = 3, 2\n"
        "pd.set_option('display.float_format', lambda x: f'<{x:.1f}>')\n"
        "mpl.rcParams.update({'lines.linewidth': 5})"
    )
    there = "[*mpl.rcParams['figure.figsize'], mpl.rcParams['lines.linewidth']]"
    shown = notebook.ok(f"%%gpu 0\nprint(pd.Series([1 / 3]), {there})").stdout
    assert "<0.3>" in shown
    assert "[3.0, 2.0, 5.0]" in shown
    notebook.ok(
        "%%gpu 0\nimport matplotlib.pyplot as plt\nplt.style.use('ggplot')\n"
        "mpl.rcParams['lines.linewidth'] = mpl.rcParamsDefault['lines.linewidth']\n"
        "pd.set_option('display.max_rows', 7)"
    )
    assert notebook.value("(mpl.rcParams['axes.facecolor'], mpl.rcParams['lines.linewidth'])") == (
        ("#E5E5E5", 1.5)
    )
    assert notebook.value(
        "(pd.get_option('display.max_rows'), str(pd.Series([1.0]))[4:10].strip())"
    ) == ((7, "<1.0>"))
    notebook.ok("%%gpu 0 --bg\nmpl.rcParams['lines.linewidth'] = 9")
    notebook.ok("%gpu wait\nmpl.rcParams['figure.figsize'] = 4, 2")
    notebook.ok("%%gpu 0 -s set\nmpl.rcParams['figure.dpi'] = 50")
    assert notebook.value("(mpl.rcParams['lines.linewidth'], mpl.rcParams['figure.dpi'])") == (
        (1.5, 50)
    )
    notebook.ok("mpl.rcdefaults(); pd.reset_option('all')")
    reset = notebook.ok(f"%%gpu 0 -s set\n{there}, pd.get_option('display.max_rows')")
    assert reset.value == "([6.4, 4.8, 1.5], 60)"
    notebook.ok("%gpu stop set")


@pytest.mark.parametrize(
    ("imports", "change", "shows"),
    [
        ("from random import random, seed", "seed(3)", "random()"),
        ("from numpy.random import rand, seed", "seed(3)", "rand()"),
        (
            "from matplotlib import rcParams",
            "rcParams['lines.linewidth'] = 4",
            "__import__('matplotlib').rcParams['lines.linewidth']",
        ),
    ],
)
def test_a_name_of_a_library_for_its_state_stays_the_librarys(
    notebook: Kernel, imports: str, change: str, shows: str
) -> None:
    notebook.ok(f"%%gpu 0\n{imports}")
    notebook.ok(f"%%gpu 0\n{change}")
    found = notebook.ok(f"%%gpu 0\n{shows}").value
    notebook.ok(f"{imports}\n{change}")
    assert notebook.ok(shows).value == found
    notebook.ok("import matplotlib; matplotlib.rcdefaults()")


def test_tables_are_as_wide_as_in_the_notebook(notebook: Kernel) -> None:
    """pandas shows fewer columns where it finds no kernel when it loads."""
    pytest.importorskip("pandas")
    width = "__import__('pandas').get_option('display.max_columns')"
    everywhere = ("%%gpu 0\n", "%%gpu 0 -s wide\n", "")
    assert [notebook.ok(each + width).value for each in everywhere] == ["20"] * 3
    notebook.ok("import pandas as pd\npd.set_option('display.max_columns', 0)")
    assert [notebook.ok(each + width).value for each in everywhere] == ["0"] * 3
    notebook.ok("%gpu stop wide\npd.reset_option('display.max_columns')")


def test_options_and_numbers_of_diagrams_of_scikit_learn_come_home(notebook: Kernel) -> None:
    pytest.importorskip("sklearn")
    notebook.ok(
        "%%gpu 0\nimport sklearn as skl\nfrom sklearn.dummy import DummyClassifier\n"
        "skl.set_config(transform_output='pandas')"
    )
    ran = notebook.ok(
        "%%gpu 0\nprint(skl.get_config()['transform_output'])\ndisplay(DummyClassifier())"
    )
    again = notebook.ok("%%gpu 0\ndisplay(DummyClassifier())")
    assert ran.stdout == "pandas\n"
    found = [
        re.findall(r'id="(sk-(?:container|estimator)-id-\d+)"', each["text/html"])
        for each in (*ran.displayed, *again.displayed)
    ]
    assert len(found[0]) == len(found[1]) == 2
    assert not {*found[0]} & {*found[1]}


def test_the_set_up_of_logging_travels_in_and_comes_home(notebook: Kernel) -> None:
    everywhere = ("", "%%gpu 0\n", "%%gpu 0 -s log\n")
    notebook.ok(
        "%%gpu 0\nimport logging, sys\nlogging.getLogger('quiet').setLevel('ERROR')\n"
        "logging.basicConfig(level='INFO', style='{', format='<{message}>', stream=sys.stdout)"
    )
    for first in everywhere:
        logged = notebook.ok(
            f"{first}logging.getLogger('loud').info('a'); logging.getLogger('quiet').info('b')"
        )
        assert (logged.stdout, logged.stderr) == ("<a>\n", "")
    notebook.ok("logging.basicConfig(level='WARNING', force=True, format='%(message)s!')")
    for first in everywhere:
        logged = notebook.ok(f"{first}logging.info('a'); logging.warning('b')")
        assert (logged.stdout, logged.stderr) == ("", "b!\n")
    notebook.ok("%gpu stop log\nlogging.basicConfig(force=True, handlers=[])")


def test_filters_of_warnings_come_home(notebook: Kernel) -> None:
    notebook.ok("import warnings\nold = warnings.filters[:]")
    notebook.ok("%%gpu 0\nwarnings.filterwarnings('ignore', 'quiet')")
    for first in ("", "%%gpu 0\n", "%%gpu 0 -s filters\n"):
        assert notebook.ok(f"{first}warnings.warn('quiet')").stderr == ""
        assert "UserWarning: loud" in notebook.ok(f"{first}warnings.warn('loud')").stderr
    notebook.ok("%%gpu 0 -s filters\nwarnings.filterwarnings('ignore', 'loud')")
    for first in ("", "%%gpu 0\n", "%%gpu 0 -s filters\n"):
        assert notebook.ok(f"{first}warnings.warn('loud')").stderr == ""
    count = notebook.value("len(warnings.filters)")
    for first in ("%%gpu 0\n", "", "%%gpu 0\n"):  # the same filter takes its own place
        notebook.ok(f"{first}warnings.filterwarnings('ignore', 'loud')")
    assert notebook.value("len(warnings.filters)") == count
    notebook.ok("%%gpu 0 --bg\nwarnings.simplefilter('ignore')\n")
    assert "other" in notebook.ok("%gpu wait\nwarnings.warn('other')").stderr
    notebook.ok("%gpu stop filters\nwarnings.filters[:] = old")


def test_a_filter_for_a_category_of_a_library_does_not_load_the_library(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0\nimport wsgiref.validate as validate")
    notebook.ok("%%gpu 0\nwarnings.simplefilter('ignore', validate.WSGIWarning)")
    assert notebook.value("'wsgiref.validate' in __import__('sys').modules") is False
    warn = "warnings.warn('of it', validate.WSGIWarning)"
    assert notebook.ok(f"%%gpu 0\n{warn}").stderr == ""
    notebook.ok("warnings.filters[:] = old")
    assert "of it" in notebook.ok(f"%%gpu 0\n{warn}").stderr


def test_letters_for_colours_that_a_cell_has_set_come_home(notebook: Kernel) -> None:
    """As `seaborn.set_theme` sets them."""
    notebook.ok(
        "%%gpu 0\nimport matplotlib as mpl, matplotlib.colors\n"
        "mpl.colors.colorConverter.colors['b'] = (0.0, 0.5, 0.0)"
    )
    for first in ("%%gpu 0\n", "%%gpu 0 -s colours\n", ""):
        shown = notebook.ok(f"{first}mpl.colors.to_hex('b'), mpl.colors.to_hex('r')").value
        assert shown == "('#008000', '#ff0000')"
    notebook.ok("%gpu stop colours\nmpl.colors.colorConverter.colors['b'] = (0, 0, 1)")


def test_a_setting_that_cannot_travel_is_left_out(notebook: Kernel) -> None:
    notebook.ok(
        "import threading, numpy as np\nlock = threading.Lock()\n"
        "def show(x):\n    with lock: return 'x'\n"
        "np.set_printoptions(formatter={'float': show}, precision=3); None"
    )
    ran = notebook.ok("%%gpu 0\nprint(np.array([1 / 3]))")
    assert (ran.stdout, ran.stderr) == ("[0.333]\n", "")
    assert notebook.ok("print(np.array([1 / 3]))").stdout == "[x]\n"
    notebook.ok("np.set_printoptions(formatter=None, precision=8)")


TUNED = "options = {'size': 1, 'shape': None}"
"""A library with settings that gpunb does not know."""

REGISTER = """
import pathlib, gpunb
pathlib.Path('tuned.py').write_text(TUNED)
gpunb.register_settings(
    'tuned',
    lambda tuned: dict(tuned.options),
    lambda tuned, name, value: tuned.options.update({name: value}),
    lambda tuned: {'size': 1, 'shape': None},
)
"""


def test_settings_that_the_user_has_registered_travel_in_and_come_home(notebook: Kernel) -> None:
    notebook.ok(f"TUNED = {TUNED!r}\n{REGISTER}")
    notebook.ok("%%gpu 0\nimport tuned\ntuned.options['size'] = 2")  # here it is not loaded
    assert notebook.value("'tuned' in __import__('sys').modules") is False
    assert notebook.ok("%%gpu 0\ntuned.options").value == "{'size': 2, 'shape': None}"
    assert notebook.value("tuned.options") == {"size": 2, "shape": None}
    notebook.ok("tuned.options['shape'] = {3}")
    assert notebook.ok("%%gpu 0\ntuned.options").value == "{'size': 2, 'shape': {3}}"
    notebook.ok("tuned.options.update(size=1, shape=None)")
    notebook.ok("%%gpu 0 -s own\ntuned.options['shape'] = 'round'")
    assert notebook.value("tuned.options") == {"size": 1, "shape": "round"}
    notebook.ok("tuned.options['shape'] = None")
    assert notebook.ok("%%gpu 0 -s own\ntuned.options").value == "{'size': 1, 'shape': None}"
    notebook.ok("%gpu stop own")
    notebook.ok("%%gpu 0 --bg\ntuned.options['shape'] = 'flat'\nseen = dict(tuned.options)")
    notebook.ok("%gpu wait")
    assert notebook.value("(seen['shape'], tuned.options['shape'])") == ("flat", None)


def test_functions_for_settings_are_checked(notebook: Kernel) -> None:
    for call, message in (
        ("'', dict, setattr", "module is ''; it must be the name of a module"),
        ("'os', 3, setattr", "read is 3; it must be a function"),
        (
            "'os', lambda _, x=open('/dev/null'): {}, setattr",
            "the functions for the settings of os",
        ),
    ):
        failed = notebook(f"gpunb.register_settings({call})")
        assert failed.ename == "TypeError"
        assert message in failed.evalue
