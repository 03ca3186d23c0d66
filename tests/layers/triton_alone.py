"""Checks in separate processes: Triton's interpreter, chosen before the import, compilation without a GPU, no Triton.

Each is a fork of one process that has imported torch, but not yet Triton.
"""

import json
import os
import sys
import traceback

DTYPES = ("float32", "float64", "bfloat16")
SIZES = ((1, 1), (3, 1023), (2, 2500))
KINDS = ("normal", "sign", "hartley")
OFFSETS = (0, 2**31 - 7, 2**40)


def ulps(found, expected):
    """The largest difference, in units of the last place of the largest entry; other results are compared exactly."""
    import torch

    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    size = expected.double().abs().max() * torch.finfo(expected.dtype).eps
    return float((found.double() - expected.double()).abs().max() / size)


def seeded(programs, dtype, count, n, kind, offset):
    import torch

    from bilevel_optim.kernels import seeded

    period = 997 if offset < 2**32 else 3
    point = torch.randn(2 * n, 2).to(dtype)[::2, 0]  # of strides that are not those of its shape
    keys, rows = torch.randint(-(2**62), 2**62, (count,)), torch.randint(0, period, (count,))
    factors, how = torch.randn(count, dtype=torch.float64), (keys, rows, period, offset, kind)
    for name, args in (("perturbed", (point, factors, *how)), ("accumulated", (point, factors, *how))):
        yield name, getattr(programs, name)(*args), getattr(seeded, f"_{name}")(*args)
    yield "squares", programs.squares(point, *how).to(torch.float32), seeded._squares(point, *how).to(torch.float32)


def cg(programs, dtype, lanes, n):
    import torch

    from bilevel_optim.kernels.cg import _cg_step

    v, r, p = (torch.randn(lanes, 2 * n).to(dtype)[:, ::2] for _ in range(3))
    lane = torch.arange(lanes)
    hp = (p * torch.where(lane == 1, -1, 2).unsqueeze(1)).to(dtype)  # lane 1 meets negative curvature, lane 2 rests
    least = (p * hp).double().sum(1) * torch.where(lane % 2 == 1, 1.5, 0.5).double()  # lane 1: above its curvature
    args = v, r, p, hp, r.double().square().sum(1), lane != 2, least
    for i, pair in enumerate(zip(programs.cg_step(*args), _cg_step(*args), strict=True)):
        yield f"cg_step.{i}", *(t.to(dtype) if t.dtype == torch.float64 else t for t in pair)


def cases(programs, dtype):
    """Yield the results of the programs and of the references, by name of the operator: all pairs of two settings."""
    for shift, (count, n) in enumerate(SIZES):
        offsets = OFFSETS[shift:] + OFFSETS[:shift]
        for results in (
            *(seeded(programs, dtype, count, n, k, o) for k, o in zip(KINDS, offsets, strict=True)),
            cg(programs, dtype, count, n),
        ):
            for name, found, expected in results:
                yield name.partition(".")[0], found, expected


def interpreted():
    """The largest differences between the programs and the references, by case."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from bilevel_optim.kernels import programs

    torch.manual_seed(0)
    worst = {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for name, found, expected in cases(programs, kind):
            case = f"{dtype} {name}"
            worst[case] = max(worst.get(case, 0.0), ulps(found, expected))
    return worst


def loads(blocks, size=16):
    """Entries that a step of conjugate gradients loads, of so many blocks, in the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.runtime.interpreter import InterpreterBuilder

    from bilevel_optim.kernels import programs

    counted, load = [0], InterpreterBuilder.create_masked_load

    def counting(self, pointers, *rest):
        counted[0] += pointers.data.size
        return load(self, pointers, *rest)

    InterpreterBuilder.create_masked_load, programs.BLOCK = counting, size
    vectors = [torch.ones(1, blocks * size) for _ in range(4)]
    one = torch.ones(1, dtype=torch.float64)
    programs.cg_step(*vectors, one, torch.tensor([True]), 0 * one)
    InterpreterBuilder.create_masked_load = load
    return counted[0]


POINTERS = {"*i64": {"keys", "rows"}, "*i1": {"active", "negatives"}}
INTEGERS = {"period", "offset", "n", "count"}
DOUBLES = {  # arguments that have double precision in any case
    "_perturb": (),
    "_accumulate": (),
    "_square": ("out",),
    "_curvatures": ("parts",),
    "_move": ("lengths", "curvatures", "rr", "least"),
    "_turn": ("new_rr", "lengths", "curvatures", "rr", "least"),
}


def signature(program, number, kind):
    """Types of a program's arguments, and its constants."""
    types, constants = {}, {}
    for name in program.arg_names:
        if name.isupper():
            constants[name], types[name] = {"KIND": kind, "DTYPE": number, "BLOCK": 1024}[name], "constexpr"
        elif name in DOUBLES[program.__name__] or number.is_fp64():
            types[name] = "*fp64"
        else:
            types[name] = "*fp32"
        types[name] = next((kind for kind, names in POINTERS.items() if name in names), types[name])
        if name in INTEGERS or (name, program.__name__) == ("parts", "_square"):
            types[name] = "i64"
    return types, constants


def compiled(capability):
    """Bytes of machine code by program and precision, for a GPU that need not be there."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bilevel_optim.kernels import programs

    target, found = GPUTarget("cuda", capability, 32), {}
    cases = [(name, tl.float32, "normal") for name in DOUBLES]
    cases += [("_perturb", tl.float32, "sign"), ("_perturb", tl.float32, "hartley")]
    cases += [("_accumulate", tl.float64, "normal")]
    for name, number, kind in cases:
        program = getattr(programs, name)
        result = triton.compile(ASTSource(program, *signature(program, number, kind)), target=target)
        assert f".target sm_{capability}" in result.asm["ptx"]
        found[f"{name} {number} {kind}"] = len(result.asm["cubin"])
    return found


def without():
    """A step of a method with seeded directions where Triton cannot be imported: the length of x afterwards."""
    sys.modules["triton"] = None
    import torch

    import bilevel_optim as bo
    from bilevel_optim.kernels import registry

    assert registry.programs() is None
    x, y = torch.zeros(100_000, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2, generator=torch.Generator().manual_seed(0))
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x.mean()).square().sum())
    return float(x.detach().norm())


def answer(question):
    """Return what one check finds."""
    name, *rest = question.split()
    if name == "compiled":
        capability, os.environ["TRITON_CACHE_DIR"] = rest
        return compiled(int(capability))
    if name == "without":
        return without()
    found = {"worst": interpreted()} if name == "interpreted" else {}
    return {**found, "loads": [loads(blocks) for blocks in (32, 64)]}


def serve():
    """Answer each line of the input by a line, in a process of its own."""
    import torch

    import bilevel_optim  # noqa: F401

    torch.set_num_threads(1)
    assert "triton" not in sys.modules
    for question in sys.stdin:
        if os.fork() == 0:
            try:
                print(json.dumps(answer(question)), flush=True)
            except BaseException:
                print(json.dumps({"error": traceback.format_exc()}), flush=True)
            os._exit(0)
        if os.wait()[1] != 0:
            print(json.dumps({"error": "the process ended"}), flush=True)


if __name__ == "__main__":
    serve()
