"""The loops: fit, evaluation and prediction, each readable from top to bottom."""
