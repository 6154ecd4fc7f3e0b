"""Triton kernels and their launchers, one module per family; imported by the ops when they first run one.

A function whose name ends in `_kernel` is launched by the host; other jitted functions are parts of kernels. Every
kernel is compiled ahead of time for CUDA by the tests, since the interpreter accepts what the compiler does not.

A launcher's first argument are the empty results, which it fills, see `mmod.ops.backend.kernel_op`.
"""
