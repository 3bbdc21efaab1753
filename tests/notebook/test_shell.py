"""The members of IPython's shell that gpunb uses, with a kernel and without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.notebook.shell import NotebookShell, current, of


class Part:
    def __init__(self, shell: NotebookShell) -> None:
        self.shell = shell


def shell(**members: Any) -> NotebookShell:
    hook = SimpleNamespace(prompt_count=3)
    registry: dict[str, Any] = members.pop("magics", {})
    manager = SimpleNamespace(registry=registry)
    return of(SimpleNamespace(displayhook=hook, magics_manager=manager, **members))


def in_kernel(request: dict[str, Any], **members: Any) -> NotebookShell:
    return shell(kernel=SimpleNamespace(), get_parent=lambda: request, **members)


def test_a_shell_has_one_adapter_and_one_object_of_each_part() -> None:
    first, second = shell(), shell()
    assert of(first.ip) is first
    assert first.part(Part) is first.part(Part)
    assert first.part(Part).shell is first
    assert second.part(Part) is not first.part(Part)


def test_without_a_kernel_the_request_is_empty_and_the_user_can_be_asked() -> None:
    plain = shell()
    assert plain.kernel is None
    assert plain.request() == {}
    assert plain.place() == (3, None)
    assert plain.origin() is None
    assert plain.may_ask()
    assert not plain.headless()


def test_the_request_names_the_running_cell() -> None:
    content = {"code": "x = 1", "allow_stdin": True}
    assert in_kernel({"content": content}).origin() == "x = 1"
    named = in_kernel({"content": content, "metadata": {"cellId": "a1"}})
    assert named.origin() == "a1"
    assert named.place() == (3, "a1")


@pytest.mark.parametrize(
    ("allows", "setting", "headless"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_a_notebook_is_headless_if_it_takes_no_input_or_the_setting_says_so(
    allows: bool, setting: bool | None, headless: bool
) -> None:
    magics = {"GpuMagics": SimpleNamespace(headless=setting)}
    assert in_kernel({"content": {"allow_stdin": allows}}, magics=magics).headless() is headless


def test_a_program_has_a_shell_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    program = current()
    assert not program.shows
    assert program is current()
    program.ip.push({"name": 1})
    assert program.user_ns["name"] == 1
    del program.user_ns["name"]
