"""Programs that start a cluster's processes on one machine, and that serve one task."""
