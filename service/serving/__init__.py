"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""
