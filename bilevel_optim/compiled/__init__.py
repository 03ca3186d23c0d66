"""Compiled steps: ``torch.compile`` of the library's own step."""
