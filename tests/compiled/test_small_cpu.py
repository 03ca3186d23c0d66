"""Inductor's code for small graphs on a CPU, as a list of recorded calls."""

import importlib.util
import weakref

import numpy
import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.compiled.backend import Program
from bilevel_optim.compiled.small_cpu import small_program

# Code as Inductor writes it: a part that is called twice, views, results in memory that is used again, two in one.
CODE = """
def part(args):
    part_arg0_1, part_arg1_1 = args
    args.clear()
    part_buf0 = empty_strided_cpu(({n}, {n}), ({n}, 1), torch.float64)
    multiply(reinterpret_tensor(part_arg0_1, ({n}, {n}), (1, {n}), 0), part_arg1_1, part_buf0)
    part_buf1 = empty_strided_cpu(({n}, {n}), ({n}, 1), torch.float64)
    multiply(part_buf0, part_arg1_1, part_buf1)
    del part_arg0_1
    del part_arg1_1
    return (part_buf1, part_buf0, )

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    assert_size_stride(arg0_1, ({n}, {n}), ({n}, 1))
    buf0 = empty_strided_cpu(({n}, {n}), ({n}, 1), torch.float64)
    multiply(arg0_1, reinterpret_tensor(arg1_1, ({n}, {n}), (1, {n}), 0), buf0)
    part_args = [buf0, arg0_1]
    del buf0
    buf1 = part(part_args)
    buf2 = buf1[0]
    buf3 = buf1[1]
    del buf1
    part_args = [buf2, buf3]
    buf4 = part(part_args)
    buf5 = buf4[0]
    del buf4
    buf6 = torch.ops.aten.sort.default(buf5, -1)
    buf7 = buf6[0]
    buf8 = empty_strided_cpu(({n}, {n}), ({n}, 1), torch.float64)
    buf9 = buf8; del buf8  # reuse
    multiply(buf7, buf7, buf9)
    buf10 = torch.cat([buf9, arg0_1])
    torch.mul(buf10, factor, out=buf10)
    {line}
    return (buf9, reinterpret_tensor(buf9, ({n}, ), (1, ), 0), buf10, )
"""


def multiply(a, b, out):
    torch.mul(a, b, out=out)  # like a kernel, it returns nothing


def generated(tmp_path, n=4, line="del buf7"):
    """Return the generated function, and a list of the tensors that it allocates."""
    (tmp_path / "generated.py").write_text(CODE.format(n=n, line=line))
    specification = importlib.util.spec_from_file_location("generated", tmp_path / "generated.py")
    module, allocated = importlib.util.module_from_spec(specification), []

    def allocate(size, stride, dtype):
        allocated.append(torch.empty_strided(size, stride, dtype=dtype))
        return allocated[-1]

    vars(module).update(
        empty_strided_cpu=allocate,
        reinterpret_tensor=torch.as_strided,
        multiply=multiply,
        first=lambda parts: parts[0][0] + 1,
        assert_size_stride=None,
        factor=torch.tensor(3.0, dtype=torch.float64),
        torch=torch,
    )
    specification.loader.exec_module(module)
    module.assert_size_stride = lambda *_: None
    return module.call, allocated


def matrices(seed, n=4):
    return list(torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def test_calls_are_those_of_the_code_for_other_arguments_too(tmp_path):
    call, allocated = generated(tmp_path)
    same = matrices(0)[0]
    program = small_program(call, [], [same, same])
    for arguments in (matrices(1), matrices(2), [same, same]):
        right, expected = call([*arguments]), len(allocated)
        found = program.call([*arguments])
        assert len(allocated) == expected + 1  # the memory of the results alone is new
        assert all(map(torch.equal, found, right))
        assert found[0].data_ptr() == found[1].data_ptr()


def test_constants_come_before_the_arguments(tmp_path):
    call, allocated = generated(tmp_path)
    constant, example = matrices(0)
    program = small_program(call, [constant], [example])
    for seed in (1, 2):
        right, expected = call([constant, matrices(seed)[1]]), len(allocated)
        assert all(map(torch.equal, program.call([matrices(seed)[1]]), right))
        assert len(allocated) == expected + 1


def test_they_come_first_where_no_calls_are_recorded_too():
    constants, rest = matrices(0), matrices(1)
    found = Program(lambda given: [*given]).after(constants)([*rest])
    assert all(a is b for a, b in zip(found, [*constants, *rest], strict=True))


def test_views_of_what_a_call_has_written_by_name_are_made_once(tmp_path):
    """Such a call returns the tensor that it was given, which is no new one."""
    line = "torch.add(buf9, buf7, out=buf9); multiply(reinterpret_tensor(buf9, (4, 4), (1, 4), 0), buf7, buf5)"
    views = []
    call, _ = generated(tmp_path, line=line)
    call.__globals__["reinterpret_tensor"] = lambda *a: views.append(a) or torch.as_strided(*a)
    program = small_program(call, [], matrices(0))
    function = program.reusing(set())
    views.clear()
    found = function(matrices(1))
    assert len(views) == 1  # of an argument
    assert all(map(torch.equal, found, call(matrices(1))))


def test_operands_in_lists_of_lists_are_those_of_the_call(tmp_path):
    call, _ = generated(tmp_path, line="multiply(first([[buf7]]), buf7, buf9)")
    program = small_program(call, [], matrices(0))
    assert all(map(torch.equal, program.call(matrices(1)), call(matrices(1))))


def test_the_example_is_let_go(tmp_path):
    class Array(numpy.ndarray):
        """An array, to which there are weak references."""

    call, allocated = generated(tmp_path)
    array = matrices(0)[0].numpy().view(Array)
    memory, example = weakref.ref(array), [torch.from_numpy(array), matrices(0)[1]]
    program = small_program(call, [], example)
    assert program is not None
    del array, example
    allocated.clear()
    assert memory() is None


def test_results_keep_memory_except_those_that_shall_not(tmp_path):
    call, _ = generated(tmp_path)
    program = small_program(call, [], matrices(0))
    for new in (set(), {2}, {0}, {1, 2}):
        function, other = program.reusing(new), program.reusing(new)
        first = function(matrices(1))
        before = [t.clone() for t in first]
        beside = other(matrices(2))
        assert all(map(torch.equal, first, before))  # each has memory of its own
        assert all(map(torch.equal, beside, call(matrices(2))))
        assert (function(matrices(2))[0].data_ptr() == first[0].data_ptr()) == (not new & {0, 1})


@pytest.mark.parametrize(
    "line",
    [
        "buf9.mul_(float(buf7.max()))",
        "buf9.mul_(buf7.max())",
        "torch.add(buf9, buf7.shape[0], out=buf9)",
        "if buf7.sum() > 0: buf9.zero_()",
        "for _ in range(2): torch.mul(buf9, buf7, out=buf9)",
        "torch.add(buf9, torch.rand(4, 4), out=buf9)",
        "torch.mul(buf9, (lambda t: 2 * t)(buf7), out=buf9)",
        "torch.mul(buf9, float(buf7[0, 0]), out=buf9)",
        "torch.mul(buf9, buf7 + buf7, out=buf9)",
    ],
)
def test_code_of_an_unknown_form_is_left_as_it_is(tmp_path, line):
    torch.manual_seed(0)
    call, _ = generated(tmp_path, line=line)
    assert small_program(call, [], matrices(0)) is None


def test_so_is_code_with_large_results(tmp_path):
    call, _ = generated(tmp_path, n=200)
    assert small_program(call, [], matrices(0, n=200)) is None


def test_graphs_with_constants_are_recorded_too():
    """The weights of F2SA's copies are tensors that its graph holds, which Inductor passes as first arguments."""
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    ends = []
    for compiled in (False, True):
        with torch.no_grad():
            x.fill_(0.5), y.zero_()
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, order=2, nu=0.1)
        if compiled:
            optimizer.compile()
        for _ in range(4):
            optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
        ends.append(x.detach().clone())
    torch.testing.assert_close(*ends)
    ((_, reader),) = (one for entry in optimizer._captured.entries for one in entry.compiled)
    assert reader.programs[0][1].program.small is not None
