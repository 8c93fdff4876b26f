"""The training of the packaged reader: lessons, network, trainer and examinations; see `__main__`."""
