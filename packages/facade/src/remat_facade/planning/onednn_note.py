"""What no budget on the CPU counts: memory that oneDNN takes past torch's allocator.

oneDNN runs convolutions, LSTM layers and products in 16 bits. What its primitives hold comes from the C
library and stays in its cache from the first step on, whatever the batch: some 0.15 MiB for the forward and
backward of a convolution, beside 2 MiB reserved for code of which few pages are touched. Neither torch's
allocator nor a dispatch mode sees it, so no plan can hold it; `benchmarks/scratch.py` measures it. With
`ONEDNN_PRIMITIVE_CACHE_CAPACITY=0` in the environment nothing stays, and every call compiles anew.
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
        f"beside the budget what oneDNN takes past torch for {kinds} kinds of operators: scratch and "
        "compiled kernels, about 0.1 MiB each from the first step on (and 1 MiB of addresses)",
    )
