"""Predicted speed: the roofline, communication, kernels, and how far it may be off."""
