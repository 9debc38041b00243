"""What one rank reads of the user's loaders: training data that resumes anywhere, evaluation data exactly once."""

from acclight.data.evaluate import EvalData
from acclight.data.train import TrainData

__all__ = ["EvalData", "TrainData"]
