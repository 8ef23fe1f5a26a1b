"""`auto`: several methods, the best plan and the best bound of all."""
