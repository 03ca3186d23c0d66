"""Operations that people put into losses, each with parameters y and an input z: the rows of `derivatives`.

A case is made by a function without arguments, which returns a module (its parameters are y) and a function of the
module and z. All is float64, smooth at the point unless the name says otherwise, and without randomness.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case"]

DOUBLE = torch.float64
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
BITS = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1]] * 3, dtype=DOUBLE)
MSE_LOSS: Any = F.mse_loss  # its stub has no weight
L1_LOSS: Any = F.l1_loss
FLAT, SEQUENCE, IMAGE = (6, 4), (3, 5, 4), (2, 4, 6, 6)
Made = tuple[nn.Module, Callable[[Any, Tensor], Tensor]]


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        group: heading under which the row stands.
        make: returns the module and the function.
        shape: shape of z.
        rtol: relative error up to which a derivative is right.
        held: row of the first parameter that is a constant, which directions leave out.
    """

    group: str
    make: Callable[[], Made]
    shape: tuple[int, ...] = FLAT
    rtol: float = 1e-4
    held: int | None = None


CASES: dict[str, Case] = {}


def case(name: str, group: str, make: Callable[[], Made], shape: tuple[int, ...] = FLAT, **options: Any) -> None:
    """Add a row."""
    CASES[name] = Case(group, make, shape, **options)


def layer(name: str, group: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = FLAT) -> None:
    """Add a row for a module of z."""
    case(name, group, lambda: (make().to(DOUBLE), lambda module, z: first(module(z))), shape)


def on_outputs(name: str, group: str, function: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
    """Add a row for a function of the outputs of a linear layer and z."""
    case(name, group, lambda: (nn.Linear(4, 4).to(DOUBLE), lambda module, z: function(module(z), z)), **options)


def on_matrix(
    name: str, function: Callable[[Tensor], Tensor], *, identity: bool = False, symmetric: bool = True
) -> None:
    """Add a row for a function of a matrix w (1 + mean(z^2)), symmetric positive definite if asked for."""

    def make() -> Made:
        weight = torch.randn(4, 4, dtype=DOUBLE) / 4 + torch.diag(torch.arange(1.0, 5, dtype=DOUBLE))
        held = Held(torch.eye(4, dtype=DOUBLE) if identity else weight)

        def of(module: Any, z: Tensor) -> Tensor:
            w = (module.w + module.w.T) / 2 if symmetric else module.w
            return function(w * (1 + z.square().mean()))

        return held, of

    case(name, "Linear algebra", make)


class Held(nn.Module):
    """A module with one tensor."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(value.clone())


def penalty(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = FLAT) -> None:
    """Add a row for a loss with the gradient of a module in z, so that a product needs third derivatives."""

    def of(module: Any, z: Tensor) -> Tensor:
        point = z if z.requires_grad else z.detach().requires_grad_()
        found: Tensor
        (found,) = torch.autograd.grad(first(module(point)).sin().sum(), point, create_graph=True)
        return found

    case(f"{name}, its gradient", "Gradient penalties", lambda: (make().to(DOUBLE), of), shape)


def first(result: Any) -> Tensor:
    """Return the result, or the first of several."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def at_zero(function: Callable[[Tensor], Tensor]) -> Callable[[], Made]:
    """Return a case for a function of parameters that are zero."""
    return lambda: (Held(torch.zeros(4, dtype=DOUBLE)), lambda module, z: function(module.w * z.mean(0)))


for name, make in {
    "nn.Linear": lambda: nn.Linear(4, 3),
    "nn.Bilinear": lambda: Twice(nn.Bilinear(4, 4, 3)),
    "nn.MultiheadAttention": lambda: Thrice(nn.MultiheadAttention(4, 2, batch_first=True)),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, F.gelu, batch_first=True),
}.items():
    layer(name, "Layers", make, SEQUENCE)


class Twice(nn.Module):
    """A module that takes its input twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, z: Tensor) -> Any:
        """Apply the part."""
        return self.part(z, z)


class Thrice(Twice):
    """A module that takes its input three times."""

    def forward(self, z: Tensor) -> Any:
        """Apply the part."""
        return self.part(z, z, z)


layer("nn.Conv1d", "Layers", lambda: nn.Conv1d(5, 3, 3), SEQUENCE)
layer("nn.Conv2d", "Layers", lambda: nn.Conv2d(4, 3, 3), IMAGE)
layer("nn.ConvTranspose2d", "Layers", lambda: nn.ConvTranspose2d(4, 3, 3), IMAGE)
case(
    "F.embedding", "Layers", lambda: (Held(torch.randn(4, 4, dtype=DOUBLE)), lambda m, z: F.embedding(LABELS, m.w) * z)
)
case(
    "F.embedding, padding_idx",
    "Layers",
    lambda: (Held(torch.randn(4, 4, dtype=DOUBLE).triu(1).T), lambda m, z: F.embedding(LABELS, m.w, padding_idx=0) * z),
    held=0,
)
case(
    "F.embedding_bag, weights",
    "Layers",
    lambda: (
        Held(torch.randn(4, 3, dtype=DOUBLE)),
        lambda m, z: F.embedding_bag(LABELS.reshape(3, 2), m.w, per_sample_weights=z[:3, :2], mode="sum"),
    ),
)
on_outputs("F.gelu", "Layers", lambda o, z: F.gelu(o))
on_outputs("F.silu", "Layers", lambda o, z: F.silu(o))
on_outputs("F.softplus", "Layers", lambda o, z: F.softplus(o))
on_outputs("F.relu", "Layers", lambda o, z: F.relu(o))
on_outputs("F.max_pool1d", "Layers", lambda o, z: F.max_pool1d(o[None], 2))
on_outputs(
    "F.interpolate, bicubic", "Layers", lambda o, z: F.interpolate(o[None, None], scale_factor=2, mode="bicubic")
)
on_outputs(
    "F.grid_sample",
    "Layers",
    lambda o, z: F.grid_sample(z[None, None], 0.5 * o[:, None, :2].tanh()[None], align_corners=False),
)

NORMALISATIONS: dict[str, Callable[[], nn.Module]] = {
    "nn.BatchNorm1d, training": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "nn.BatchNorm1d, eval": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(),
    "nn.LayerNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "nn.RMSNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)),
    "nn.GroupNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)),
}
for name, make in NORMALISATIONS.items():
    layer(name, "Normalisations", make)
on_outputs("F.normalize", "Normalisations", lambda o, z: F.normalize(o))
layer(
    "nn.InstanceNorm2d",
    "Normalisations",
    lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.InstanceNorm2d(3, affine=True)),
    IMAGE,
)

for name, make in NORMALISATIONS.items():
    penalty(name, make)
penalty("nn.Linear, nn.Softplus", lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus()))
penalty("nn.Conv2d, nn.GELU", lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.GELU()), IMAGE)
penalty("nn.MultiheadAttention", lambda: Thrice(nn.MultiheadAttention(4, 2, batch_first=True)), SEQUENCE)
penalty("nn.LSTM", lambda: nn.LSTM(4, 3, batch_first=True), SEQUENCE)

layer("nn.RNN", "Recurrent layers", lambda: nn.RNN(4, 3, batch_first=True), SEQUENCE)
layer("nn.LSTM", "Recurrent layers", lambda: nn.LSTM(4, 3, batch_first=True), SEQUENCE)
layer("nn.GRU", "Recurrent layers", lambda: nn.GRU(4, 3, batch_first=True), SEQUENCE)
layer("nn.LSTMCell", "Recurrent layers", lambda: nn.LSTMCell(4, 3))


def attention(o: Tensor, z: Tensor) -> Tensor:
    """Apply the kernel that torch chooses."""
    return F.scaled_dot_product_attention(o[None, None], z[None, None], o[None, None])


def math_attention(o: Tensor, z: Tensor) -> Tensor:
    """Apply the plain kernel."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return attention(o, z)


def flexible_attention(o: Tensor, z: Tensor) -> Tensor:
    """Apply flex_attention without compilation."""
    from torch.nn.attention.flex_attention import flex_attention

    return first(flex_attention(o[None, None], z[None, None], o[None, None]))


on_outputs("F.scaled_dot_product_attention", "Attention", attention)
on_outputs("attention, SDPBackend.MATH", "Attention", math_attention)
on_outputs("flex_attention, eager", "Attention", flexible_attention)


def chunked(o: Tensor, z: Tensor) -> Tensor:
    """Apply the chunked loss of large vocabularies."""
    return F.linear_cross_entropy(z, o[:4], LABELS, options=nn.LinearCrossEntropyOptions())


for name, loss in {
    "F.cross_entropy": lambda o, z: F.cross_entropy(o, LABELS, label_smoothing=0.1),
    "F.cross_entropy, constant weight=": lambda o, z: F.cross_entropy(
        o, LABELS, weight=torch.arange(1.0, 5, dtype=DOUBLE)
    ),
    "F.cross_entropy, weight= of x": lambda o, z: F.cross_entropy(o, LABELS, weight=z.mean(0).exp()),
    "the unreduced loss times weights of x": lambda o, z: (
        z.mean(0).exp()[LABELS] * F.cross_entropy(o, LABELS, reduction="none")
    ).mean(),
    "F.binary_cross_entropy_with_logits": lambda o, z: F.binary_cross_entropy_with_logits(o, BITS),
    "with logits, pos_weight= of x": lambda o, z: F.binary_cross_entropy_with_logits(
        o, BITS, pos_weight=z.mean(0).exp()
    ),
    "F.mse_loss, weight= of x": lambda o, z: MSE_LOSS(o, BITS, weight=z.exp()),
    "F.l1_loss, weight= of x": lambda o, z: L1_LOSS(o, BITS, weight=z.exp()),
    "F.huber_loss": lambda o, z: F.huber_loss(o, BITS, delta=0.3),
    "F.gaussian_nll_loss": lambda o, z: F.gaussian_nll_loss(o, BITS, z.exp()),
    "F.kl_div": lambda o, z: F.kl_div(o.log_softmax(1), z.softmax(1)),
    "F.ctc_loss": lambda o, z: F.ctc_loss(
        o.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
    ),
    "F.triplet_margin_loss": lambda o, z: F.triplet_margin_loss(o, z, z.flip(0), margin=5.0),
    "F.cosine_similarity": lambda o, z: F.cosine_similarity(o, z),
    "F.multi_margin_loss": lambda o, z: F.multi_margin_loss(o, LABELS, p=2),
    "F.linear_cross_entropy, chunked": chunked,
}.items():
    on_outputs(name, "Losses", loss)
case("norm() ** 2 at zero", "Losses", at_zero(lambda w: w.norm() ** 2))
case("std() ** 2 at zero", "Losses", at_zero(lambda w: w.std() ** 2))
case("square().sum() at zero", "Losses", at_zero(lambda w: w.square().sum()))


def settled(module: nn.Module) -> nn.Module:
    """Return a module after many power iterations."""
    for _ in range(200):
        module(torch.randn(2, 4, dtype=DOUBLE))
    return module


layer("utils.weight_norm", "Parametrisations", lambda: plain(nn.utils.weight_norm, nn.Linear(4, 3)))
layer("parametrizations.weight_norm", "Parametrisations", lambda: parametrizations.weight_norm(nn.Linear(4, 3)))
layer("parametrizations.orthogonal", "Parametrisations", lambda: parametrizations.orthogonal(nn.Linear(4, 4)))
# Its diagonal holds signs that are read by int(): values jump at 1.
layer(
    "parametrizations.orthogonal, not square", "Parametrisations", lambda: parametrizations.orthogonal(nn.Linear(4, 3))
)
layer(
    "spectral_norm, training",
    "Parametrisations",
    lambda: settled(parametrizations.spectral_norm(nn.Linear(4, 3).to(DOUBLE))),
)
layer(
    "spectral_norm, eval",
    "Parametrisations",
    lambda: settled(parametrizations.spectral_norm(nn.Linear(4, 3).to(DOUBLE))).eval(),
)


def plain(wrap: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    """Apply a deprecated function without its warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(module)


def root(a: Tensor) -> Tensor:
    """Return the square root of a symmetric matrix by eigenvectors."""
    values, vectors = torch.linalg.eigh(a)
    found: Tensor = vectors * values.sqrt() @ vectors.T
    return found


for name, function in {
    "linalg.inv": torch.linalg.inv,
    "linalg.solve": lambda a: torch.linalg.solve(a, BITS[:4]),
    "linalg.lstsq": lambda a: torch.linalg.lstsq(a[:, :2], BITS[:4]).solution,
    "linalg.cholesky": torch.linalg.cholesky,
    "linalg.slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "linalg.eigvalsh": torch.linalg.eigvalsh,
    "linalg.svdvals": torch.linalg.svdvals,
    "linalg.matrix_exp": lambda a: torch.linalg.matrix_exp(a / 4),
    "linalg.qr": lambda a: torch.linalg.qr(a)[1].abs(),
    "linalg.pinv": torch.linalg.pinv,
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "root by linalg.eigh": root,
}.items():
    on_matrix(name, function)
on_matrix("root by linalg.eigh at the identity", root, identity=True)


def of_linalg(name: str, a: Tensor) -> Tensor:
    """Apply a function that not every torch has."""
    return first(getattr(torch.linalg, name)(a))


for name, symmetric in {"polar": False, "matrix_sqrth": True}.items():
    for suffix in ("", " at the identity"):
        on_matrix(
            f"linalg.{name}{suffix}",
            partial(of_linalg, name),
            identity=bool(suffix),
            symmetric=symmetric,
        )
on_outputs("cdist", "Linear algebra", lambda o, z: torch.cdist(o, z))
on_outputs("fft.rfft", "Linear algebra", lambda o, z: torch.fft.rfft(o).abs())
on_outputs("sparse.mm", "Linear algebra", lambda o, z: torch.sparse.mm(BITS.to_sparse(), o.T @ z))
on_outputs("sparse.mm, sparse values", "Linear algebra", lambda o, z: torch.sparse.mm(
    torch.sparse_coo_tensor(torch.ones(6, 4).nonzero().T, o.flatten(), (6, 4)), z.T))  # fmt: skip
on_outputs("cumprod", "Linear algebra", lambda o, z: o.cumprod(1))
on_outputs("scatter_reduce, amax", "Linear algebra", lambda o, z: o.new_zeros(4, 4).scatter_reduce(
    0, LABELS[:, None].expand(6, 4), o, "amax", include_self=False))  # fmt: skip


def step(h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state of a recurrence, twice."""
    h = (h * z + z).tanh()
    return h, h.clone()


def by_scan(o: Tensor, z: Tensor) -> Tensor:
    """Return the last state of a recurrence."""
    from torch._higher_order_ops import scan

    return first(scan(step, torch.zeros_like(o[0]), o))


def by_associative_scan(o: Tensor, z: Tensor) -> Tensor:
    """Return products over rows."""
    from torch._higher_order_ops import associative_scan

    found: Tensor = associative_scan(torch.mul, o, 0, combine_mode="generic")
    return found


def by_while_loop(o: Tensor, z: Tensor) -> Tensor:
    """Return a state after three steps, from zero."""
    import torch._higher_order_ops as operators

    loop: Any = operators.while_loop
    found = loop(
        lambda i, h: i < 3,
        lambda i, h: (i + 1, (h * o + o).tanh()),
        (torch.zeros((), dtype=torch.int64), torch.zeros_like(o)),
    )
    result: Tensor = found[1]
    return result


def checkpointed(reentrant: bool, o: Tensor, z: Tensor) -> Tensor:
    """Apply a function that is evaluated again for its derivative."""
    found: Tensor = checkpoint(torch.tanh, o, use_reentrant=reentrant)
    return found


on_outputs("torch.cond", "Control flow and wrappers", lambda o, z: torch.cond(
    z.sum() > 1e9, lambda t: t.sin(), lambda t: t * t * t, (o,)))  # fmt: skip
on_outputs("scan", "Control flow and wrappers", by_scan)
on_outputs("associative_scan", "Control flow and wrappers", by_associative_scan)
on_outputs("while_loop", "Control flow and wrappers", by_while_loop)
for name, reentrant in {"checkpoint": False, "checkpoint, reentrant": True}.items():
    on_outputs(name, "Control flow and wrappers", partial(checkpointed, reentrant))


class Cube(torch.autograd.Function):
    """An operation whose backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Return the cube."""
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the derivative."""
        (t,) = ctx.saved_tensors
        return 3 * t**2 * gradient


class Once(Cube):
    """An operation whose backward says that it cannot be differentiated."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the derivative."""
        return Cube.backward(ctx, gradient)


class Detached(Cube):
    """An operation whose backward returns a number without a graph, and does not say so."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the derivative."""
        return Cube.backward(ctx, gradient).detach()


@torch.library.custom_op("bilevel_rows::cube", mutates_args=())
def cube(t: Tensor) -> Tensor:
    """Return the cube, as a custom operator."""
    return t**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
COMPILED: Any = torch.compile(torch.tanh, backend="aot_eager")
on_outputs("autograd.Function", "Control flow and wrappers", lambda o, z: Cube.apply(o))
on_outputs("autograd.Function, once_differentiable", "Control flow and wrappers", lambda o, z: Once.apply(o))
on_outputs("autograd.Function, detached backward", "Control flow and wrappers", lambda o, z: Detached.apply(o))
on_outputs("library.custom_op", "Control flow and wrappers", lambda o, z: cube(o))
on_outputs("torch.compile inside, aot_eager", "Control flow and wrappers", lambda o, z: COMPILED(o))
