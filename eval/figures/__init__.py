"""The figures of the paper, from runs and from measurements of their own."""
