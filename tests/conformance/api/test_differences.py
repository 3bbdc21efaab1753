"""The list of differences is complete: each is tested, and each is explained."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance.api.backends import ROOT
from tests.conformance.api.differences import (
    DIFFERENCES,
    ON_THE_BACKEND,
    TESTS_ON_THE_BACKEND,
)

pytestmark = pytest.mark.machine(own=True)

FUNCTIONS = [
    (path.name, node)
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef)
]


def marks(function):
    """The differences that a test is marked with."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    return [each.args[0].value for each in calls if ast.unparse(each.func) == "differs"]


def looks(function):
    """Whether it expects one thing here and another there."""
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "here"
        for node in ast.walk(function)
    )


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_tested(name):
    assert any(name in marks(function) for _, function in FUNCTIONS)


def test_those_tests_and_no_others_tell_the_two_apart():
    for module, function in FUNCTIONS:
        if function.name.startswith("test_"):
            assert looks(function) == bool(marks(function)), f"{module}: {function.name}"


def test_the_document_explains_each_and_no_other():
    text = (ROOT / "docs" / "ray-compatibility.md").read_text()
    explained = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(explained) == sorted([*DIFFERENCES, *ON_THE_BACKEND])


def test_the_tests_of_the_backend_are_there():
    names = {function.name for _, function in FUNCTIONS}
    assert set(TESTS_ON_THE_BACKEND) <= names
    assert set(TESTS_ON_THE_BACKEND.values()) <= set(ON_THE_BACKEND)
