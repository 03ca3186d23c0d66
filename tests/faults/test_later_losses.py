"""Losses, features and parameters that come in after the first step are looked at as those of the first step."""

import pytest
import torch

import bilevel_optim as bo

MAKE = {
    "AID": lambda x, y: bo.AID([x], y, lr=0.1, lower_lr=0.3, lower_steps=5),
    "ITD": lambda x, y: bo.ITD([x], y, lr=0.1, lower_lr=0.3, lower_steps=5),
    "ITD-checkpoint": lambda x, y: bo.ITD([x], y, lr=0.1, lower_lr=0.3, lower_steps=5, checkpoint=True),
    "F2SA": lambda x, y: bo.F2SA([x], y, lr=0.1, lower_lr=0.3, lower_steps=5, nu=1e-2),
    "PZOBO": lambda x, y: bo.PZOBO([x], y, lr=0.1, lower_lr=0.3, lower_steps=5, directions=3, smoothing=1e-3),
}
each_method = pytest.mark.parametrize("method", MAKE)


class Parts:
    """y = (a, b); the features read b, which the head reads too."""

    def __init__(self):
        self.x = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
        self.a = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
        self.b = torch.tensor([0.4, 0.1], dtype=torch.float64, requires_grad=True)
        self.reading = bo.Objective(
            self.head, [torch.zeros(())], features=lambda _: (self.b.tanh() * self.x, self.x.sin())
        )
        self.plain = bo.Objective(self.head, [torch.zeros(())], features=lambda _: (self.x.cos(), self.x.sin()))

    def head(self, part):
        first, second = part
        return (self.a - first).square().sum() + (self.b - second).square().sum()

    def upper(self):
        return (self.a - 1).square().sum() + (self.b - self.x).square().sum()


def require_refused_unchanged(parts, optimizer, lower, message, check=True):
    tensors = (parts.x, parts.a, parts.b)
    before = [t.detach().clone() for t in tensors]
    optimizer.check_derivatives = check
    with pytest.raises(ValueError, match=message):
        optimizer.backward(parts.upper, lower)
    assert all(torch.equal(t, value) for t, value in zip(tensors, before, strict=True))


@each_method
def test_features_that_read_y_are_refused_in_the_first_step(method):
    parts = Parts()
    optimizer = MAKE[method](parts.x, [parts.a, parts.b])
    require_refused_unchanged(parts, optimizer, parts.reading, "depend on lower parameter 1")


@each_method
@pytest.mark.parametrize("check", [True, False])
def test_features_are_looked_at_again_when_a_parameter_that_they_read_is_thawed(method, check):
    parts = Parts()
    optimizer = MAKE[method](parts.x, [parts.a, parts.b])
    parts.b.requires_grad_(False)
    for _ in range(2):
        optimizer.step(parts.upper, parts.reading)
    parts.b.requires_grad_(True)
    require_refused_unchanged(parts, optimizer, parts.reading, "depend on lower parameter 1", check)


@each_method
def test_other_features_are_looked_at_too(method):
    parts = Parts()
    optimizer = MAKE[method](parts.x, [parts.a, parts.b])
    for _ in range(2):
        optimizer.step(parts.upper, parts.plain)
    require_refused_unchanged(parts, optimizer, parts.reading, "depend on lower parameter 1")


@each_method
def test_a_module_of_features_is_known_by_itself_and_not_by_its_type(method):
    class Body(torch.nn.Module):
        def __init__(self, read):
            super().__init__()
            self.read = read

        def forward(self, _):
            return self.read(), parts.x.sin()

    parts = Parts()
    data = [torch.zeros(())]
    optimizer = MAKE[method](parts.x, [parts.a, parts.b])
    optimizer.step(parts.upper, bo.Objective(parts.head, data, features=Body(lambda: parts.x.cos())))
    reading = bo.Objective(parts.head, data, features=Body(lambda: parts.b.tanh()))
    require_refused_unchanged(parts, optimizer, reading, "depend on lower parameter 1")


@each_method
def test_a_later_loss_that_calls_backward_or_writes_is_refused(method):
    def backward():
        loss = parts.head((parts.x.cos(), parts.x.sin()))
        loss.backward(retain_graph=True)
        return loss

    def writes():
        with torch.no_grad():
            parts.b.clamp_(max=0.01)
        return parts.head((parts.x.cos(), parts.x.sin()))

    for wrong, message in ((backward, r"call backward\(\)"), (writes, "writes into lower parameter 1")):
        parts = Parts()
        optimizer = MAKE[method](parts.x, [parts.a, parts.b])
        optimizer.step(parts.upper, parts.plain)
        require_refused_unchanged(parts, optimizer, wrong, message)
        assert parts.a.grad is None
        optimizer.step(parts.upper, parts.plain)


@each_method
def test_losses_in_turn_are_looked_at_once_each(method):
    parts, looks = Parts(), 0

    def features(_):
        nonlocal looks
        looks += torch.is_grad_enabled()
        return parts.x.cos(), parts.x.sin()

    def other(part):
        return 2 * parts.head(part)

    first = bo.Objective(parts.head, [torch.zeros(())], features=features)
    second = bo.Objective(other, [torch.zeros(())], features=features)
    optimizer, counts = MAKE[method](parts.x, [parts.a, parts.b]), []
    for _ in range(4):
        for lower in (first, second):
            before = looks
            optimizer.step(parts.upper, lower)
            counts.append(looks - before)
    assert counts[2:] == counts[2:4] * 3
    assert all(now > later for now, later in zip(counts[:2], counts[2:4], strict=True))
