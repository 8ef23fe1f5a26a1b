"""Plan a graph for a budget: the planner, the choice of the method, and saved plans."""
