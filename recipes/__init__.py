"""Small programs that show the library on real problems; run as ``python -m recipes.NAME``."""
