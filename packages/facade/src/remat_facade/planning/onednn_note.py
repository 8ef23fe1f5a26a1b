"""Note the memory on the CPU that no budget covers: oneDNN allocates outside torch's allocator.

oneDNN runs convolutions, LSTM layers and 16-bit products. Its primitives allocate with the C library and stay
in its cache from the first step on, at any batch size: about 0.15 MiB for the forward and backward of a
convolution, and 2 MiB of address space for code, of which few pages are touched. Neither torch's allocator
nor a dispatch mode sees this memory, so no plan can count it; `benchmarks/scratch.py` measures it. With
`ONEDNN_PRIMITIVE_CACHE_CAPACITY=0` in the environment nothing is kept, and every call compiles again.
"""

import re

from remat_graph import Graph

_LAYERS = re.compile(r"aten\.(convolution|mkldnn_rnn_layer)|recording_lstm_layer")
_PRODUCTS = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|mv|addmv)\.default\(b?float16\[")
_TAKEN = re.compile(r"\(b?float(16|32)\[[^@]*@cpu")


def onednn_note(graph: Graph) -> tuple[str, ...]:
    """One line for a graph with operators that oneDNN runs; nothing for any other graph.

    Args:
        graph: a captured step; the keys of its ops name kernels and devices.
    """
    if "no_onednn" in dict(graph.conditions).get("kernels", ""):
        return ()
    keys = {op.key for op in graph.ops if _LAYERS.match(op.target) or _PRODUCTS.match(op.key)}
    kinds = sum(_TAKEN.search(key) is not None for key in keys)
    if not kinds:
        return ()
    return (
        f"not in the budget: workspace and compiled kernels of oneDNN for {kinds} kinds of operators, about "
        "0.1 MiB each (and 1 MiB of address space), from the first step on",
    )
