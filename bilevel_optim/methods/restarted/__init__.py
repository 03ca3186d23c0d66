"""Nesterov momentum on x with restarts, for bilevel, minimax and ordinary problems."""
