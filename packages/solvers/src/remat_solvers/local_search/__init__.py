"""Local moves on an order: evict, repair, polish, anneal, minimize the peak."""
