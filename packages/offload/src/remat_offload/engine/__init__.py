"""Moves values between device and host as a plan says, while the model trains."""
