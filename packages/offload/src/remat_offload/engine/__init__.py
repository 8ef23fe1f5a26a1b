"""Moves values between device and host according to a plan while the model trains."""
