"""Many requests at once on one model: a fair queue, and one thread that prefills and decodes."""
