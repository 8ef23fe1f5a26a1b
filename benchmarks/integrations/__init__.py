"""Trainers and training scripts as users have them, with and without the one line of remat."""
