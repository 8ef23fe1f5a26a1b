"""Find the calls that can write a buffer of the caller themselves, as they do in eager.

Capture turns ``count.add_(1)`` into a call that makes a new tensor, which is copied into the buffer at the
end of the forward. If nothing else reads the buffer or the new tensor, it does not matter when the buffer is
written. So the in-place form of the call writes it, and the copy is left out. Every batch norm counts its
batches in this way. Such a call is never repeated, since a repeat would read what it has written.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.torch_private.tensors import storage_id
from remat_executor.translation.inplace import InPlace, overwritable


def direct_writes(
    captured: Captured,
    buffers: Collection[Node],
    forms: Mapping[Any, Mapping[int, InPlace]],
    base_of: Mapping[Node, Node],
) -> dict[Node, tuple[Node, InPlace]]:
    """By call the buffer that it can write, and the form that writes over its first argument.

    Args:
        captured: the step.
        buffers: the placeholders that may be written.
        forms: `in_place_forms()`.
        base_of: fx node -> node whose storage it shows.
    """
    storages = [storage_id(node.meta["val"]) for node in captured.externals]
    returned = {output.node for output in captured.outputs}
    found = {}
    for buffer, new in captured.mutations:
        # The results of the graph list what buffers become; a view of either is a reader.
        read = [*buffer.users] != [new] or any(user.op != "output" for user in new.users) or new in returned
        if buffer not in buffers or read or storages.count(storage_id(buffer.meta["val"])) > 1:
            continue
        for base, place, form in overwritable(new, forms, base_of):
            if base is buffer and place == 0:
                found[new] = (buffer, form)
    return found
