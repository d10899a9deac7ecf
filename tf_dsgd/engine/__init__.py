"""Engines: who runs the rules, where and in which order. None of them knows an algorithm."""
