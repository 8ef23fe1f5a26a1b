"""A graph and an order as arrays, for solvers that look at thousands of orders."""
