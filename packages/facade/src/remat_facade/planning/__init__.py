"""From a graph and a budget to a plan: the planner, the method and the saved plans."""
