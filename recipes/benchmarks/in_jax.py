"""Algorithms of `by_hand` in JAX: many steps in one jitted ``lax.scan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from ..problems.shapes import Shape
from .by_hand import ALGORITHMS, Api, Oracles

__all__ = ["LOSSES", "METHODS", "loop"]

METHODS = ("soba", "stocbio", "mrbo", "amigo", "fsla", "ttsa", "sustain", "bsa", "ba", "srba", "saba")


def _losses(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the losses of the problem of this name in `shapes`."""
    import jax
    import jax.numpy as jnp

    def fit(y: Any, batch: Any) -> Any:
        scores = batch[0] @ y[0]
        return (jax.nn.softplus(scores) - batch[1] * scores).mean()

    def penalised(x: Any, y: Any, batch: Any) -> Any:
        return fit(y, batch) + 0.05 * (jnp.exp(x[0]) * y[0] ** 2).sum()

    def entropy(y: Any, batch: Any) -> Any:
        scores = jax.nn.log_softmax(batch[0] @ y[0].T + y[1])
        return -jnp.take_along_axis(scores, batch[1][:, None], 1)[:, 0]

    def weighted(x: Any, y: Any, batch: Any) -> Any:
        ridge = sum((t**2).sum() for t in y)
        return (jax.nn.sigmoid(x[0][batch[2]]) * entropy(y, batch)).mean() + 1e-3 * ridge

    return {
        "logistic": (lambda x, y, batch: fit(y, batch), penalised),
        "softmax": (lambda x, y, batch: entropy(y, batch).mean(), weighted),
    }[name]


LOSSES = ("logistic", "softmax")


def loop(problem: str, method: str, shape: Shape, steps: int) -> tuple[Callable[[], object], Callable[[], list[Any]]]:
    """Return a function that runs ``steps`` steps from the end of its last call, and one that returns x and y."""
    import jax
    import jax.numpy as jnp

    precise = shape.x[0].dtype.itemsize == 8
    jax.config.update("jax_enable_x64", precise)

    def array(t: Any) -> Any:
        return jnp.asarray(t.detach().numpy())

    def random(key: Any, n: int) -> tuple[Any, Any]:
        key, own = jax.random.split(key)
        return jax.random.randint(own, (), 0, n), key

    data = {
        level: tuple(jnp.stack([array(t) for t in column]) for column in zip(*batches, strict=True))
        for level, batches in zip(("upper", "lower"), shape.batches, strict=True)
    }
    api = Api(
        jax.grad,
        jax.vjp,
        jax.vmap,
        lambda n, body, start: jax.lax.fori_loop(0, n, body, start),
        jnp.stack,
        lambda n, body: jax.vmap(body)(jnp.arange(n)),
        jax.lax.cond,
        lambda table, k, row: table.at[k].set(row),
        random,
    )
    recipe, count = ALGORITHMS[method], len(shape.batches[0])
    start, step = recipe.make(Oracles(api, *_losses(problem)), shape.steps)
    taken = dict(zip(("upper", "lower"), recipe.draws(shape.steps), strict=True))

    def at(number: Any) -> Any:
        return lambda level, k: tuple(t[(number * taken[level] + k) % count] for t in data[level])

    def body(carry: Any, number: Any) -> Any:
        x, y, state = carry
        return step(x, y, state, at(number)), None

    run = jax.jit(lambda carry, first: jax.lax.scan(body, carry, first + jnp.arange(steps))[0])

    x, y = (tuple(map(array, ts)) for ts in (shape.x, shape.y))
    state = start(x, y, at(0))
    if recipe.random:
        state = (jax.random.PRNGKey(0), state) if state else jax.random.PRNGKey(0)
    place: list[Any] = [(x, y, state), 0]

    def advance() -> None:
        place[0] = jax.block_until_ready(run(*place))
        place[1] += steps

    return advance, lambda: [torch.from_numpy(numpy.array(t)) for ts in place[0][:2] for t in ts]
