"""What tasks print."""

from __future__ import annotations

import re

from tests.conformance.api.backends import script_that_shows


def test_lines_come_with_the_name_and_the_process():
    printed = script_that_shows(
        r"^\(\w+ pid=\d+\) from the \w+$",
        2,
        """
        import os, sys
        ray.init(num_cpus=2, num_gpus=1)

        @ray.remote
        def task():
            print("from the task")
            return os.getpid()

        @ray.remote(num_gpus=1)
        class Actor:
            def say(self):
                print("from the actor")
                return os.getpid()

        actor = Actor.remote()
        pids = ray.get([task.remote(), actor.say.remote()])
        sys.stdin.read()
        print("pids", *pids)
        """,
    )
    found = dict(re.findall(r"^\((\w+) pid=(\d+)\) from the \w+$", printed, re.MULTILINE))
    task, actor = re.search(r"^pids (\d+) (\d+)$", printed, re.MULTILINE).groups()
    assert found == {"task": task, "Actor": actor}


def test_lines_of_an_actor_come_with_its_repr():
    line = r"^\(Actor\(index=2\) pid=\d+\) from the actor$"
    printed = script_that_shows(
        line,
        1,
        """
        import sys
        ray.init(num_cpus=2)

        @ray.remote
        class Actor:
            def __init__(self, index):
                self.index = index

            def __repr__(self):
                return f"Actor(index={self.index})"

            def say(self):
                print("from the actor")

        ray.get(Actor.remote(2).say.remote())
        sys.stdin.read()
        """,
    )
    assert re.search(line, printed, re.MULTILINE)
