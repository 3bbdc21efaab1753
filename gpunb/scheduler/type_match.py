"""Compares the type of a device with a type that a user wrote.

A type is matched by its words. The maker and the brand ("NVIDIA", "GeForce") may be left out, the
model ("4090", "A100", "Pro") may not. The form and the size ("SXM4", "80GB") must be right if they
are given. So "4090", "rtx4090" and "GeForce RTX 4090" are one type; "4080" is not "4080 SUPER".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gpunb.scheduler.resources import Device

_BRANDS = frozenset(
    "nvidia amd intel apple huawei google aws tesla geforce rtx gtx quadro instinct radeon rx arc "
    "gpu tpu graphics generation edition series accelerator tm r".split()
)
_FORMS = re.compile(r"sxm\d?|pcie?|oam|nvl|hbm\d?e?|mobile|laptop|hf")
_SIZE = re.compile(r"(\d+)(?:g|gb|gib)")
_SEPARATORS = re.compile(r"[\s_/()\[\],®™+-]+")
_JOINED = re.compile(r"(?<=\brtx|\bgtx|\barc)(?=[a-z]?\d)|(?<=\d)(?=(?:ti|super)\b)")

_NAMED_BY_FORM = frozenset({"mobile", "laptop"})
"""Forms that name another model, so that they must not be left out."""

GiB = 1024**3


class _Words(NamedTuple):
    """The words of a type by their meaning; `size` in GiB, as advertised."""

    model: frozenset[str]
    forms: frozenset[str]
    size: int | None


@lru_cache(maxsize=1024)
def _words(text: str) -> _Words:
    model, forms, size = set(), set(), None
    for word in _SEPARATORS.split(_JOINED.sub(" ", text.casefold())):
        match = _SIZE.fullmatch(word)
        if match:
            size = int(match[1])
        elif word in _NAMED_BY_FORM:
            model.add(word)
        elif _FORMS.fullmatch(word):
            forms.add(word)
        elif word and word not in _BRANDS:
            model.add(word)
    return _Words(frozenset(model), frozenset(forms), size)


def matches(wanted: str, device: Device) -> bool:
    """Whether the device is of the wanted type."""
    if wanted == device.type:
        return True
    if device.type is None:
        return False
    asked = _words(wanted)
    if not asked.model:
        return wanted.casefold() == device.type.casefold()
    # The type may be short ("RTX-6000") and the name long ("RTX 6000 Ada Generation").
    of_type, of_name = _words(device.type), _words(device.name)
    if asked.model not in (of_type.model, of_name.model):
        return False
    if not asked.forms <= of_type.forms | of_name.forms:
        return False
    return asked.size is None or asked.size == of_type.size or _about(asked.size, device.memory)


def _about(size: int, memory: int | None) -> bool:
    """Whether a device of the advertised size has so much memory: the driver keeps a part."""
    return memory is not None and 0.9 * size * GiB < memory <= 1.05 * size * GiB


def near(wanted: Iterable[str], types: Sequence[str]) -> list[str]:
    """Known types that are similar to the wanted ones, best first; at most three."""
    known = dict.fromkeys(types)
    spellings = {each.casefold(): each for each in known}
    spellings |= {_model(each): each for each in known}
    found: list[str] = []
    for text in wanted:
        model = _words(text).model
        found += [each for each in known if model & _words(each).model]
        for spelling in (text.casefold(), _model(text)):
            close = difflib.get_close_matches(spelling, spellings, n=3)
            found += [spellings[each] for each in close]
    return list(dict.fromkeys(found))[:3]


def _model(text: str) -> str:
    return " ".join(sorted(_words(text).model)) or text.casefold()
