"""A test device: CUDA as torch sees it, on a torch without CUDA and a machine without a GPU.

A C++ extension (``csrc``) registers two devices of type ``cuda``. Kernels are the CPU's; streams, events,
the caching allocator, generators, CUDA graphs and the choice of kernels follow torch's rules, so that the
branches for CUDA run unchanged. Work runs as late as its stream allows, fresh memory holds NaN, and accesses
that no event orders are reported: a missing wait is found at each run. Times are counted, not measured.

    python -m pytest -p tests.device.plugin -m cuda tests packages
    python -m tests.device SCRIPT [ARGUMENT...]

The library must be loaded before torch, so it is for processes of its own. It is built with g++ on first use.

What it does not show:

- speed, workspaces and rounding of real kernels; atomic additions, TF32, Inductor;
- recurrent layers of cuDNN, NCCL, more than one process on a device;
- races between threads of the host, or of the CPU with copies, other than by wrong numbers;
- parallel branches inside a CUDA graph: its work runs in the order in which it was recorded;
- accesses to parts of strided tensors: a tensor counts as all bytes between its first and its last.
"""
