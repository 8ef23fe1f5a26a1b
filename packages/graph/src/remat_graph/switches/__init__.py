"""Parts of a step that can run in another way: decide which do, or allow whatever any of them does."""
