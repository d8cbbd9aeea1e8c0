"""Finding the answer in what a model said."""
