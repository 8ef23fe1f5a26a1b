"""The planned step as one autograd function, and the calls that are pending between its two halves."""
