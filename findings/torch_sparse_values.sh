#!/bin/sh
# torch.sparse.mm: the gradient with respect to the values of the sparse matrix has no graph.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)
y = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
places = torch.tensor([[0, 1], [0, 1]])  # the diagonal
product = torch.sparse.mm(torch.sparse_coo_tensor(places, y, (2, 2)), torch.ones(2, 1, dtype=y.dtype))
value = product.pow(3).sum() + y.square().sum()
(gradient,) = torch.autograd.grad(value, y, create_graph=True)
(second,) = torch.autograd.grad(gradient.sum(), y)
print("gradient:", gradient.tolist(), "(3 y^2 + 2 y: right)")
print("guess for its derivative: 6 y + 2 = [5, -4]")
print("seen:", second.tolist(), "(the 2 alone, without an error)")
assert second.tolist() == [2.0, 2.0], "behaviour has changed"
PYTHON
