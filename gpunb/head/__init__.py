"""A session that outlives kernels, in a process of its own, and the kernels that attach to it."""
