"""How solvers run: several at once, in a process of their own, and until they are stopped."""
