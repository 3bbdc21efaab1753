"""Does in the zygote what libraries do when they are first used, so that not each worker has to."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import Any


def prepare() -> None:
    """Prepare the libraries that are loaded. To prepare one again takes no time."""
    for name, action in _ACTIONS.items():
        if name in sys.modules:
            with contextlib.suppress(Exception):  # other releases may differ
                action()


@functools.cache
def _figures() -> None:
    """Find the fonts of figures, make the parser of formulas, and load what saves figures. Half of
    the time of a worker's first small figure is for that."""
    for name in ("IPython.core.pylabtools", "matplotlib.backends.backend_agg", "contourpy"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    image: Any = importlib.import_module("PIL.Image")
    image.preinit()
    fonts: Any = importlib.import_module("matplotlib.font_manager")
    for size in ("medium", "large"):
        fonts.findfont(fonts.FontProperties(size=size))
    # The result is kept with open files, which forks must not share: so no user's formula.
    importlib.import_module("matplotlib.mathtext").MathTextParser("path").parse("$gpunb$")


_ACTIONS = {"matplotlib.figure": _figures}
