"""Two independent readings of a step's memory: live storages and the allocator's blocks."""
