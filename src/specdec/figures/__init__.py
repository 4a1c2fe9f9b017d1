"""Figures and tables of a run, and how a notebook shows them."""
