"""The messages between the kernel and a zygote: tuples of builtin types.

Requests:

- ``("fork", token)`` with the worker's descriptors
- ``("preload", modules)`` with the control socket of the second generation
- ``("signal", token, number)``
- ``("ping",)``
- ``("keep",)`` with a descriptor that the zygote, and all that it forks from then on, have open as
  long as they live

Answers:

- ``("forked", token, pid)``
- ``("exited", token, status)``
- ``("preloaded", {module: problem or None}, why it must not be used or None)``
- ``("failed", token, reason)``
- ``("pong",)``
- ``("delayed", token, reason)`` when the system has no room for another process: the fork is tried
  again until there is some
"""

SECOND = "zygote"
"""With its modules, the token of a zygote of the second generation."""
