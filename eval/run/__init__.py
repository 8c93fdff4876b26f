"""Runs: a configuration, its folder, and what came out."""
