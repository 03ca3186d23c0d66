"""Memory and communication of a step of each method on each rank, measured and by formula.

    python -m recipes.data_mixing.cost --scale 1m
    torchrun --nproc-per-node 2 -m recipes.data_mixing.cost --scale 1m --parallel fsdp

Counts the bytes of all live tensors and those passed to collectives, not the memory of the process. Batches are as
small as possible, so that activations, which are those of training, add little.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

import bilevel_optim as bo

from ..common import Parser, progress, save, show
from ..common.ledger import KINDS, Ledger
from ..common.seeds import stream
from .learning import LINEAR, METHODS, problem
from .network import SIZES, Ranks, network, ranks_of

__all__ = ["gradients", "main", "measured", "state"]


def measured(name: str, args: Any, ranks: Ranks) -> dict[str, Any]:
    """Measure state, peak and communication of a method's third step, in units of the whole model's parameters."""
    setting = METHODS[name]
    model = network(args, 0, ranks, keep=setting.kept)
    texts = {k: torch.randint(90, (1000,), generator=stream(0, "data")) for k in "ab"}
    x, upper, lower = problem(texts, texts["a"], model, args, 0, ranks)
    inner = {} if setting.single else {"lower_steps": args.lower_steps}
    optimizer = setting.make(
        [x], model.parameters(), lr=0.1, lower_lr=1e-3, lower_optimizer=torch.optim.Adam,
        process_group=ranks.group, **inner,
    )  # fmt: skip
    whole = sum(p.numel() * p.element_size() for p in model.parameters())  # a DTensor counts all its shards
    with warnings.catch_warnings(), Ledger([*model.parameters()]) as ledger:
        warnings.simplefilter("ignore", bo.BilevelWarning)  # the values are meaningless here
        for _ in range(3):
            before, ledger.sent = dict(optimizer.oracle_counts), {}
            held, ledger.peak = ledger.bytes(), 0
            optimizer.backward(upper, lower)
    return {
        "parameters": sum(p.numel() for p in (x, *model.parameters())),
        "state": held / whole,
        "peak": ledger.peak / whole,
        "sent": {k: v / whole for k, v in ledger.sent.items() if v > whole / 100},
        "calls": {k: v - before[k] for k, v in optimizer.oracle_counts.items()},
    }


# Tensors of the size of the parameters that stay between steps: parameters, Adam's two moments for each copy of them,
# the method's state.
STATE = {"f2sa": 1 + 2 + 4, "aid": 1 + 2 + 1, "soba": 1 + 2 + 1, "first-order": 1 + 2}
# Vectors of that size that stay until diagnostics are computed from them, when they are read, and how many of these and
# of the state count against the most entries that may stay; figures of larger ones are computed in the step.
VECTORS, UNREAD = {"f2sa": (3, 5), "aid": (2, 3), "soba": (3, 3)}, 1 << 16


def state(name: str, parameters: int) -> int:
    """Return how many tensors of the size of y stay between steps, if both levels have so many ``parameters``."""
    stay, count = VECTORS.get(name, (0, 0))
    return STATE[name] + stay * (count * parameters <= UNREAD)


def gradients(name: str, lower_steps: int, sharded: bool) -> int:
    """Return how many gradients of the parameters' size a step averages over ranks; a finite difference is two.

    ``AID`` checks the solution of its linear system by one more product, which in DDP also has the cross derivative.
    FSDP2 also reduces gradients of the parameters when only those of the shares are needed, and reduces the two losses
    of ``F2SA`` separately, as they are differentiated one after the other.
    """
    products = int(LINEAR["linear_steps"])
    if name == "f2sa":
        return 3 * (lower_steps + 1) if sharded else 2 * lower_steps
    counts = {"aid": lower_steps + 2 + 2 * (products + 1) + 2 * sharded, "soba": 3, "first-order": lower_steps + 1}
    return counts[name]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes."""
    parser = Parser(__doc__, device=True)
    parser.methods(METHODS, list(METHODS))
    parser.add_argument("--scale", choices=[*SIZES], default="1m", help="parameters of the model; default: 1m")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="default: ddp")
    parser.option("lower_steps", 2, "lower steps per step")
    args = parser.parse(arguments)
    ranks = ranks_of(args.device)
    args.length, args.batch = 16, 2 * ranks.world
    shards = ranks.world if args.parallel == "fsdp" else 1
    results = {}
    for name in progress(args.optimizer, "measure", disable=True if ranks.rank else None):
        r = measured(name, args, ranks)
        sends = gradients(name, args.lower_steps, args.parallel == "fsdp") if ranks.group is not None else 0
        results[name] = {**r, "state, worked out": state(name, r["parameters"]) / shards, "gradients": sends}
    if ranks.rank:
        return results
    show(
        f"A step on each of {ranks.world} ranks, {args.parallel}, scale {args.scale}, {args.lower_steps} lower steps; "
        "in units of the whole model's parameters",
        ("", "state", "worked out", "peak", "gradients, worked out", *KINDS.values()),
        [
            [name, r["state"], r["state, worked out"], r["peak"], r["gradients"],
             *map(r["sent"].get, KINDS)]
            for name, r in results.items()
        ],
    )  # fmt: skip
    return save(args, args.out / f"data_mixing_cost_{args.scale}_{args.parallel}_{ranks.world}", {"results": results})


if __name__ == "__main__":
    main()
