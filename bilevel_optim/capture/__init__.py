"""Captured steps: losses read by Dynamo, a step traced to a graph, compiled, compared, replayed."""
