"""Hand-written algorithms for one problem, as pure functions for torch and JAX.

An algorithm is called with the oracles of a problem, and returns its start and its step: ``step(x, y, state, draw)``
returns the new x, y and state; ``draw(level, k)`` is batch k of the step at a level. Each algorithm draws and computes
the same as the library's method, so their iterates agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bilevel_optim.kernels.counter import mixed, units

from ..problems.shapes import BATCHES

__all__ = ["ALGORITHMS", "LR", "RATE", "TORCH", "Api", "Recipe", "compiled", "drawn"]

TERMS = BATCHES  # terms of each finite sum
LR, RATE, NU, MU, DIRECTIONS, BETA = 1e-3, 0.1, 0.1, 1e-2, 8, 0.1
Vec = tuple[Any, ...]
Draw = Callable[[str, Any], Any]
Step = Callable[[Vec, Vec, Any, Draw], tuple[Vec, Vec, Any]]


@dataclass(frozen=True)
class Api:
    """Interface to the operations that differ between torch and JAX.

    Attributes:
        grad, vjp, vmap: the transformations.
        times: ``times(n, body, start)``, with ``body(k, value)``.
        stack: tuples of arrays, along a new first dimension.
        each: ``each(n, body)``: the results of ``body(k)`` stacked along a new first dimension.
        either: ``either(on, first, second)``: the result of one of two functions without arguments.
        put: ``put(table, k, row)``: the table with row k replaced.
        random: ``random(state, n)``: a number from 0, ..., n - 1, and the next state.
    """

    grad: Callable[..., Any]
    vjp: Callable[..., Any]
    vmap: Callable[..., Any]
    times: Callable[[Any, Callable[[Any, Any], Any], Any], Any]
    stack: Callable[[list[Any]], Any]
    each: Callable[[int, Callable[[Any], Any]], Any]
    either: Callable[[Any, Callable[[], Any], Callable[[], Any]], Any]
    put: Callable[[Any, Any, Any], Any]
    random: Callable[[Any, int], tuple[Any, Any]] | None = None


def _times(n: int, body: Callable[[int, Any], Any], start: Any) -> Any:
    for k in range(n):
        start = body(k, start)
    return start


def _each(n: int, body: Callable[[int], Any]) -> Any:
    leaves, structures = zip(*(tree_flatten(body(k)) for k in range(n)), strict=True)
    return tree_unflatten([torch.stack(column) for column in zip(*leaves, strict=True)], structures[0])


TORCH = Api(
    torch.func.grad,
    torch.func.vjp,
    torch.func.vmap,
    _times,
    torch.stack,
    _each,
    lambda on, first, second: first() if on else second(),
    lambda table, k, row: table.index_copy(0, torch.as_tensor([k]), row.unsqueeze(0)),
)


class Oracles:
    """Derivatives of both losses."""

    def __init__(self, api: Api, f: Callable[..., Any], g: Callable[..., Any]) -> None:
        self.api, self.f, self.g = api, f, g
        self.upper = api.grad(f, argnums=(0, 1))  # gradients in x and y
        self.lower = api.grad(g, argnums=1)

    def products(self, x: Vec, y: Vec, batch: Any, v: Vec) -> tuple[Vec, Vec]:
        """Return cross and Hessian-vector product."""
        cross, product = self.api.vjp(lambda x, y: self.lower(x, y, batch), x, y)[1](v)
        return cross, product

    def hvp(self, x: Vec, y: Vec, batch: Any, v: Vec) -> Vec:
        """Return the Hessian-vector product."""
        product: Vec = self.api.vjp(lambda y: self.lower(x, y, batch), y)[1](v)[0]
        return product

    def cross(self, x: Vec, y: Vec, batch: Any, v: Vec) -> Vec:
        """Return the product with the cross derivative."""
        product: Vec = self.api.vjp(lambda x: self.lower(x, y, batch), x)[1](v)[0]
        return product

    def descended(self, x: Vec, y: Vec, draw: Draw, steps: int) -> Vec:
        """Run lower steps on the first batches."""
        body = lambda k, y: plus(y, self.lower(x, y, draw("lower", k)), -RATE)  # noqa: E731
        result: Vec = self.api.times(steps, body, y)
        return result


def plus(a: Vec, b: Vec, factor: Any = 1.0) -> Vec:
    """Return the vector a + factor b."""
    return tuple(p + factor * q for p, q in zip(a, b, strict=True))


def dot(a: Vec, b: Vec) -> Any:
    """Return the inner product."""
    return sum((p * q).sum() for p, q in zip(a, b, strict=True))


def mean(rows: Any) -> Vec:
    """Return the mean vector along the first dimension."""
    return tuple(t.mean(0) for t in rows)


@dataclass(frozen=True)
class Recipe:
    """An algorithm, and its numbers of upper and lower batches for T lower steps."""

    make: Callable[[Oracles, int], tuple[Callable[[Vec, Vec, Draw], Any], Step]]
    draws: Callable[[int], tuple[int, int]]
    random: bool = False  # draws random integers; the stream's state comes first in the state
    seeded: bool = False  # the seed of the step comes first in the state


def _nothing(x: Vec, y: Vec, draw: Draw) -> Any:
    return ()


def soba(o: Oracles, T: int) -> Any:
    """SOBA: one step of each of y, v and x."""

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return plus(tuple(0 * t for t in y), o.upper(x, y, draw("upper", 0))[1], RATE)

    def step(x: Vec, y: Vec, v: Vec, draw: Draw) -> Any:
        zeta = draw("lower", 0)
        direct, b = o.upper(x, y, draw("upper", 0))
        cross, product = o.products(x, y, zeta, v)
        new = plus(y, o.lower(x, y, zeta), -RATE)
        return plus(x, plus(direct, cross, -1), -LR), new, plus(v, plus(product, b, -1), -RATE)

    return start, step


def fsla(o: Oracles, T: int) -> Any:
    """FSLA: steps of y and v, and a recursive estimate; the state is v, y, x and h of the last step."""

    def direct(x: Vec, y: Vec, v: Vec, draw: Draw) -> Vec:
        return plus(o.upper(x, y, draw("upper", 1))[0], o.cross(x, y, draw("lower", 2), v), -1)

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        # The first step has no previous v; the missing previous estimate does not matter at x = 0.
        zero = tuple(0 * t for t in y)
        return zero, y, x, direct(x, y, zero, draw)

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        v, old_y, old_x, old_h = state
        new = plus(y, o.lower(x, y, draw("lower", 0)), -RATE)
        b = o.upper(x, new, draw("upper", 0))[1]
        w = plus(v, plus(o.hvp(x, new, draw("lower", 1), v), b, -1), -RATE)
        h = plus(direct(x, new, w, draw), plus(old_h, direct(old_x, old_y, v, draw), -1), 1 - BETA)
        return plus(x, h, -LR), new, (w, new, x, h)

    return start, step


def series(o: Oracles, x: Vec, y: Vec, draw: Draw, first: int, upper: int, Q: int) -> Vec:
    """Return StocBiO's estimate with a Neumann series, on lower batches from ``first`` on."""
    direct, b = o.upper(x, y, draw("upper", upper))

    def body(k: Any, both: Any) -> Any:
        term, total = both
        term = plus(term, o.hvp(x, y, draw("lower", first + k), term), -RATE)
        return term, plus(total, term)

    _, total = o.api.times(Q, body, (b, b))
    return plus(direct, o.cross(x, y, draw("lower", first + Q), total), -RATE)


def one_term(o: Oracles, x: Vec, y: Vec, draw: Draw, first: int, n: Any, N: int) -> Vec:
    """Return the estimate with one random term of the series instead of all."""
    direct, b = o.upper(x, y, draw("upper", 0))
    body = lambda k, v: plus(v, o.hvp(x, y, draw("lower", first + k), v), -RATE)  # noqa: E731
    v = o.api.times(n, body, b)
    return plus(direct, o.cross(x, y, draw("lower", first + n), v), -RATE * N)


def stocbio(o: Oracles, T: int) -> Any:
    """StocBiO: lower steps, then the series."""

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        y = o.descended(x, y, draw, T)
        return plus(x, series(o, x, y, draw, T, 0, T), -LR), y, state

    return _nothing, step


def bsa(o: Oracles, T: int, steps: int | None = None) -> Any:
    """BSA: lower steps, then one term of the series."""

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        first = T if steps is None else steps
        y = o.descended(x, y, draw, first)
        assert o.api.random is not None
        n, state = o.api.random(state, T)
        return plus(x, one_term(o, x, y, draw, first, n, T), -LR), y, state

    return _nothing, step


def mrbo(o: Oracles, T: int, randomised: bool = False) -> Any:
    """MRBO: STORM for both gradients; the state is u, h, y and x of the last step."""

    def estimates(x: Vec, y: Vec, draw: Draw, n: Any) -> tuple[Vec, Vec]:
        h = one_term(o, x, y, draw, 1, n, T) if randomised else series(o, x, y, draw, 1, 0, T)
        return o.lower(x, y, draw("lower", 0)), h

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return *estimates(x, y, draw, 0), y, x

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        n = None
        if randomised:
            assert o.api.random is not None
            n, key = o.api.random(state[0], T)
            state = state[1]
        u, h, old_y, old_x = state
        now, before = estimates(x, y, draw, n), estimates(old_x, old_y, draw, n)
        u = plus(now[0], plus(u, before[0], -1), 1 - BETA)
        h = plus(now[1], plus(h, before[1], -1), 1 - BETA)
        after: Any = (u, h, y, x)
        return plus(x, h, -LR), plus(y, u, -RATE), (key, after) if randomised else after

    return start, step


def amigo(o: Oracles, T: int) -> Any:
    """AmIGO: lower steps, then steps on the linear system from its last solution."""

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return tuple(0 * t for t in y)

    def step(x: Vec, y: Vec, v: Vec, draw: Draw) -> Any:
        y = o.descended(x, y, draw, T)
        direct, b = o.upper(x, y, draw("upper", 0))
        body = lambda k, v: plus(v, plus(o.hvp(x, y, draw("lower", T + k), v), b, -1), -RATE)  # noqa: E731
        v = o.api.times(T, body, v)
        return plus(x, plus(direct, o.cross(x, y, draw("lower", 2 * T), v), -1), -LR), y, v

    return start, step


def aid(o: Oracles, T: int) -> Any:
    """AID: lower steps, then a Neumann series on one batch."""

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        y = o.descended(x, y, draw, T)
        fixed = lambda level, k: draw(level, T if level == "lower" else 0)  # noqa: E731
        return plus(x, series(o, x, y, fixed, 0, 0, T), -LR), y, state

    return _nothing, step


def ba(o: Oracles, T: int) -> Any:
    """BA: lower steps from the first y (the state), then conjugate gradients from zero."""

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return y

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        y, zeta = o.descended(x, state, draw, T), draw("lower", T)
        direct, b = o.upper(x, y, draw("upper", 0))

        def body(k: Any, at: Any) -> Any:
            v, r, p = at
            product = o.hvp(x, y, zeta, p)
            alpha = dot(r, r) / dot(p, product)
            new = plus(r, product, -alpha)
            return plus(v, p, alpha), new, plus(new, p, dot(new, new) / dot(r, r))

        v, _, _ = o.api.times(T, body, (tuple(0 * t for t in b), b, b))
        return plus(x, plus(direct, o.cross(x, y, zeta, v), -1), -LR), y, state

    return start, step


def srba(o: Oracles, T: int) -> Any:
    """SRBA: SARAH's recursion for three directions; the state is v, they, the last point and the step number."""
    assert o.api.random is not None
    random = o.api.random

    def directions(point: Any, zeta: Any, xi: Any) -> Any:
        x, y, v = point
        direct, b = o.upper(x, y, xi)
        cross, product = o.products(x, y, zeta, v)
        return o.lower(x, y, zeta), plus(product, b, -1), plus(direct, cross, -1)

    def full(point: Any, draw: Draw) -> Any:
        found = o.api.each(TERMS, lambda k: directions(point, draw("lower", k), draw("upper", k)))
        return tuple(map(mean, found))

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        b = mean(o.api.each(TERMS, lambda k: o.upper(x, y, draw("upper", k))[1]))
        point = x, y, plus(tuple(0 * t for t in y), b, RATE)
        return point[2], full(point, draw), point, 0

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        numbers, (v, d, last, k) = state
        point = x, y, v

        def recursive() -> Any:
            i, after = random(numbers, TERMS)
            j, after = random(after, TERMS)
            now, then = (directions(at, draw("lower", i), draw("upper", j)) for at in (point, last))
            return tuple(plus(a, plus(b, c, -1)) for a, b, c in zip(d, now, then, strict=True)), after

        d, numbers = o.api.either(k % TERMS == 0, lambda: (full(point, draw), numbers), recursive)
        new = plus(v, d[1], -RATE), d, point, k + 1
        return plus(x, d[2], -LR), plus(y, d[0], -RATE), (numbers, new)

    return start, step


def saba(o: Oracles, T: int) -> Any:
    """SABA: SAGA's correction for both losses; the state is v, the last values of all terms, and their means."""
    assert o.api.random is not None
    random = o.api.random

    def lower(x: Vec, y: Vec, v: Vec, zeta: Any) -> Any:
        return o.lower(x, y, zeta), *o.products(x, y, zeta, v)

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        upper = o.api.each(TERMS, lambda k: o.upper(x, y, draw("upper", k)))
        v = plus(tuple(0 * t for t in y), mean(upper[1]), RATE)
        tables = (*upper, *o.api.each(TERMS, lambda k: lower(x, y, v, draw("lower", k))))
        return v, tables, tuple(map(mean, tables))

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        numbers, (v, tables, means) = state
        j, numbers = random(numbers, TERMS)
        i, numbers = random(numbers, TERMS)
        rows = j, j, i, i, i
        new = (*o.upper(x, y, draw("upper", j)), *lower(x, y, v, draw("lower", i)))
        kept = [tuple(t[k] for t in table) for table, k in zip(tables, rows, strict=True)]
        changes = [plus(a, b, -1) for a, b in zip(new, kept, strict=True)]
        direct, b, slope, cross, product = (plus(m, c) for m, c in zip(means, changes, strict=True))
        tables = tuple(
            tuple(o.api.put(t, k, row) for t, row in zip(table, own, strict=True))
            for table, k, own in zip(tables, rows, new, strict=True)
        )
        means = tuple(plus(m, c, 1 / TERMS) for m, c in zip(means, changes, strict=True))
        after = plus(v, plus(product, b, -1), -RATE), tables, means
        return plus(x, plus(direct, cross, -1), -LR), plus(y, slope, -RATE), (numbers, after)

    return start, step


def itd(o: Oracles, T: int) -> Any:
    """ITD: backpropagation through the lower steps."""

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        def unrolled(x: Vec) -> Any:
            end = o.descended(x, y, draw, T)
            return o.f(x, end, draw("upper", 0)), end

        h, end = o.api.grad(unrolled, has_aux=True)(x)
        return plus(x, h, -LR), end, state

    return _nothing, step


def f2sa(o: Oracles, T: int) -> Any:
    """F2SA with central nodes; the state is its two copies of y."""

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return tuple(o.api.stack([t, t]) for t in y)

    def step(x: Vec, y: Vec, copies: Vec, draw: Draw) -> Any:
        def slopes(k: Any, copies: Vec) -> Vec:
            zeta, xi = draw("lower", k), draw("upper", k)
            nodes = o.api.stack([0 * y[0].sum() - NU, 0 * y[0].sum() + NU])
            penalised = lambda c, j: o.g(x, c, zeta) + j * o.f(x, c, xi)  # noqa: E731
            return plus(copies, o.api.vmap(o.api.grad(penalised))(copies, nodes), -RATE)

        copies = o.api.times(T, slopes, copies)
        zeta, xi = draw("lower", T), draw("upper", T)
        ends = [tuple(c[i] for c in copies) for i in (0, 1)]

        def value(x: Vec) -> Any:
            low, high = ((o.f(x, y, xi), o.g(x, y, zeta)) for y in ends)
            return (low[0] + high[0]) / 2 + (high[1] - low[1]) / (2 * NU)

        return plus(x, o.api.grad(value)(x), -LR), tuple((c[0] + c[1]) / 2 for c in copies), copies

    return start, step


def pzobo(o: Oracles, T: int) -> Any:
    """PZOBO: paths from perturbed x and the first y, with the library's directions; the state begins with a seed."""

    def start(x: Vec, y: Vec, draw: Draw) -> Any:
        return torch.tensor(0), y

    def step(x: Vec, y: Vec, state: Any, draw: Draw) -> Any:
        (seed, y0), index, moves = state, 0, []
        keys = mixed(mixed(seed) + torch.arange(DIRECTIONS))
        for t in x:
            at = torch.arange(index, index + t.numel())
            moves.append(units("normal", keys.unsqueeze(1), keys, 1, at, t.dtype).view(-1, *t.shape))
            index += t.numel()
        end = o.descended(x, y0, draw, T)
        direct, b = o.upper(x, end, draw("upper", 0))

        def response(*u: Tensor) -> Tensor:
            moved = o.descended(plus(x, u, MU), y0, draw, T)
            return torch.stack([((m - e) * s).sum() for m, e, s in zip(moved, end, b, strict=True)]).sum() / MU

        c = torch.func.vmap(response)(*moves) / DIRECTIONS
        indirect = tuple((c @ u.reshape(DIRECTIONS, -1)).view(u.shape[1:]) for u in moves)
        return plus(x, plus(direct, indirect), -LR), end, state

    return start, step


ALGORITHMS = {
    "soba": Recipe(soba, lambda T: (1, 1)),
    "fsla": Recipe(fsla, lambda T: (2, 3)),
    "stocbio": Recipe(stocbio, lambda T: (1, 2 * T + 1)),
    "mrbo": Recipe(mrbo, lambda T: (1, T + 2)),
    "amigo": Recipe(amigo, lambda T: (1, 2 * T + 1)),
    "aid-neumann": Recipe(aid, lambda T: (1, T + 1)),
    "ba": Recipe(ba, lambda T: (1, T + 1)),
    "itd": Recipe(itd, lambda T: (1, T)),
    "f2sa": Recipe(f2sa, lambda T: (T + 1, T + 1)),
    "pzobo": Recipe(pzobo, lambda T: (1, T), seeded=True),
    "srba": Recipe(srba, lambda T: (0, 0), random=True),
    "saba": Recipe(saba, lambda T: (0, 0), random=True),
    "bsa": Recipe(bsa, lambda T: (1, 2 * T), random=True),
    "ttsa": Recipe(lambda o, T: bsa(o, T, 1), lambda T: (1, T + 1), random=True),
    "sustain": Recipe(lambda o, T: mrbo(o, T, randomised=True), lambda T: (1, T + 1), random=True),
}


def drawn(uppers: Any, lowers: Any) -> Draw:
    """Return a draw function on lists of batches."""
    return lambda level, k: (uppers if level == "upper" else lowers)[k]


def compiled(step: Step, x: Vec, y: Vec, state: Any, uppers: Any, lowers: Any) -> Callable[..., Any]:
    """Trace and compile a step as a function of x, y, state and the batches."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain(x: Vec, y: Vec, state: Any, uppers: Any, lowers: Any) -> Any:
        return step(x, y, state, drawn(uppers, lowers))

    graph = make_fx(plain)(x, y, state, uppers, lowers)
    return torch.compile(graph)
