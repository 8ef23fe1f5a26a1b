"""Translation: from FX nodes to the ops, values and recipes of the graph IR."""
