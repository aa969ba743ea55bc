"""Files into the index, in a process of its own."""
