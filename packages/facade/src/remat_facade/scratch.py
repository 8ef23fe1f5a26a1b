"""What no budget on the CPU counts: memory that oneDNN takes past torch's allocator.

oneDNN runs convolutions, LSTM layers and products in 16 bits. Its scratch comes from the C library, and the
primitives that it compiles stay in a cache: some 1.5 MiB for the forward and backward of one convolution,
whatever its batch. Neither torch's allocator nor a dispatch mode sees them, so no plan can hold them;
`benchmarks/scratch.py` measures them.
"""

import re

from remat_graph import Graph

_LAYERS = re.compile(r"aten\.(convolution|mkldnn_rnn_layer)|recording_lstm_layer")
_PRODUCTS = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|mv|addmv)\.default\(b?float16\[")
_TAKEN = re.compile(r"\(b?float(16|32)\[[^@]*@cpu")


def scratch_note(graph: Graph) -> tuple[str, ...]:
    """A line for a graph with operators that oneDNN runs; none for any other.

    Args:
        graph: a captured step; its keys say which kernels it asks for, on which device.
    """
    if "no_onednn" in dict(graph.conditions).get("kernels", ""):
        return ()
    keys = {op.key for op in graph.ops if _LAYERS.match(op.target) or _PRODUCTS.match(op.key)}
    kinds = sum(_TAKEN.search(key) is not None for key in keys)
    if not kinds:
        return ()
    return (
        f"beside the budget what oneDNN takes past torch: scratch, and the kernels that {kinds} kinds of "
        "operators leave in its cache (none with ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 in the environment)",
    )
