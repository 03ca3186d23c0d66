"""Embeddings whose gradients are sparse, or that write into their weights, are refused by name."""

import pytest
import torch
from torch import nn

import bilevel_optim as bo

METHODS = {
    "AID": (bo.AID, {"lower_steps": 2}),
    "BOME": (bo.BOME, {"lower_steps": 2}),
    "F2SA": (bo.F2SA, {"lower_steps": 2}),
    "ITD": (bo.ITD, {"lower_steps": 2}),
    "PZOBO": (bo.PZOBO, {"lower_steps": 2}),
    "RSVRB": (bo.RSVRB, {}),
    "SOBA": (bo.SOBA, {}),
}
SPARSE = (
    {"sparse": True},
    r"the gradient of parameter 'words' is sparse, but .*: create its module .* with sparse=False",
)
WRITING = {"max_norm": 0.5}, r"a loss writes into lower parameter 'words', .*max_norm"


@pytest.mark.parametrize(("how", "message"), [SPARSE, WRITING], ids=["sparse", "max_norm"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("call", ["step", "propose", "check"])
def test_embeddings_are_refused_by_name(name, how, message, call):
    """Their weights stay unchanged."""
    net, x, words = nn.Embedding(4, 3, **how), torch.zeros(3, requires_grad=True), torch.arange(4)
    cls, options = METHODS[name]
    optimizer = cls([("x", x)], [("words", net.weight)], lr=0.1, lower_lr=0.1, **options)

    def upper():
        return net(words).square().sum() + x.sum()

    def lower():
        return (net(words) - x - 1).square().sum()

    made = {
        "step": optimizer.step,
        "propose": optimizer.propose,
        "check": lambda f, g: bo.check_hypergradient(optimizer, f, g, repeats=2),
    }
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        made[call](upper, lower)
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize(("how", "message"), [SPARSE, WRITING], ids=["sparse", "max_norm"])
@pytest.mark.parametrize("vectorize", [True, False])
def test_embeddings_of_tasks_are_refused_by_name(how, message, vectorize):
    net, x = nn.Embedding(4, 3, **how), torch.zeros(3, requires_grad=True)
    optimizer = bo.AID([("x", x)], [("words", net.weight)], lr=0.1, lower_lr=0.1, lower_steps=2, vectorize=vectorize)
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step(
            lambda words: net(words).square().sum() + x.sum(),
            lambda words: (net(words) - x - 1).square().sum(),
            tasks=bo.TensorTasks(torch.randint(0, 4, (3, 5))),
        )
    assert torch.equal(net.weight, before)
