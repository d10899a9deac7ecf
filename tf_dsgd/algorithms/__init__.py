"""One file per paper: the mathematics of each algorithm, as three rules."""
