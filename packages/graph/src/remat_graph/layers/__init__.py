"""What a plan does, layer by layer: names of layers, and repeats and other ways by layer."""
