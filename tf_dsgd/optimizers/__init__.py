"""Keras optimizers for delayed gradients; none in this version."""
