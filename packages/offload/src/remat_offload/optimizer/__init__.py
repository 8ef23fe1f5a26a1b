"""Steps the user's optimizer in parts, on the device or on the CPU, with bit-identical results."""
