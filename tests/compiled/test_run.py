"""Many captured steps in one call draw the same as steps made one by one."""

import copy
import inspect
import itertools
from contextlib import contextmanager

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.compiled import steps as compiled_steps
from bilevel_optim.compiled.chain import Chain
from bilevel_optim.compiled.steps import CompiledSteps
from bilevel_optim.pytree import replace

from ..problems import seeded

BATCHES = [torch.randn(2, 3, generator=seeded(k), dtype=torch.float64) for k in range(7)]


class Numbered:
    """Batches in the order of a generator, which others may share; keeps a list of the draws."""

    def __init__(self, name, generator, seen):
        self.name, self.generator, self.seen = name, generator, seen

    def __iter__(self):
        while True:
            k = int(torch.randint(len(BATCHES), (), generator=self.generator))
            self.seen.append((self.name, k))
            yield BATCHES[k]


def problem(cls, upper, lower, same=False, compiled=True, **arguments):
    """A captured optimizer with its losses on these data, and its parameters."""
    x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
    options = {name: 1 for name in ("lower_steps", "linear_steps") if name in inspect.signature(cls).parameters}
    optimizer = cls([x], [y], **{"lr": 0.1, "lower_lr": 0.3, **options, **arguments})
    if compiled:
        optimizer.compile(backend="eager")

    def g(batch):
        return (y - x - batch.mean(0)).square().sum() / 2 + 0.1 * y.square().sum()

    low = bo.Objective(g, lower)
    return optimizer, (low if same else bo.Objective(lambda batch: (batch @ y - 1).square().mean(), upper), low), x, y


def ends(optimizer, losses, x, y, found):
    state = [torch.get_rng_state() if optimizer.generator is None else optimizer.generator.get_state()]
    places = [torch.tensor([o.state_dict()[name] for name in ("position", "passes")]) for o in losses]
    return [x.detach(), y.detach(), torch.cat(found), *state, *places]


@contextmanager
def chained_steps():
    """Yield the data of each chain that follows a step."""
    counted, follow = [], Chain.follow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "follow", lambda chain, first, data: counted.append(data) or follow(chain, first, data))
        yield counted


def one_by_one_and_at_once(make, steps=(5, 14)):
    """Return the ends of steps and of a run, and how many steps of the run were chained before anything was written."""
    results = []
    with chained_steps() as counted:
        for at_once in (False, True):
            torch.manual_seed(0)
            optimizer, losses, x, y = make()
            found = [optimizer.step(*losses).reshape(1) for _ in range(steps[0])]
            if at_once:
                found.append(optimizer.run(*losses, steps=steps[1]))
            else:
                found += [optimizer.step(*losses).reshape(1) for _ in range(steps[1])]
            assert optimizer.captured_graphs == 1
            results.append(ends(optimizer, losses, x, y, found))
    return *results, max(map(len, counted), default=-1) + 1


@pytest.mark.usually("TTSA", "SOBA")
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (bo.SOBA, {}),
        (bo.TTSA, {"linear_steps": 4}),
        (bo.BSA, {"linear_steps": 3, "growth": 0.0}),
        (bo.SUSTAIN, {"linear_steps": 3}),
        (bo.PZOBO, {}),
    ],
    ids=["SOBA", "TTSA", "BSA", "SUSTAIN", "PZOBO"],
)
def test_lists_are_drawn_at_once(cls, arguments, monkeypatch):
    """Runs of different lengths with random numbers of draws agree bit for bit, and so do all positions."""
    single = []
    drawn = compiled_steps.draw_random_inputs
    monkeypatch.setattr(compiled_steps, "draw_random_inputs", lambda *given: single.append(1) or drawn(*given))
    count = []

    def make(compiled=True):
        count.append(len(single))
        pairs = [(batch, batch.flip(0)) for batch in BATCHES]
        optimizer, losses, x, y = problem(
            cls, pairs[:5], tuple(pairs[1:4]), compiled=compiled, generator=seeded(5), **arguments
        )
        for objective, own in zip(losses, [o.loss for o in losses], strict=True):
            objective.loss = lambda pair, own=own: own(pair[0]) + 0.1 * own(pair[1])
        return optimizer, losses, x, y

    steps, run, at_once = one_by_one_and_at_once(make)
    assert all(map(torch.equal, steps, run))
    assert at_once == 7  # all before one that is compared
    if cls is not bo.SOBA:
        assert len(single) - count[1] <= count[1] - count[0] - (at_once - 1)
    torch.manual_seed(0)
    optimizer, losses, x, y = make(compiled=False)
    eager = ends(optimizer, losses, x, y, [optimizer.step(*losses).reshape(1) for _ in range(19)])
    torch.testing.assert_close(run, eager, rtol=1e-9, atol=1e-12)  # random states and positions are whole numbers


@pytest.mark.parametrize("kind", ["sum", "own data"])
def test_random_inputs_beside_other_data_are_drawn_step_by_step(kind):
    """Terms of a sum, and batches of a user's own data, are drawn between them from the same stream."""

    def make():
        data = Numbered("lower", None, []) if kind == "own data" else BATCHES
        optimizer, losses, x, y = problem(bo.TTSA, BATCHES[:5], data, linear_steps=3)
        if kind == "sum":
            losses = losses[0], bo.FiniteSum(losses[1].loss, BATCHES)
        return optimizer, losses, x, y

    results = []
    for at_once in (False, True):
        torch.manual_seed(0)
        optimizer, losses, x, y = make()
        found = [optimizer.step(*losses).reshape(1) for _ in range(5)]
        count = 1 if not at_once else 14
        found += [optimizer.run(*losses, steps=count) for _ in range(14 // count)]
        results.append([x.detach(), y.detach(), torch.cat(found), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_non_finite_values_end_steps_in_a_row():
    """The steps before it stand, and the data go on where they had begun; as with one step after the other."""
    ends = []
    for at_once in (True, False):
        data = [b.clone() for b in BATCHES]
        optimizer, losses, x, y = problem(bo.SOBA, BATCHES[:5], data)
        if at_once:
            optimizer.compile(backend="eager")
        optimizer.run(*losses, steps=10)
        data[5].fill_(torch.nan)  # 2 of a step: the draw of the fourth step from here
        with pytest.raises(bo.NonFiniteError) as caught:
            optimizer.run(*losses, steps=12)
        ends.append([x.detach(), y.detach(), caught.value.step, losses[1].state_dict()["position"]])
    assert ends[0][2:] == ends[1][2:]
    for mine, theirs in zip(ends[0][:2], ends[1][:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


def test_batches_of_two_forms_in_one_step_are_one_chain(monkeypatch):
    written, write = [], CompiledSteps.write
    monkeypatch.setattr(CompiledSteps, "write", lambda *given: written.append(given[-2:]) or write(*given))
    found = []
    for at_once in (False, True):
        lower = [torch.cat([batch] * (1 + k % 2)) for k, batch in enumerate(BATCHES * 2)]
        optimizer, losses, x, y = problem(bo.StocBiO, BATCHES[:2], lower, lower_steps=2, linear_steps=1)
        for _ in range(70):  # so that none of the next is compared
            optimizer.step(*losses)
        written.clear()
        several = (
            optimizer.run(*losses, steps=9) if at_once else torch.stack([optimizer.step(*losses) for _ in range(9)])
        )
        found.append([several, x.detach(), y.detach()])
    assert all(map(torch.equal, *found))
    assert [times for times, _ in written] == [9]


def sums(kind=bo.SRBA, compiled=True):
    """Such an optimizer of finite sums of four terms, each with a stream of its own, and its data."""
    data = [torch.cat(BATCHES[k : k + 4]) for k in (0, 1)]
    optimizer, losses, x, y = problem(kind, None, None, compiled=compiled)
    losses = [
        bo.FiniteSum(own.loss, rows, 2, generator=torch.Generator()) for own, rows in zip(losses, data, strict=True)
    ]
    return optimizer, losses, x, y, data


def results(optimizer, losses, x, y):
    positions = [own.generator.get_state() for own in losses]
    entries = [t for state in optimizer.state.values() for t in state.values()]
    return [x.detach(), y.detach(), x.grad, *entries, *positions, torch.tensor([*optimizer.oracle_counts.values()])]


def test_steps_of_two_kinds_are_one_chain(monkeypatch):
    """Every fourth step of `SRBA` evaluates all terms, by another graph; both are written once, at the end."""
    written, write = [], CompiledSteps.write
    monkeypatch.setattr(CompiledSteps, "write", lambda *given: written.append(given[-2:]) or write(*given))
    found = []
    for at_once in (False, True):
        optimizer, losses, x, y, _ = sums()
        for _ in range(100):  # so that none of the next is compared
            optimizer.step(*losses)
        written.clear()
        several = (
            optimizer.run(*losses, steps=14) if at_once else torch.stack([optimizer.step(*losses) for _ in range(14)])
        )
        found.append([several, *results(optimizer, losses, x, y)])
    assert all(map(torch.equal, *found))
    assert [times for times, _ in written] == [14]


def test_steps_of_two_kinds_are_compared_as_often_as_one_by_one(monkeypatch):
    """A chain ends before a step that is to be compared, of either kind."""
    uses, compared = [], compiled_steps.compared
    noted = lambda a, b, entry, *given: uses.append(entry.uses) or compared(a, b, entry, *given)  # noqa: E731
    monkeypatch.setattr(compiled_steps, "compared", noted)
    found = []
    for at_once in (False, True):
        uses.clear()
        optimizer, losses, *_ = sums()
        with chained_steps() as counted:
            if at_once:
                optimizer.run(*losses, steps=80)
            else:
                for _ in range(80):
                    optimizer.step(*losses)
        found.append([*uses])
    assert found[0] == found[1]
    assert counted


class Growing(bo.AID):
    """AID with one more lower step from a step on."""

    def _lower_step_count(self, steps):
        return 1 + (steps >= 40)


def test_a_step_with_more_lower_steps_ends_a_chain():
    found = []
    for at_once in (False, True):
        optimizer, losses, x, y = problem(Growing, BATCHES[:3], BATCHES, linear_solver="neumann")
        several = [optimizer.step(*losses).reshape(1) for _ in range(34)]
        with chained_steps() as counted:
            if at_once:
                several.append(optimizer.run(*losses, steps=14))
            else:
                several += [optimizer.step(*losses).reshape(1) for _ in range(14)]
        found.append(ends(optimizer, losses, x, y, several))
    assert all(map(torch.equal, *found))
    assert counted


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("rate", [1e12, pytest.param(1e20, marks=pytest.mark.slow)])
def test_a_chain_of_two_kinds_ends_before_values_that_are_not_finite(rate):
    """The steps before it stand, of either kind, and the draws go on where they had begun."""
    found = []
    for at_once in (False, True):
        optimizer, losses, x, y, _ = sums()
        for _ in range(101):
            optimizer.step(*losses)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with pytest.raises(bo.NonFiniteError) as caught:
            optimizer.run(*losses, steps=24) if at_once else [optimizer.step(*losses) for _ in range(24)]
        found.append([torch.tensor(caught.value.step), *results(optimizer, losses, x, y)])
    assert 105 < found[0][0] < 125
    assert all(map(torch.equal, *found))


def test_a_new_beginning_is_loaded():
    """`SABA` evaluates all terms again, in an eager step, and goes on in the same graph."""
    found = []
    for compiled in (False, True):
        optimizer, losses, x, y, _ = sums(bo.SABA, compiled)
        beginning = copy.deepcopy(optimizer.state_dict())
        for _ in range(6):
            optimizer.step(*losses)
        optimizer.load_state_dict(beginning)
        for _ in range(6):
            optimizer.step(*losses)
        assert "compile_fallback" not in optimizer.diagnostics
        found.append(results(optimizer, losses, x, y))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


class Marked(bo.SOBA):
    """Every fourth step leaves an entry that the others do not write."""

    def _graph_key(self, steps, numbers):
        return steps % 4 == 0

    def estimate(self, oracle, inputs):
        found = super().estimate(oracle, inputs)
        more = {} if inputs.steps % 4 else {"mark": 2.0 * oracle.x}
        return replace(found, upper_memory={**found.upper_memory, **more})


class Late(bo.SOBA):
    """SOBA that leaves x where it is in its first steps."""

    def update(self, x, gradient, inputs):
        return super().update(x, gradient * (0.0 if inputs.steps < 20 else 1.0), inputs)


class LateInKey(Late):
    def _graph_key(self, steps, numbers):
        return super()._graph_key(steps, numbers), steps + 1 < 20


@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_a_method_that_reads_the_number_of_steps_has_it_in_its_key():
    """A graph would hold the number of the step that it was made for."""
    ends = []
    for cls, compiled in ((Late, False), (Late, True), (LateInKey, True)):
        optimizer, losses, x, _ = problem(cls, BATCHES, BATCHES, compiled=False)
        if compiled:
            optimizer.compile(backend="eager")
        optimizer.run(*losses, steps=30)
        told = optimizer.diagnostics.get("compile_fallback", "")
        assert ("inputs.steps" in told) == (compiled and cls is Late)
        ends.append(x.detach().clone())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-12, atol=1e-12)


def test_all_entries_of_the_state_are_written():
    """Steps of a kind that writes other entries end a chain."""
    found = []
    for at_once in (False, True):
        optimizer, losses, x, y = problem(Marked, BATCHES, BATCHES)
        for _ in range(103):
            optimizer.step(*losses)
        optimizer.run(*losses, steps=8) if at_once else [optimizer.step(*losses) for _ in range(8)]
        found.append([x.detach(), y.detach(), optimizer.state[x]["mark"]])
    assert all(map(torch.equal, *found))


def test_another_kind_of_step_ends_what_is_drawn_at_once(monkeypatch):
    """Steps with more lower steps are made with another graph, also where the losses draw nothing; others in a row."""
    counted, follow = [], Chain.follow
    monkeypatch.setattr(
        Chain, "follow", lambda own, first, data: counted.append(1 + len(data)) or follow(own, first, data)
    )

    class Unequal(bo.StocBiO):
        def _lower_step_count(self, steps):
            return 2 if steps % 4 == 0 else 1

    results = []
    for at_once in (False, True):
        optimizer, _, x, y = problem(Unequal, None, None)
        losses = bo.Objective(lambda y=y: (y - 1).square().sum()), bo.Objective(lambda x=x, y=y: (y - x).square().sum())
        found = [optimizer.step(*losses).reshape(1) for _ in range(14 if at_once else 30)]
        if at_once:
            found.append(optimizer.run(*losses, steps=16))
        results.append(ends(optimizer, losses, x, y, found))
        assert optimizer.captured_graphs == 2
    assert all(map(torch.equal, *results))
    assert max(counted, default=0) == 3  # of four steps one has more lower steps


@pytest.mark.usually("sum")
@pytest.mark.parametrize("change", [(None, BATCHES), (BATCHES, None), ("sum", BATCHES)], ids=["data", "no data", "sum"])
def test_a_loss_with_other_data_has_another_graph(change):
    """Called with a batch, without, or with a term of a sum."""

    def g(batch=BATCHES[3]):
        return (y - x - batch.mean(0)).square().sum() / 2

    def with_data(data):
        return bo.FiniteSum(g, torch.cat(BATCHES), 2) if data == "sum" else bo.Objective(g, data)

    results = []
    for at_once in (False, True):
        torch.manual_seed(0)
        optimizer, (upper, _), x, y = problem(bo.SOBA, BATCHES, None)
        before, after = map(with_data, change)
        found = [optimizer.step(upper, before).reshape(1) for _ in range(4)]
        found += [optimizer.step(upper, after).reshape(1) for _ in range(0 if at_once else 7)]
        if at_once:
            found.append(optimizer.run(upper, after, steps=7))
        results.append(ends(optimizer, (upper, after), x, y, found))
        assert optimizer.captured_graphs == 2
    assert all(map(torch.equal, *results))


@pytest.mark.usually("own generators", "other sizes", "mixed")
@pytest.mark.parametrize("kind", ["one stream", "own generators", "other counts", "other sizes", "mixed"])
def test_terms_of_sums_are_drawn_at_once(kind):
    """They are those of single draws, also from torch's default generator, and where terms have rows of their own."""
    rows = torch.cat(BATCHES)
    sizes = {"other counts": (2, 1), "other sizes": (2, 4)}.get(kind, (2, 2))

    def make():
        optimizer, (upper, lower), x, y = problem(bo.SOBA, BATCHES, BATCHES)
        own = [seeded(k) if kind == "own generators" else None for k in (1, 2)]
        terms = [
            bo.FiniteSum(o.loss, rows, size, generator=generator)
            for o, size, generator in zip((upper, lower), sizes, own, strict=True)
        ]
        return optimizer, (upper if kind == "mixed" else terms[0], terms[1]), x, y

    results = []
    with chained_steps() as counted:
        for at_once in (False, True):
            torch.manual_seed(0)
            optimizer, losses, x, y = make()
            found = losses_of(optimizer, losses, at_once)
            state = [torch.cat([o.generator.get_state() for o in losses if getattr(o, "generator", None)] or [rows])]
            results.append([x.detach(), y.detach(), found, torch.get_rng_state(), *state])
    assert all(map(torch.equal, *results))
    assert kind == "other sizes" or max(map(len, counted)) == 6


@pytest.mark.parametrize("cls", [bo.SABA, bo.SRBA])
def test_weights_of_terms_are_exact_whatever_the_default_type(cls):
    """Seven rows in four terms: weights of 4/7 and 8/7, which float32 would round."""
    rows, results = torch.cat(BATCHES)[:7], []
    torch.set_default_dtype(torch.float32)
    for compiled in (False, True):
        optimizer, losses, x, y = problem(cls, BATCHES, BATCHES, compiled=compiled)
        terms = [bo.FiniteSum(own.loss, rows, 2, generator=seeded(k)) for k, own in enumerate(losses)]
        found = torch.cat([optimizer.step(*terms).reshape(1), optimizer.run(*terms, steps=20)])
        results.append(torch.cat([x.detach(), y.detach(), found]))
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)
    assert optimizer.captured_graphs


def losses_of(optimizer, losses, at_once, first=5, steps=14):
    """Losses of the first steps, and of others that are made one by one or in a run."""
    found = [optimizer.step(*losses) for _ in range(first)]
    found += optimizer.run(*losses, steps=steps) if at_once else [optimizer.step(*losses) for _ in range(steps)]
    return torch.stack(found)


@pytest.mark.usually("rows", "length")
@pytest.mark.parametrize("change", ["rows", "type", "length"])
def test_tuples_of_another_form_end_what_is_drawn_at_once(change):
    """Batches of inputs and targets have a check of their own."""
    other = {
        "rows": lambda a, b: (torch.cat([a, a]), torch.cat([b, 3 * b])),
        "type": lambda a, b: (a.double(), b),
        "length": lambda a, b: (a, b, 2 * b),
    }[change]
    results = []
    for at_once in (False, True):
        pairs = [(b, b.flip(0) * 2) for b in BATCHES]
        pairs[2] = other(*pairs[2])
        optimizer, losses, x, y = problem(bo.SOBA, pairs, pairs)
        for objective, own in zip(losses, [o.loss for o in losses], strict=True):
            objective.loss = lambda parts, own=own, y=y: own(parts[0].to(y)) + len(parts) * parts[-1].mean() * y.sum()
        results.append([losses_of(optimizer, losses, at_once), x.detach(), y.detach()])
    for alone, together in zip(*results, strict=True):
        assert torch.allclose(alone, together, rtol=1e-6, atol=0)


@pytest.mark.usually("lower")
@pytest.mark.parametrize("level", ["lower", "upper", "sum"])
def test_batches_without_tensors_end_what_is_drawn_at_once(level):
    """A graph has the values of numbers, and no tensor tells how many steps may follow each other."""
    numbers, others, found = [1.0] * 12 + [3.0] * 12, [batch.mean() for batch in BATCHES], []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
        if compiled:
            optimizer.compile(backend="eager")
        upper = bo.Objective(lambda b, y=y: (y - b).square().sum(), numbers if level == "upper" else others)
        kind = bo.FiniteSum if level == "sum" else bo.Objective
        lower = kind(lambda b, x=x, y=y: (y - b * x).square().sum(), others if level == "upper" else numbers)
        found.append([optimizer.run(upper, lower, steps=32), x.detach(), y.detach()])
        assert "compile_fallback" not in optimizer.diagnostics
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_batches_with_their_parts_in_another_order_end_what_is_drawn_at_once():
    """Their tensors have the same forms, but another meaning."""
    results = []
    for at_once in (False, True):
        pairs = [{"a": b, "b": b.flip(0) * 2} for b in BATCHES]
        pairs[2] = {"b": pairs[2]["b"], "a": pairs[2]["a"]}
        optimizer, losses, x, y = problem(bo.SOBA, pairs, pairs)
        for objective, own in zip(losses, [o.loss for o in losses], strict=True):
            objective.loss = lambda pair, own=own: own(pair["a"]) + pair["b"].sum() * own(pair["b"])
        results.append([losses_of(optimizer, losses, at_once), x.detach(), y.detach()])
    assert all(map(torch.equal, *results))


@pytest.mark.usually("shared generator")
@pytest.mark.parametrize("kind", ["shared generator", "one objective"])
def test_the_order_of_draws_is_kept(kind):
    """If it matters which loss draws first, steps draw one by one, as the losses ask."""
    orders = []

    def make():
        generator, seen = seeded(4), []
        orders.append(seen)
        if kind == "one objective":
            return problem(bo.SOBA, None, BATCHES, same=True)
        return problem(bo.SOBA, Numbered("upper", generator, seen), Numbered("lower", generator, seen))

    steps, run, at_once = one_by_one_and_at_once(make)
    assert all(map(torch.equal, steps, run))
    assert orders[0] == orders[1]
    assert at_once == 0


@pytest.mark.slow  # as the test below
def test_batches_of_another_form_end_what_is_drawn_at_once():
    """Surplus draws are drawn again, including numbers of a generator."""

    data, results = [*BATCHES, *BATCHES, BATCHES[0][:1]], []
    for at_once in (False, True):
        optimizer, losses, x, y = problem(bo.TTSA, BATCHES[:3], data, generator=seeded(3))
        found = [optimizer.step(*losses).reshape(1) for _ in range(24 if at_once else 36)]
        if at_once:
            found.append(optimizer.run(*losses, steps=12))
        results.append(ends(optimizer, losses, x, y, found))
        assert optimizer.captured_graphs == 3
    assert all(map(torch.equal, *results))


def test_a_batch_that_recurs_at_a_place_of_another_form_ends_what_is_drawn_at_once():
    """The two lower batches of a step have two and four rows, at last four and two; a graph has their numbers."""
    two, four = BATCHES[0], torch.cat(BATCHES[1:3])
    results = []
    for at_once in (False, True):
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
        optimizer = bo.ITD([x], [y], lr=0.1, lower_lr=0.3, lower_steps=2)
        optimizer.compile(backend="eager")

        def lower(batch, x=x, y=y):
            return (y - x - batch.sum(0) / len(batch)).square().sum() / 2

        losses = bo.Objective(lambda y=y: (y - 1).square().sum()), bo.Objective(lower, [two, four] * 12 + [four, two])
        found = [optimizer.step(*losses).reshape(1) for _ in range(8 if at_once else 14)]
        if at_once:
            found.append(optimizer.run(*losses, steps=6))
        results.append([x.detach(), y.detach(), torch.cat(found)])
    assert all(map(torch.equal, *results))


class Ending:
    """Batches in order, until one cannot be read."""

    def __iter__(self):
        yield from BATCHES
        raise OSError("no such file")


def test_a_draw_that_fails_gives_back_the_terms_drawn_before_it():
    """The terms of the lower sum are drawn from torch's default generator, then the upper batch fails."""
    optimizer, losses, _, _ = problem(bo.SOBA, Ending(), BATCHES)
    x, y = (group["params"][0] for group in optimizer.param_groups)
    total = bo.FiniteSum(lambda rows: (y - x - rows.mean(0)).square().sum() / 2, torch.cat(BATCHES), batch_size=2)
    for _ in range(len(BATCHES)):
        optimizer.step(losses[0], total)
    assert optimizer.captured_graphs == 1
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no such file"):
        optimizer.step(losses[0], total)
    assert torch.equal(before, torch.get_rng_state())


class Reused:
    """Batches that are written into so many tensors in turn; one may be of another size."""

    def __init__(self, tensors, small=None):
        self.tensors, self.small = tensors, small

    def __iter__(self):
        batches = [BATCHES[0].clone() for _ in range(self.tensors)]
        for k in itertools.count():
            batch = batches[k % self.tensors]
            yield batch.resize_(1 if k == self.small else 2, 3).fill_(0.1 * (k % 5))


@pytest.mark.usually("11")
@pytest.mark.parametrize("data", [Reused(1), Reused(2), Reused(1, 11), Reused(1, 13)], ids=["one", "two", "11", "13"])
def test_batches_that_are_written_into_are_drawn_step_by_step(data):
    """By a run, which draws ahead, as one by one."""
    ends = []
    for at_once in (False, True):
        optimizer, losses, x, y = problem(bo.SOBA, BATCHES, data)
        found = [optimizer.step(*losses).reshape(1) for _ in range(5 if at_once else 20)]
        if at_once:
            found.append(optimizer.run(*losses, steps=15))
        assert optimizer.captured_graphs == (1 if data.small is None else 2)
        ends.append((torch.cat(found), x.detach(), y.detach()))
    assert all(map(torch.equal, *ends))


@pytest.mark.slow
def test_batches_that_are_written_into_within_a_step_are_captured():
    """All the batches of a captured step are drawn before it, and copied."""
    ends = []
    for compiled in (False, True):
        optimizer, losses, x, y = problem(bo.AID, BATCHES, Reused(1), compiled=compiled, lower_steps=3)
        found = [optimizer.step(*losses) for _ in range(6)]
        ends.append((torch.stack(found), x.detach(), y.detach()))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
    assert optimizer.captured_graphs == 1


@pytest.mark.parametrize("own", [False, True])
def test_a_failing_step_gives_back_random_numbers(own):
    """This holds for torch's default generator too, which methods without a generator use."""
    data = [batch.clone() for batch in BATCHES * 3]
    optimizer, losses, _, _ = problem(bo.TTSA, BATCHES[:3], data, generator=seeded(3) if own else None)
    for _ in range(3):
        optimizer.step(*losses)
    position = losses[1].state_dict()["position"]
    for batch in data[position:]:
        batch.fill_(torch.nan)
    for steps in (1, 4):
        before = [g.get_state() for g in (torch.default_generator, optimizer.generator) if g is not None]
        with pytest.raises(bo.NonFiniteError):
            optimizer.run(*losses, steps=steps)
        after = [g.get_state() for g in (torch.default_generator, optimizer.generator) if g is not None]
        assert all(map(torch.equal, before, after))
        assert losses[1].state_dict()["position"] == position


@pytest.mark.parametrize("length", [1, 2, 5])
def test_many_batches_are_those_of_as_many_draws(length):
    for first, times, kind in itertools.product((0, 1, 2, 5, 7), (1, 2, 4, 5, 6, 11, 23), (list, tuple)):
        data = kind(range(length))
        one, many = bo.Objective(torch.sum, data), bo.Objective(torch.sum, data)
        for objective in (one, many):
            for _ in range(first):
                objective.draw()
        assert many.take(times) == [one.draw().batch for _ in range(times)]
        assert many.state_dict() == one.state_dict()
        assert [many.draw().batch for _ in range(3)] == [one.draw().batch for _ in range(3)]
    with pytest.raises(ValueError, match="empty"):
        bo.Objective(torch.sum, []).take(3)


def test_memory_that_many_steps_share_is_not_that_of_their_results():
    """Small steps on a CPU write into memory of the step before the last; MRBO's state has the x of the last step.

    A value that is not finite ends a run there too, after the steps before it.
    """
    ends = []
    for compiled in (False, True):
        data = [batch.clone() for batch in BATCHES]
        optimizer, losses, x, y = problem(bo.MRBO, BATCHES, data, compiled=False)
        if compiled:
            optimizer.compile()
        for _ in range(20):
            optimizer.step(*losses)
        first = optimizer.run(*losses, steps=40)
        held = [first, x.grad, *(t for entries in optimizer.state.values() for t in entries.values())]
        before = [t.clone() for t in held]
        second = optimizer.run(*losses, steps=40)
        assert all(map(torch.equal, held, before))
        ends.append([first, second, x.detach().clone(), y.detach().clone(), *before])
        data[(losses[1].state_dict()["position"] + 9) % len(data)].fill_(torch.nan)
        with pytest.raises(bo.NonFiniteError) as caught:
            optimizer.run(*losses, steps=40)
        place = caught.value.step, losses[1].state_dict()["position"]
        ends[-1] += [x.detach(), y.detach(), torch.tensor(place, dtype=torch.float64)]
    ((_, reader),) = (one for entry in optimizer._captured.entries for one in entry.compiled)
    chain = reader.programs[-1][1].chain
    assert len(chain._reusing) == 3
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.usually("SOBA")
@pytest.mark.parametrize("kind", [bo.SOBA, bo.MRBO])
def test_results_of_a_step_are_not_in_the_memory_of_the_next(kind):
    """Small steps on a CPU write values that are copied into the same memory each time; losses and state stay."""
    optimizer, losses, x, _ = problem(kind, BATCHES, BATCHES[::-1], compiled=False)
    optimizer.compile()
    for _ in range(9):
        optimizer.step(*losses)
    held = []
    for _ in range(5):
        loss = optimizer.step(*losses)
        kept = [loss, x.grad, *(t for entries in optimizer.state.values() for t in entries.values())]
        held.append((kept, [t.clone() for t in kept]))
    assert all(torch.equal(*pair) for kept, copies in held for pair in zip(kept, copies, strict=True))
    assert len({t.data_ptr() for kept, _ in held for t in kept[:2]}) == 10


def test_changed_options_are_seen():
    """Each step and each run has the present options of the optimizer and of its groups, and their parameters."""
    found = []
    for compiled in (False, True):
        optimizer, losses, x, y = problem(bo.StocBiO, BATCHES, BATCHES, compiled=compiled)
        group = optimizer.param_groups[1]
        several = [optimizer.step(*losses) for _ in range(4)]
        optimizer.lower_steps = 3
        several += [optimizer.step(*losses) for _ in range(4)]
        group["weight_decay"] = 0.5
        several += [optimizer.step(*losses) for _ in range(4)]
        group["weight_decay"] = 0.7
        several += optimizer.run(*losses, steps=4)
        found.append([x.detach(), y.detach(), *several])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_sparse_batches_are_taken_one_by_one():
    """Nothing tells whether a sparse tensor shares memory with a live one, so no step follows another unwritten."""
    batches, found = [batch.to_sparse() for batch in BATCHES], []
    for compiled in (False, True):
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
        if compiled:
            optimizer.compile(backend="eager")
        lower = bo.Objective(lambda b, x=x, y=y: (b @ (y - x)[:, None]).square().sum() + y.square().sum(), batches)
        upper = bo.Objective(lambda b, y=y: (b @ (y - 1)[:, None]).square().sum(), batches[::-1])
        found.append([optimizer.run(upper, lower, steps=12), x.detach(), y.detach()])
        assert "compile_fallback" not in optimizer.diagnostics
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["tuples", "random inputs"])
def test_other_batches_in_the_memory_of_y_follow_it(kind):
    """Tuples of tensors have a check of their own, and so have steps that are drawn one by one."""
    found = []
    for compiled in (False, True):
        cls, arguments = (bo.SOBA, {}) if kind == "tuples" else (bo.TTSA, {"linear_steps": 3})
        optimizer, (_, lower), x, y = problem(cls, BATCHES, BATCHES, compiled=compiled, **arguments)
        if kind == "random inputs":  # beside a random term, they are drawn step by step
            lower = bo.FiniteSum(lower.loss, BATCHES)
        anchors = [(batch[0],) for batch in BATCHES[:5]] + [(y.detach(),)]
        losses = bo.Objective(lambda own, y=y: (y - own[0]).square().sum() + (y**4).sum(), anchors), lower
        torch.manual_seed(0)
        kept = [optimizer.run(*losses, steps=k) for k in (5, 1, 30)]
        assert "compile_fallback" not in optimizer.diagnostics
        found.append([*kept, x.detach(), y.detach()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cls", [bo.SOBA, bo.AID])
def test_batches_in_the_memory_of_y_follow_it(cls):
    """A batch that a later step of a run draws has the values that y has then."""
    found = []
    for compiled in (False, True):
        optimizer, (_, lower), x, y = problem(cls, BATCHES, BATCHES, compiled=compiled)
        anchors = [*[batch[0] for batch in BATCHES[:5]], y.detach()]
        losses = bo.Objective(lambda anchor, y=y: (y - anchor).square().sum() + (y**4).sum(), anchors), lower
        kept = [optimizer.run(*losses, steps=k) for k in (5, 1, 30)]
        assert "compile_fallback" not in optimizer.diagnostics
        found.append([*kept, x.detach(), y.detach()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
