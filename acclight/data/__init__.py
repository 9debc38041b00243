"""What one rank reads of the user's loaders: training data that resumes anywhere, evaluation data exactly once."""

from acclight.data.evaluate import EvalData
from acclight.data.loader import rank_identity
from acclight.data.train import TrainData

__all__ = ["EvalData", "TrainData", "rank_identity"]
