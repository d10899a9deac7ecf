"""Delays and faults of simulated clusters, and studies on them."""
