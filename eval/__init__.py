"""The evaluation: data sets, the methods that are compared, metrics, runs and the demo."""
