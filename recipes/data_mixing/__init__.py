"""Learn the shares of text sources for training a language model: ``python -m recipes.data_mixing``."""
