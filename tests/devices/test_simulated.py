"""The simulated device against the CPU, and against what a GPU refuses and waits for."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from .simulated import CPU, DEVICE, NAME, from_device, shared_randomness, tensors, tf32, to_device, watch


@pytest.fixture
def x():
    return torch.randn(4, 3)


@pytest.fixture
def y():
    return torch.randn(3, 5)


@pytest.fixture
def i():
    return torch.tensor([2, 0, 1])


def close(a, b, atol=1e-12):
    a, b = ([*tensors([v])] for v in (a, b))
    assert len(a) == len(b), (len(a), len(b))
    for s, t in zip(a, b, strict=True):
        assert s.device.type == NAME or t.device.type == NAME or s.device == t.device
        torch.testing.assert_close(from_device(s), from_device(t), rtol=1e-10, atol=atol)


def both(function, *inputs):
    """The same on the CPU and on the device, values and gradients."""
    here = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    there = [to_device(t).requires_grad_(t.is_floating_point()) for t in inputs]
    results = function(*here), function(*there)
    assert all(t.device.type == NAME for t in tensors([results[1]])), "a result on the CPU"
    close(*results)
    totals = [sum((t * t).sum() for t in tensors([r]) if t.is_floating_point() and t.requires_grad) for r in results]
    if isinstance(totals[0], Tensor):
        grads = [
            torch.autograd.grad(total, [t for t in own if t.requires_grad], allow_unused=True)
            for total, own in zip(totals, (here, there), strict=True)
        ]
        close(*([g for g in some if g is not None] for some in grads))


def refused(function, kind, *words):
    with pytest.raises(kind) as raised:
        function()
    assert all(word in str(raised.value) for word in words), raised.value


def test_values_and_first_derivatives(x, y, i):
    both(lambda a, b: (a @ b).tanh().sum(0) / 3, x, y)
    both(lambda a, b: torch.einsum("ij,jk->ki", a, b).softmax(1).log(), x, y)
    both(lambda a: [a[1:], a[:, 0], a.T, a.reshape(-1)[::2], a.unfold(0, 2, 1), *a.split(2), *a.unbind(1)], x)
    both(lambda a, j: (a[j], a[:, j], a[j, j], a[a > 0], a.index_select(0, j), a.gather(1, j[None])), x, i)
    both(lambda a: torch.where(a > 0, a, 0.0) + a.clamp(min=0.1) + a.masked_fill(a < 0, 2.0), x)
    both(lambda a: (torch.linalg.solve(a.T @ a + torch.eye(3, device=a.device), a.T), torch.linalg.vector_norm(a)), x)
    both(lambda a: (torch.linalg.eigvalsh(a.T @ a), torch.linalg.qr(a)[1].abs(), torch.linalg.cholesky(a.T @ a)), x)
    both(lambda a: torch.cat([a, torch.zeros_like(a), torch.ones(2, 3, device=a.device)]).cumsum(0).sort(0)[0], x)
    both(lambda a: F.cross_entropy(a, torch.tensor([0, 1, 2, 0]).to(a.device)), x)
    both(lambda a, b: F.layer_norm(F.linear(a, b.T), [5]), x, y)
    both(lambda a: F.conv2d(a[None, None], a.reshape(2, 1, 2, 3), padding=1), x)
    both(lambda a: F.batch_norm(a, torch.zeros(3, device=a.device), torch.ones(3, device=a.device), training=True), x)
    both(lambda a, j: F.embedding(j, a), x, i)
    both(lambda a: [*torch._foreach_add([a, a * 2], [a, a]), *torch._foreach_norm([a, a * 2])], x)
    both(lambda a: a.to(torch.float32).double() + a.view(torch.int64).double() * 0, x)
    both(
        lambda a, j: (
            a % 2,
            a.detach() // 2,
            a**2,
            2**a,
            1 / a,
            1 - a,
            j % 2,
            j >> 1,
            j & 1,
            a > 1,
            torch.fmod(a, 1.5),
            a.abs().pow(0.5),
        ),
        x,
        i,
    )


def test_double_backward(x):
    def product(a):
        (g,) = torch.autograd.grad((a.sin() * a @ a.T).sum(), a, create_graph=True)
        return torch.autograd.grad((g * g).sum(), a, create_graph=True)[0]

    both(product, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of jacrev in torch 2.11
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_functorch(x, y):
    both(lambda a, b: vmap(lambda r: (r @ b).exp().sum() * r)(a), x, y)
    both(lambda a: vmap(grad(lambda r: (r.sin() * r).prod()))(a), x)
    both(lambda a: hessian(lambda r: (r @ r.T).tanh().sum())(a), x)
    both(lambda a: jvp(lambda r: r.exp().sum(0), (a,), (a,))[1], x)
    both(lambda a: jacrev(lambda r: r.square().sum(1))(a), x)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p, row):
        return functional_call(net, p, (row,)).square().sum()

    close(
        vmap(grad(loss), (None, 0))({n: to_device(p) for n, p in params.items()}, to_device(x))["0.weight"],
        vmap(grad(loss), (None, 0))(params, x)["0.weight"],
    )


def test_checkpoints(x):
    def loss(a, dropout):
        return checkpoint(lambda r: F.dropout(r.tanh(), dropout).exp().sum(), a, use_reentrant=False)

    both(lambda a: loss(a, 0.0), x)
    there = to_device(x).requires_grad_()
    torch.simgpu.manual_seed(3)
    g = torch.autograd.grad(loss(there, 0.5), there)[0]
    torch.simgpu.manual_seed(3)
    close(g, torch.autograd.grad(F.dropout(there.tanh(), 0.5).exp().sum(), there)[0])


def test_views_and_in_place():
    t = torch.arange(6.0, device=NAME).view(2, 3)
    row, column = t[0], t[:, 1]
    row += 10
    column.zero_()
    t.mT[2].mul_(2)
    close(t, torch.tensor([[10.0, 0, 24], [3, 0, 10]]))
    assert t._version >= 3
    assert row._base is t._base
    assert row.data_ptr() == t.data_ptr()
    leaf = torch.ones(2, device=NAME, requires_grad=True)
    kept = (leaf * leaf).sum()
    with torch.no_grad():
        leaf.add_(1)
    refused(lambda: kept.backward(), RuntimeError, "modified by an inplace operation")
    t.resize_(3, 4)
    assert t.shape == (3, 4)
    out = torch.empty(0, device=NAME)
    close(torch.add(row, 1, out=out), out)
    buffer = torch.zeros(3, device=NAME)
    buffer[torch.tensor([0, 2], device=NAME)] = torch.ones(2, device=NAME)
    buffer.index_add_(0, torch.tensor([0], device=NAME), torch.ones(1, device=NAME)).data.mul_(2)
    close(buffer, torch.tensor([4.0, 0, 2]))
    del t, row, column
    gc.collect()


def test_modules_and_optimizers(x):
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        torch.manual_seed(1)
        here = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        there = copy.deepcopy(here).to(NAME)
        for net in (here, there):
            data, optimizer = x.to(next(net.parameters()).device), make(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                net(data).square().sum().backward()
                optimizer.step()
        close([*here.state_dict().values()], [*there.state_dict().values()])
        again = copy.deepcopy(optimizer)
        saved = io.BytesIO()
        torch.save([there.state_dict(), optimizer.state_dict()], saved)
        saved.seek(0)
        model, state = torch.load(saved)
        there.load_state_dict(model), again.load_state_dict(state)
        saved.seek(0)
        assert torch.load(saved, map_location="cpu")[0]["0.weight"].device == CPU
        assert pickle.loads(pickle.dumps(there))[0].weight.device.type == NAME


def test_mixed_devices_are_refused(x, y, i):
    t = to_device(x)
    for wrong in (
        lambda: t + x,
        lambda: t @ y,
        lambda: x.mul_(t),
        lambda: torch.cat([t, x]),
        lambda: F.linear(t, y.T),
        lambda: torch.where(t > 0, t, x),
        lambda: t.index_select(0, i),
        lambda: torch._foreach_add([t], [x]),
        lambda: F.cross_entropy(t, torch.tensor([0, 1, 2, 0])),
        lambda: torch.stack([t[0, 0], torch.tensor(1.0)]),
        lambda: F.embedding(i, t),
        lambda: torch.dot(t[0], x[0]),
        lambda: vmap(lambda r: r + x[0])(t),
        lambda: t.masked_fill(x > 0, 1.0),
        lambda: torch.equal(t, x),
        lambda: t.scatter_(0, i[None], 1.0),
        lambda: torch.addcmul(t, t, x),
        lambda: x.index_put_((to_device(i),), t[0]),
        lambda: torch._fused_adam_(
            [t],
            [t],
            [t],
            [t],
            [],
            [torch.tensor(1.0)],
            lr=0.1,
            beta1=0.9,
            beta2=0.9,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
    ):
        refused(wrong, (RuntimeError, ValueError), "device")
    refused(lambda: t.numpy(), TypeError, "numpy")
    close(t + torch.tensor(1.0) * 2 + (t > torch.tensor(0.0)), x + 2 + (x > 0))  # numbers are allowed
    close(torch._foreach_mul([t], torch.tensor(2.0))[0], 2 * x)
    with watch() as seen:
        close(t[i], x[i])
        t[torch.tensor([0, 1])] = 1.0
    assert len(seen.uploads) >= 2, seen.report()


def test_reads_are_counted(x, i):
    t = to_device(x)
    scalar = t.sum()
    for n, read in (
        (1, lambda: scalar.item()),
        (1, lambda: float(scalar)),
        (1, lambda: bool(scalar > 0)),
        (1, lambda: t.tolist()),
        (1, lambda: t.cpu()),
        (1, lambda: t.to("cpu")),
        (1, lambda: t.nonzero()),
        (1, lambda: t[t > 0]),
        (1, lambda: torch.equal(t, t)),
        (1, lambda: t.unique()),
        (1, lambda: t.allclose(t)),
        (1, lambda: scalar.cpu().numpy()),
        (1, lambda: torch.empty(4, 3).copy_(t)),
        (1, lambda: t.masked_fill_(t > 9, scalar)),
        (1, lambda: t.masked_select(t > 0)),
        (1, lambda: torch.linalg.cholesky(t.T @ t)),
        (1, lambda: torch.simgpu.synchronize()),
        (2, lambda: (t[0, 0].item(), t[0, 1].item())),
        (0, lambda: (t * 2).sum(0).sqrt()),
        (0, lambda: t[0, 1] + t[:, 1:].sum()),
        (0, lambda: torch.where(t > 0, t, 0.0)),
        (0, lambda: t[to_device(i)]),
        (0, lambda: torch.zeros(3, device=NAME)),
        (0, lambda: t.new_full((3,), 2.0)),
        (0, lambda: t.masked_fill(t > 9, 1.0)),
        (0, lambda: t.clone().detach().double()),
    ):
        with watch() as seen:
            read()
        assert seen.counts == (n, 0, 0), seen.report()
    for n, upload in (
        (1, lambda: torch.tensor([1.0, 2.0], device=NAME)),
        (1, lambda: x.to(NAME)),
        (1, lambda: torch.as_tensor(2.0, device=NAME)),
        (0, lambda: torch.ones(2, device=NAME)),
        (0, lambda: t + 2.0),
        (1, lambda: t.new_tensor([1.0])),
    ):
        with watch() as seen:
            upload()
        assert seen.counts == (0, n, 0), seen.report()


def test_pinned_memory_goes_up_without_waiting(x):
    for prepared, quickly, counts in (
        (x, True, (0, 1, 0)),
        (x.pin_memory(), False, (0, 1, 0)),
        (x.pin_memory(), True, (0, 0, 1)),
    ):
        with watch() as seen:
            there = prepared.to(NAME, non_blocking=quickly)
        assert seen.counts == counts, seen.report()
        close(there, x)
    assert not x.is_pinned()


def test_a_step_may_be_told_not_to_wait(x):
    there = to_device(x)
    torch.simgpu.set_sync_debug_mode("error")
    try:
        there.add_(1)
        refused(lambda: there.sum().item(), RuntimeError, "synchronizing")
    finally:
        torch.simgpu.set_sync_debug_mode("default")


def test_random_numbers():
    torch.manual_seed(5)
    a = torch.randn(3, device=NAME)
    torch.manual_seed(5)
    torch.randn(100)  # the CPU's
    close(torch.randn(3, device=NAME), a)
    state, host = torch.simgpu.get_rng_state(), torch.get_rng_state()
    b, drop = torch.rand(3, device=NAME), F.dropout(a.detach().exp(), 0.5)
    assert torch.equal(torch.get_rng_state(), host)
    torch.simgpu.set_rng_state(state)
    close([torch.rand(3, device=NAME), F.dropout(a.detach().exp(), 0.5)], [b, drop])
    with torch.random.fork_rng(devices=[torch.device(NAME)], device_type=NAME):
        torch.rand(9, device=NAME)
    own = torch.Generator(device=NAME).manual_seed(1)
    assert own.device == DEVICE
    assert isinstance(own, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    c = torch.randn(3, device=NAME, generator=own)
    close(torch.randn(3, device=NAME, generator=own.manual_seed(1)), c)
    for wrong in (
        lambda g: torch.randn(3, device=NAME, generator=g),
        lambda g: torch.randperm(3, device=NAME, generator=g),
        lambda g: a.bernoulli(0.5, generator=g),
        lambda g: torch.randint(3, (2,), device=NAME, generator=g),
        lambda g: torch.multinomial(a.exp(), 2, generator=g),
        lambda g: torch.normal(0.0, 1.0, (2,), device=NAME, generator=g),
    ):
        refused(lambda wrong=wrong: wrong(torch.Generator()), RuntimeError, "generator", "cpu")
        wrong(own)
    with shared_randomness():
        torch.manual_seed(2)
        d = torch.randn(3, device=NAME)
    torch.manual_seed(2)
    close(d, torch.randn(3))


def test_errors_in_the_backward_thread(x):
    there = to_device(x).requires_grad_()

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, g):
            return g + x

    refused(lambda: Wrong.apply(there).sum().backward(), RuntimeError, "same device")

    def unpacked(t):
        raise KeyError("of a hook")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
        loss = (there * there).sum()
    refused(loss.backward, KeyError, "of a hook")
    close(torch.autograd.grad((there * there).sum(), there), [2 * x])  # and goes on


def test_backward_thread(x):
    names = []
    t = to_device(x).requires_grad_()

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, g):
            names.append(threading.get_ident())
            float(g.sum())
            return g

    with watch() as seen:
        Note.apply(t).sum().backward()
    assert names[0] != threading.get_ident(), "CUDA has a thread of its own"
    assert seen.counts == (1, 0, 0), seen.report()
    assert "backward" in seen.reads[0].where


def test_traces(x):
    t = to_device(x)
    graph = make_fx(lambda a: torch.func.grad(lambda r: (r.sin() * 2).sum())(a) + torch.ones(3, device=a.device))(t)
    close(graph(t), x.cos() * 2 + 1)
    graph = make_fx(lambda a: (a * a.new_tensor([1.0, 2.0, 3.0]))[[0, 1]] % 2 + torch.tensor(1.0, device=a.device))(t)
    close(graph(t), (x * torch.tensor([1.0, 2.0, 3.0]))[[0, 1]] % 2 + 1)
    torch._dynamo.reset()
    close(torch.compile(lambda a: (a.sin() * 2).sum(0), backend="eager", fullgraph=True)(t), (x.sin() * 2).sum(0))


def test_tensor_cores():
    a, b = torch.randn(1, 2, 8, 8, dtype=torch.float32), torch.randn(3, 2, 3, 3, dtype=torch.float32)
    exact, there = F.conv2d(a, b), F.conv2d(to_device(a), to_device(b))
    with tf32():
        low, product = F.conv2d(to_device(a), to_device(b)), to_device(a[0, 0]) @ to_device(a[0, 1])
    with tf32(matmul=True):
        lower = to_device(a[0, 0]) @ to_device(a[0, 1])
    errors = [float((from_device(v) - exact).abs().max() / exact.abs().max()) for v in (there, low)]
    assert errors[0] < 1e-6
    assert 1e-5 < errors[1] < 1e-2
    exact = a[0, 0] @ a[0, 1]
    errors = [float((from_device(v) - exact).abs().max() / exact.abs().max()) for v in (product, lower)]
    assert errors[0] < 1e-6
    assert 1e-5 < errors[1] < 1e-2


def test_memory_is_freed():
    def used():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = used()
    for _ in range(100):
        a = torch.ones(1000, 1000, device=NAME, requires_grad=True)
        (a * a).sum().backward()
    assert used() - before < 600e6, (used() - before) / 1e6  # of 2.4 GB
