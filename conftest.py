"""Settings of every test: repeatable examples, and one thread, since the models are small."""

import contextlib

import hypothesis

hypothesis.settings.register_profile("remat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("remat")

with contextlib.suppress(ImportError):  # the tests of graph and solvers need no torch
    import torch

    torch.set_num_threads(1)
