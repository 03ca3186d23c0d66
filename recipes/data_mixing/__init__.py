"""How much of each source of text a language model is to be trained on: ``python -m recipes.data_mixing``."""
