"""A capped pool of host memory, pinned or plain."""
