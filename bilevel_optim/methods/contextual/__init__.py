"""A fresh lower problem at every draw."""
