"""Two independent readings of the memory that a step needs: live storages and the allocator's blocks."""
