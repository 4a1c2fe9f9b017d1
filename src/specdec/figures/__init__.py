"""Figures of a run, and how a notebook shows them."""
