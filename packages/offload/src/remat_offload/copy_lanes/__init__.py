"""Machines with lanes for copies and for CPU work: CUDA, and one simulated on the CPU."""
