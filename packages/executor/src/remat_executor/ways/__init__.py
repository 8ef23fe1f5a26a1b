"""Other ways to run parts of a captured step, one family a file; a plan chooses which of them to use.

A family finds its pattern in the captured graph and says what changes there: which calls run nothing any
more, and which run another kernel on other tensors. All kernels are plain ATen calls.
"""
