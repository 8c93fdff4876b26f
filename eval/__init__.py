"""The proof: a small reader of our own, the data sets, the rival methods and the paper's figures."""
