"""A corpus is prepared once: read and filtered in the first pass, encoded in the second, kept by content."""
