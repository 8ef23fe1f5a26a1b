"""Mixed-integer programs and their backends; importing this package loads none of them."""
