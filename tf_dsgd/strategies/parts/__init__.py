"""Model parallelism: one replica over several devices, each with a part of the layers."""
