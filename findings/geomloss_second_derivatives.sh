#!/bin/bash
# geomloss: second derivatives of SamplesLoss exist and are wrong; first derivatives are right.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 geomloss==0.3.1
"$PY" -W ignore - <<'EOF'
import sys, torch, geomloss

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
a, b, v = torch.randn(20, 2), torch.randn(20, 2) + 1, torch.randn(20, 2)
print("guess: double backward equals differences of the gradient")
errors = []
for name in ("sinkhorn", "energy", "gaussian", "laplacian"):
    loss = geomloss.SamplesLoss(name, p=2, blur=0.5, backend="tensorized")

    def gradient(z, graph=False):
        z = z.detach().requires_grad_()
        return z, torch.autograd.grad(loss(z, b), z, create_graph=graph)[0]

    z, slope = gradient(a, graph=True)
    product = torch.autograd.grad((slope * v).sum(), z)[0]
    difference = (gradient(a + 1e-5 * v)[1] - gradient(a - 1e-5 * v)[1]) / 2e-5
    errors.append(float((product - difference).norm() / difference.norm()))
    print(f"seen: {name}: Hessian-vector product is {errors[-1]:.0%} off")
sys.exit(min(errors) < 0.1)
EOF
