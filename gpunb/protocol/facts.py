"""The facts that a backend can be asked for, by name."""

from __future__ import annotations

from typing import Literal, TypeAlias

Fact: TypeAlias = Literal[
    "total",
    "available",
    "assigned",
    "refusal",
    "unmet",
    "why",
    "status",
    "timeline",
    "session",
    "job",
    "actor",
    "names",
    "groups",
    "group_of",
    "log",
    "memory",
    "notes",
]
"""
total, available: the resources of the machine or of the cluster, and those that are free
assigned: the resources of a task
refusal: the reason why a demand can never be met, or None
unmet: the sum of the demands of queued tasks
why: the reason why a task waits, or None
status, timeline: as `gpunb.status` and `gpunb.timeline` return them
session: the process, the user and the notebook of the session
job, actor: the job or the actor with an id, or None
names: the names of actors
groups: the placement groups
group_of: the placement group in which a task or an actor runs, or None
log: the log of a job, or None
memory: the memory that each process on a device uses, in words
notes: remarks about the devices that were found
"""
