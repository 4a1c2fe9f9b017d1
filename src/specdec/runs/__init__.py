"""What a run measures and keeps in its folder: sweep, load ramp, step costs, worker path."""
