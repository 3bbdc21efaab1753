"""Functions, arguments, results and exceptions to and from bytes."""

from gpunb.serialize.devices import Moved, moving, staying
from gpunb.serialize.failures import dump_failure, load_failure
from gpunb.serialize.functions import (
    captured,
    dumps_function,
    functions_within,
    loads_function,
    still_current,
)
from gpunb.serialize.modules import lazy_module
from gpunb.serialize.sources import with_sources
from gpunb.serialize.values import (
    INLINE_LIMIT,
    Payload,
    dumps,
    from_wires,
    loads,
    note_reference,
    to_wires,
)

__all__ = [
    "INLINE_LIMIT",
    "Moved",
    "Payload",
    "captured",
    "dump_failure",
    "dumps",
    "dumps_function",
    "from_wires",
    "functions_within",
    "lazy_module",
    "load_failure",
    "loads",
    "loads_function",
    "moving",
    "note_reference",
    "staying",
    "still_current",
    "to_wires",
    "with_sources",
]
