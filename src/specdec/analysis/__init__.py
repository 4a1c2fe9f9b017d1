"""What follows from the rows of a run: means and intervals, tables, the threshold to recommend, a comparison."""
