"""A graph and an order as arrays, for solvers that evaluate thousands of orders."""
