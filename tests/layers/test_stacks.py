"""Operations on stacks of lanes give what each lane gives alone, with two derivatives and torch's own errors."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from bilevel_optim.oracle.stacks import mapped
from bilevel_optim.oracle.substitution import Substitution
from bilevel_optim.pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args")  # still used, so they count
LANES, ROWS, INPUTS, CLASSES = 3, 4, 5, 6
WEIGHT, BIAS = torch.zeros(CLASSES, INPUTS, requires_grad=True), torch.zeros(CLASSES, requires_grad=True)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


INPUT, LABELS = numbers(LANES, ROWS, INPUTS), torch.arange(LANES * ROWS).reshape(LANES, ROWS) % CLASSES
SOME = torch.where(LABELS == 2, -100, LABELS)  # none is left out in one lane, one or two in others
NONE = torch.where(torch.arange(LANES).unsqueeze(1) == 1, -100, LABELS)  # all are left out in one lane: 0 / 0

OTHERS = numbers(2, CLASSES, INPUTS)


def scores(part):
    return F.linear(part, WEIGHT, BIAS)


LOSSES = {
    "cross entropy": lambda part, labels: F.cross_entropy(scores(part), labels),
    "module": lambda part, labels: torch.nn.CrossEntropyLoss()(scores(part), labels),
    "logarithms": lambda part, labels: F.nll_loss(F.log_softmax(scores(part), 1), labels),
    "another label is left out": lambda part, labels: F.cross_entropy(scores(part), labels, ignore_index=1),
    "sum": lambda part, labels: F.cross_entropy(scores(part), labels, reduction="sum"),
    "each": lambda part, labels: F.cross_entropy(scores(part), labels, reduction="none").square().sum(),
    "old argument": lambda part, labels: F.cross_entropy(scores(part), labels, size_average=False),
    "smoothed": lambda part, labels: F.cross_entropy(scores(part), labels, label_smoothing=0.1),
    "weighted": lambda part, labels: F.cross_entropy(scores(part), labels, weight=torch.arange(1.0, 7).double()),
    "probabilities": lambda part, labels: F.cross_entropy(scores(part), torch.softmax(scores(part.flip(0)), 1)),
    "pixels": lambda part, labels: F.cross_entropy(scores(part).t()[None], labels[None]),
    "one row": lambda part, labels: F.cross_entropy(scores(part)[0], labels[0]),
    "bytes": lambda part, labels: F.nll_loss(F.log_softmax(scores(part), 1), (labels % 3).abs().byte()),
    "bytes of many classes": lambda part, labels: F.nll_loss(
        F.log_softmax(scores(part).repeat(1, 27), 1), (labels % 3 + 155).byte()
    ),
    "one bias for all": lambda part, labels: F.cross_entropy(F.linear(part, WEIGHT, BIAS.sum()), labels),
    "one bias in a vector": lambda part, labels: F.cross_entropy(F.linear(part, WEIGHT, BIAS[:1]), labels),
    "biases of rows": lambda part, labels: F.cross_entropy(F.linear(part, WEIGHT, BIAS + part.sum(1, True)), labels),
    "without bias": lambda part, labels: F.cross_entropy(F.linear(part, WEIGHT), labels),
    "no batch": lambda part, labels: F.linear(part[0], WEIGHT, BIAS).square().sum(),
    "sequences": lambda part, labels: F.linear(part.reshape(2, 2, INPUTS), WEIGHT, BIAS).square().sum(),
    "shared input": lambda part, labels: F.cross_entropy(scores(INPUT[0]), labels),
    "shared labels": lambda part, labels: F.cross_entropy(scores(part), LABELS[0]),
    "viewed": lambda part, labels: (scores(part).view(-1) * F.linear(part, 2 * WEIGHT).view(-1)).sin().sum(),
    "by name": lambda part, labels: F.cross_entropy(input=scores(part), target=labels),
    "gradient inside": lambda part, labels: torch.func.grad(
        lambda p: F.cross_entropy(F.linear(p, WEIGHT, BIAS), labels)
    )(part).square().sum(),
    "vmap inside": lambda part, labels: vmap(lambda p: F.cross_entropy(F.linear(p, WEIGHT, BIAS), labels))(
        torch.stack([part, 2 * part])
    ).sum(),
    "vmap along rows": lambda part, labels: vmap(lambda s: F.cross_entropy(s, labels), in_dims=1)(
        torch.stack([scores(part), 2 * scores(part)], 1)
    ).sum(),
    "vmap along inputs": lambda part, labels: vmap(lambda w: F.linear(part, w).square().sum(), in_dims=1)(
        torch.stack([WEIGHT.sin(), WEIGHT.cos()], 1)
    ).sum(),
    "vmap over other weights": lambda part, labels: vmap(lambda w: F.linear(INPUT[0], w, BIAS).square().sum())(
        OTHERS
    ).sum() + scores(part).sum(),
}  # fmt: skip


def by_lane(loss, labels, weights, biases):
    def alone(part, own, weight, bias):
        with Substitution([WEIGHT, BIAS], [weight, bias], stacked=False):
            return loss(part, own)

    return torch.stack([alone(*one) for one in zip(INPUT, labels, weights, biases, strict=True)])


def together(loss, labels, weights, biases, *, known=True):
    def one(part, own, weight, bias):
        with Substitution([WEIGHT, BIAS], [weight, bias]):
            return loss(part, own)

    return mapped(one, [INPUT, labels, weights, biases], LANES, "error", known=known)


def derivatives(values, variables):
    """Return values, gradients, and the derivatives of a function of the gradients."""
    first = torch.autograd.grad(values.sum(), variables, create_graph=True, allow_unused=True)
    first = [torch.zeros_like(t) if g is None else g for t, g in zip(variables, first, strict=True)]
    if not any(g.requires_grad for g in first):
        return [values, *first]
    second = torch.autograd.grad(sum(g.square().sum() for g in first), variables, allow_unused=True)
    return [values, *first, *(torch.zeros(()) if g is None else g for g in second)]


@pytest.fixture(autouse=True)
def decompositions():
    vmap(torch.sin)(torch.zeros(1))


@pytest.mark.parametrize("labels", [LABELS, SOME, NONE], ids=["all", "some", "none"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_stacks_give_what_each_lane_gives(loss, labels):
    variables = [numbers(LANES, CLASSES, INPUTS).requires_grad_(), numbers(LANES, CLASSES).requires_grad_()]
    if labels is not LABELS and loss is LOSSES["another label is left out"]:
        pytest.skip("then -100 is no label")
    found = derivatives(together(loss, labels, *variables), variables)
    expected = derivatives(by_lane(loss, labels, *variables), variables)
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_copies_of_stacks_give_what_each_copy_gives(loss):
    if loss in (LOSSES["bytes"], LOSSES["bytes of many classes"]):
        pytest.skip("torch's own vmap does not take bytes")
    weights, biases = numbers(2, LANES, CLASSES, INPUTS).requires_grad_(), numbers(2, LANES, CLASSES).requires_grad_()
    found = vmap(lambda *own: together(loss, LABELS, *own), randomness="error")(weights, biases)
    expected = torch.stack([together(loss, LABELS, *own, known=False) for own in zip(weights, biases, strict=True)])
    variables = [weights, biases]
    for own, right in zip(derivatives(found, variables), derivatives(expected, variables), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("loss", ["linear", "cross entropy"])
def test_levels_between_those_of_a_stack_may_be_missing(loss):
    weights, biases, factors = numbers(2, CLASSES, INPUTS), numbers(LANES, CLASSES), torch.tensor([1.0, 2.0]).double()

    def value(weight, labels, bias, factor):
        if loss == "linear":
            return F.linear(INPUT[0], factor * weight, bias).square().sum()
        return F.cross_entropy(INPUT[0] @ (factor * weight).mT, labels) * bias.sum()

    def found(stacked):
        def lane(labels, bias, weight):
            with Substitution((), (), stacked=stacked):
                return vmap(lambda factor: value(weight, labels, bias, factor))(factors)

        return vmap(lambda weight: vmap(lambda *own: lane(*own, weight))(LABELS, biases))(weights)

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=1e-13)


def wrong_size(part, labels):
    return F.cross_entropy(scores(part), labels[1:])


def wrong_class(part, labels):
    return F.cross_entropy(scores(part), labels + CLASSES)


@pytest.mark.parametrize("loss", [wrong_size, wrong_class])
def test_errors_are_those_of_torch_and_end_the_stack(loss):
    variables = numbers(LANES, CLASSES, INPUTS), numbers(LANES, CLASSES)
    with pytest.raises((ValueError, IndexError), match=r"batch_size|out of bounds"):
        together(loss, LABELS, *variables)
    assert torch.equal(together(LOSSES["sum"], LABELS, *variables), together(LOSSES["sum"], LABELS, *variables))
    torch.zeros(2).add_(1)  # no level of vmap is left


def test_nested_results_and_random_numbers_are_those_of_vmap():
    def function(a, b):
        return {"both": (a + b, a.sum()), "draw": torch.rand(2), "constant": torch.ones(3)}

    stacks = [numbers(LANES, 2), numbers(LANES, 2)]
    for randomness in ("same", "different"):
        torch.manual_seed(0)
        found = mapped(function, stacks, LANES, randomness, known=True)
        torch.manual_seed(0)
        expected = vmap(function, randomness=randomness)(*stacks)
        assert found.keys() == expected.keys()
        pairs = [*zip(tree_leaves(found), tree_leaves(expected), strict=True)]
        assert len(pairs) == 4
        assert all(torch.equal(a, b) for a, b in pairs)


def test_gradients_of_stacked_weights_have_the_layout_of_the_weights():
    variables = [numbers(LANES, CLASSES, INPUTS).requires_grad_(), numbers(LANES, CLASSES).requires_grad_()]
    values = together(LOSSES["cross entropy"], LABELS, *variables)
    gradient, _ = torch.autograd.grad(values.sum(), variables)
    assert gradient.stride() == variables[0].stride()
