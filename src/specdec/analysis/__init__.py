"""What follows from the rows of a run: means and intervals, the threshold to recommend, one run against another."""
