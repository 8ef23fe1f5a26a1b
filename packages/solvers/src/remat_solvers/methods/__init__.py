"""One registered method a file; importing this package imports none of them."""
