"""A state from which a run cannot continue is refused before any of it is loaded."""

import copy
import io

import pytest
import torch

import bilevel_optim as bo

from ..problems import Quadratic, seeded, values
from .test_precisions import rewritten


def made(generator=None, cls=bo.PZOBO):
    problem = Quadratic(n=4, m=2)
    return problem, cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2, generator=generator)


@pytest.mark.parametrize("with_one", [True, False])
def test_a_state_with_a_generator_is_not_one_without(with_one):
    """The run used to continue with other random numbers."""
    problem, optimizer = made(seeded() if with_one else None)
    problem.run(optimizer, 2)
    other_problem, other = made(None if with_one else seeded(3))
    before = str(other.state_dict()), str(values(other_problem.x, other_problem.y))
    if not with_one:  # as in older states: the present generator continues
        other.load_state_dict(optimizer.state_dict())
        return
    with pytest.raises(ValueError, match=r"the state dict is that of an optimizer with a generator.*generator="):
        other.load_state_dict(optimizer.state_dict())
    assert (str(other.state_dict()), str(values(other_problem.x, other_problem.y))) == before


WRONG = {
    "steps_done": [-1, 1.5, "two", None],
    "oracle_counts": [[], {"hvp": -1}, {"hvp": "many"}, {"hvp": 1, "others": 2}, None],
    "fallback": [3],
    "last_loss": [3.0, "x"],
    "numbers": [[], None, {1: 2}],
    "options": [[], {"beta": 1}],
    "generator": [3, torch.zeros(3), torch.zeros(2, dtype=torch.uint8)],
    "warned": [3, [1]],
    "kept": [[], {"lower": 3}],
    "shapes": [3],
}


@pytest.mark.few(11)
@pytest.mark.parametrize(("name", "value"), [(k, v) for k, some in WRONG.items() for v in some], ids=str)
def test_state_of_no_parameter_is_checked_before_loading(name, value):
    """The error used to come after the state had been replaced."""
    problem, optimizer = made(seeded())
    problem.run(optimizer, 2)
    state, before = copy.deepcopy(optimizer.state_dict()), str(optimizer.state_dict())
    with pytest.raises(ValueError, match="the state dict is"):
        optimizer.load_state_dict(rewritten(state, **{name: value}))
    assert str(optimizer.state_dict()) == before
    optimizer.load_state_dict(optimizer.state_dict())
    problem.run(optimizer)


@pytest.mark.parametrize("change", [lambda t: t.tolist(), lambda t: "text", lambda t: (t,)])
@pytest.mark.parametrize("cls", [bo.SOBA, bo.FSLA, bo.AID])
def test_non_tensors_are_refused(cls, change):
    """A list used to be loaded, and the next step failed."""
    problem = Quadratic(n=4, m=2)
    options = {"lower_steps": 2} if cls is bo.AID else {}
    lower = {"lower_optimizer": torch.optim.Adam} if cls is bo.AID else {}
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, **options, **lower)
    problem.run(optimizer, 2)
    before = str(optimizer.state_dict())
    # None and numbers are what optimizers of torch themselves keep.
    wanted = [(key, n) for key, entries in optimizer.state_dict()["state"].items() for n in entries if n != "step"]
    assert wanted
    for key, name in wanted:
        state = copy.deepcopy(optimizer.state_dict())
        value = state["state"][key][name]
        state["state"][key][name] = change(value.reshape(-1))
        with pytest.raises(ValueError, match="the state dict is damaged"):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == before


def test_a_warning_that_was_given_is_not_given_again():
    """A captured step with an alert that had been on was made eagerly after a resume, with other rounding."""
    problem, optimizer = made(seeded())
    problem.run(optimizer)
    optimizer._run_state.warned |= {"some", "others"}
    other_problem, other = made(seeded())
    other._run_state.warned = {"own"}
    other.load_state_dict(optimizer.state_dict())
    assert other._run_state.warned == {"some", "others", "own"}
    old = copy.deepcopy(optimizer.state_dict())
    own = torch.load(io.BytesIO(old["param_groups"][0]["bilevel"]), weights_only=True)
    del own["warned"], own["types"]
    file = io.BytesIO()
    torch.save(own, file)
    old["param_groups"][0]["bilevel"] = file.getvalue()
    made(seeded())[1].load_state_dict(old)
    other_problem.run(other)
