"""Functions, arguments, results and exceptions to and from bytes."""

from gpunb.data.serialize import reducers  # noqa: F401 - registers the reducers
from gpunb.data.serialize.devices import Moved, moving, staying
from gpunb.data.serialize.failures import dump_failure, load_failure
from gpunb.data.serialize.fidelity import Loss, losses
from gpunb.data.serialize.functions import (
    captured,
    dumps_function,
    functions_within,
    still_current,
)
from gpunb.data.serialize.left_out import with_graph
from gpunb.data.serialize.modules import find_module, lazy_module, modules_within
from gpunb.data.serialize.parts import Part, in_array, part_at, parts
from gpunb.data.serialize.pickler import note_reference, noting
from gpunb.data.serialize.salvage import loads_arguments, loads_function, loads_names, why_lost
from gpunb.data.serialize.sources import with_sources
from gpunb.data.serialize.values import (
    INLINE_LIMIT,
    Payload,
    dumps,
    from_wires,
    inlined,
    loads,
    to_wires,
)

__all__ = [
    "INLINE_LIMIT",
    "Loss",
    "Moved",
    "Part",
    "Payload",
    "captured",
    "dump_failure",
    "dumps",
    "dumps_function",
    "find_module",
    "from_wires",
    "functions_within",
    "in_array",
    "inlined",
    "lazy_module",
    "load_failure",
    "loads",
    "loads_arguments",
    "loads_function",
    "loads_names",
    "losses",
    "modules_within",
    "moving",
    "note_reference",
    "noting",
    "part_at",
    "parts",
    "staying",
    "still_current",
    "to_wires",
    "why_lost",
    "with_graph",
    "with_sources",
]
