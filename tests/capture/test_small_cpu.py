"""Compiled graphs keep the memory of what they do not return, and of nothing else."""

import weakref

import pytest
import torch

from bilevel_optim.capture import small_cpu
from bilevel_optim.capture.backends import backend_of
from bilevel_optim.capture.small_cpu import TURNS, Direct, listed
from bilevel_optim.capture.trace import Graph

from ..problems import seeded

SOURCE = """
def empty_strided_cpu(sizes, strides, dtype):
    return torch.empty_strided(sizes, strides, dtype=dtype)

reinterpret_tensor = lambda t, sizes, strides, offset: t.as_strided(sizes, strides, offset)

class Runner:
    def call(self, args):
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cpu((3, ), (1, ), torch.float64)
        torch.mul(arg0_1, 2, out=buf0)
        buf1 = empty_strided_cpu((2, 3), (3, 1), torch.float64)
        buf2 = reinterpret_tensor(buf1, (3, ), (1, ), 3)  # alias
        torch.add(buf0, 1, out=buf2)
        buf3 = buf0; del buf0  # reuse
        torch.exp(arg0_1, out=buf3)
        buf4 = empty_strided_cpu((3, ), (1, ), torch.float64)
        buf5 = buf4; del buf4  # reuse
        torch.add(buf3, arg0_1, out=buf5)
        {more}
        return ({returned}, )

call = Runner().call
"""


def written(tmp_path, more="del arg0_1", returned="buf2, buf5"):
    """A function as Inductor writes it, from a file."""
    file = tmp_path / f"written_{abs(hash((more, returned)))}.py"
    file.write_text(SOURCE.replace("{more}", more).replace("{returned}", returned))
    space = {"torch": torch, "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), space)
    return space["call"]


def test_what_is_returned_is_new_and_the_rest_is_not(tmp_path, monkeypatch):
    made = []
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: made.append(a[0]) or empty(*a, **k))
    x = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    call = listed(written(tmp_path), [x])
    assert made == [(3,)]  # buf0, which is nobody's but the function's
    first = call([x])
    kept = [t.clone() for t in first]
    second = call([x + 1])
    assert made[1:] == [(2, 3), (3,)] * 2
    for at, (shifted, total) in ((x, kept), (x, first), (x + 1, second)):
        torch.testing.assert_close(shifted, 2 * at + 1)
        torch.testing.assert_close(total, at.exp() + at)


@pytest.mark.parametrize("more", ["with torch.no_grad(): pass", "self.last = 1", "buf0 += 1", "if True: pass"])
def test_code_of_another_form_is_left_alone(tmp_path, more):
    assert listed(written(tmp_path, more), [torch.ones(3)]) is None


def test_a_function_of_somebody_else_is_left_alone():
    def call(args):
        return args

    assert listed(call, [torch.ones(3)]) is None
    assert listed(len, [torch.ones(3)]) is None


def test_tensors_of_another_form_are_refused(tmp_path):
    x = torch.ones(3, dtype=torch.float64)
    call = listed(written(tmp_path), [x])
    for other in (x.float(), x[:2], x.repeat(2)[::2]):
        with pytest.raises(AssertionError, match="other sizes, strides or types"):
            call([other])


def test_large_results_are_freed_where_the_code_frees_them(tmp_path):
    more = """buf6 = empty_strided_cpu((40000, ), (1, ), torch.float64)
        buf7 = torch.add(buf6, 1.0)
        note(buf6)
        del buf6
        note(buf7)"""
    seen = []
    call = written(tmp_path, more)
    call.__func__.__globals__["note"] = lambda t: seen.append((weakref.ref(t), [r() is not None for r, _ in seen]))
    listed(call, [torch.ones(3, dtype=torch.float64)])([torch.ones(3, dtype=torch.float64)])
    assert [alive for _, alive in seen] == [[], [False]]


def test_calls_follow_each_other(tmp_path):
    """What one has found is an argument of the next, or each has its own."""
    x = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    call = listed(written(tmp_path), [x])
    at, found = x, []
    for shifted, total in call.each([x], 1, [()] * 2 * TURNS, [(0, 1)]):
        torch.testing.assert_close(shifted, 2 * at + 1, rtol=0, atol=0)
        torch.testing.assert_close(total, at.exp() + at, rtol=0, atol=0)
        at = total
        found.append(shifted)
    places = [t.data_ptr() for t in found]
    assert len({*places[:TURNS]}) == TURNS
    assert places[TURNS:-1] == places[: TURNS - 1]
    assert places[-1] not in places[:-1]  # what is left at the end is new
    again = found[-1].clone()
    call([x])
    [*call.each([x], 1, [()] * 2 * TURNS, [(0, 1)])]
    assert torch.equal(found[-1], again)
    for own, (shifted, _) in zip((x, x + 1), call.each([x], 0, [(x,), (x + 1,)], ()), strict=True):
        torch.testing.assert_close(shifted, 2 * own + 1, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="other sizes, strides or types"):
        next(call.each([x.float()], 1, [()], ()))


@pytest.mark.parametrize("large", [False, True])
def test_results_are_new_where_a_call_hands_its_argument_on_or_they_are_large(tmp_path, monkeypatch, large):
    """What is left at the end is nobody else's; what is asked for lasts."""
    if large:
        monkeypatch.setattr(small_cpu, "BYTES", 0)
    x = torch.tensor([-5.0, -6.0, -7.0], dtype=torch.float64)
    call = listed(written(tmp_path, "buf6 = None", "buf5, buf2, " + ("buf5" if large else "arg0_1")), [x])
    found, expected = [*call.each([x], 1, [()] * 2 * TURNS, [(0, 0)], [1])], [x]
    for _ in found:
        expected.append(expected[-1].exp() + expected[-1])
    [*call.each([x - 1], 1, [()] * 2 * TURNS, [(0, 0)], [1])]
    for (_, shifted, _), before in zip(found, expected, strict=False):
        torch.testing.assert_close(shifted, 2 * before + 1, rtol=0, atol=0)
    total, _, handed = found[-1]
    torch.testing.assert_close((total, handed), (expected[-1], expected[-1 if large else -2]), rtol=0, atol=0)


def test_results_that_last_are_copied_where_a_backend_keeps_their_memory():
    kept = torch.zeros(())
    graph = Graph(lambda x: x + 1, torch.zeros(()), lambda module, example: lambda x: [kept.copy_(x + 1)])
    graph([kept])
    for lasting, expected in (((), [3.0] * 3), ((0,), [1.0, 2.0, 3.0])):
        found = [one for (one,) in graph.each([], [(torch.tensor(float(k)),) for k in range(3)], (), lasting)]
        assert [*map(float, found)] == expected


@pytest.mark.slow
def test_graphs_of_inductor_are_listed():
    a = torch.randn(8, 5, generator=seeded(0), dtype=torch.float64)

    def function(v):
        for _ in range(3):
            v = v - 0.1 * (a.mT @ torch.tanh(a @ v))
        return {"v": v, "norm": v.norm()}

    graph = Graph(function, torch.ones(5, dtype=torch.float64), backend_of("inductor", None, None))
    first = torch.full((5,), 1.0, dtype=torch.float64)
    alone, outputs = [], [graph([torch.full((5,), value, dtype=torch.float64)]) for value in (1.0, 2.0, 3.0)]
    for _ in range(3):
        alone.append(graph([first if not alone else alone[-1][0]]))
    for one, many in zip(alone, graph.each([first], [(), (), ()], [(0, 0)]), strict=True):
        assert all(map(torch.equal, one, many))
    assert graph._run._compiled is None  # the layers around it are gone
    for value, output in zip((1.0, 2.0, 3.0), outputs, strict=True):
        expected = function(torch.full((5,), value, dtype=torch.float64))
        torch.testing.assert_close(graph.structured(output), expected)


@pytest.mark.parametrize("wrong", [None, "value", "memory", "number"])
def test_layers_that_change_something_stay(monkeypatch, wrong):
    """A list is used only where its results are those of what was compiled, bit for bit and in memory of their own."""
    kept = torch.zeros(3)

    def compiled(x):
        return [x + 1, x.exp()]

    def call(arguments):
        (x,) = arguments
        if wrong == "memory":
            return torch.add(x, 1, out=kept), x.exp()
        return (x + (1 + 1e-6 if wrong == "value" else 1), x.exp())[: 1 if wrong == "number" else 2]

    monkeypatch.setattr(small_cpu, "written", lambda compiled: compiled)
    monkeypatch.setattr(small_cpu, "listed", lambda *_: call)
    direct = Direct(compiled)
    for _ in range(2):
        first, second = direct(torch.ones(3))
        torch.testing.assert_close((first, second), (torch.full((3,), 2.0), torch.ones(3).exp()), rtol=0, atol=0)
    assert (direct._compiled is None) == (wrong is None)
