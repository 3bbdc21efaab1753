"""Python imports this before all else where this folder is on its path: for chaos only."""

import importlib.util
import os
import sys
from pathlib import Path

if os.environ.get("GPUNB_CHAOS_PAGE"):
    path = Path(__file__).parent.parent / "seam.py"
    spec = importlib.util.spec_from_file_location("tests.chaos.seam", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tests.chaos.seam"] = module
    spec.loader.exec_module(module)
    module.install()
