"""The version, in a module that imports nothing, so that every other one may import it."""

__version__ = "0.1.0"
