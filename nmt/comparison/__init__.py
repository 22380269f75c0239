"""Which of several systems is better, where, by how much, at what cost, and whether the difference is real."""
