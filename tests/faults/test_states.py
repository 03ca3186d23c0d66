"""States whose parts have been changed are refused by name, and nothing of them is loaded."""

import copy

import pytest
import torch

import bilevel_optim as bo

from ..problems import Quadratic, Tasks, same, seeded, values

TRACKED = [
    (bo.SVRB, {}),
    (bo.SVRB, {"variant": "matrix_free"}),
    (bo.RSVRB, {}),
    (bo.RSVRB, {"variant": "matrix_free"}),
    (bo.STABLE, {}),
]


def tables_of(state):
    """Return the name of each table and the entries that contain it."""
    return [(entries, name) for entries in state["state"].values() for name in entries if name.startswith("rows.")]


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("cls", "options"), TRACKED, ids=str)
def test_a_table_of_another_form_is_refused(cls, options, rows):
    """A table of another form would be broadcast."""
    problem = Tasks(m=3, rows=True) if rows else Quadratic(n=4, m=2)
    given = {"task_batch": 2, "generator": seeded()} if rows and cls is bo.RSVRB else {}
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, **given, **options)
    problem.run(optimizer, 3)
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    before, parameters = str(optimizer.state_dict()), values(problem.x, problem.y)
    changes = {
        "rows": lambda t: t[:1].clone() if len(t) > 1 else torch.cat([t, t]),
        "a number for each row": lambda t: t.reshape(len(t), -1)[:, 0].clone() if t.dim() > 1 else t.unsqueeze(1),
        "another type": lambda t: t.long() if t.is_floating_point() else t.double(),
        "a list": lambda t: t.tolist(),
    }
    assert tables_of(state)
    for i, (_, name) in enumerate(tables_of(state)):
        for change in changes.values():
            wrong = copy.deepcopy(state)
            entries, _ = tables_of(wrong)[i]
            entries[name] = change(entries[name])
            with pytest.raises(ValueError, match=f"damaged: the table {name.removeprefix('rows.')} has"):
                optimizer.load_state_dict(wrong)
    assert str(optimizer.state_dict()) == before
    assert same(parameters, values(problem.x, problem.y))


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("level", "uper", "group 1 has the level 'uper'"),
        ("level", None, "group 1 has the level None"),
        ("level", ..., "group 1 has the level None"),
        ("lr", ..., "group 1 has the learning rate None"),
        ("lr", "fast", "group 1 has the learning rate 'fast'"),
    ],
)
def test_incomplete_groups_are_refused(entry, value, message):
    """A group without its level or its learning rate is refused."""
    problem = Quadratic(n=4, m=2)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2)
    problem.run(optimizer, 2)
    state, before = optimizer.state_dict(), str(optimizer.state_dict())
    if value is ...:
        del state["param_groups"][1][entry]
    else:
        state["param_groups"][1][entry] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


def test_integers_in_place_of_state_are_refused():
    problem = Quadratic(n=4, m=2)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2, lower_optimizer=torch.optim.Adam)
    problem.run(optimizer, 2)
    state, before = optimizer.state_dict(), str(optimizer.state_dict())
    for entries in state["state"].values():
        for name, value in entries.items():
            if name.endswith("exp_avg_sq"):
                entries[name] = value.long()
    with pytest.raises(ValueError, match=r"exp_avg_sq should be of a floating-point type, but is of torch\.int64"):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before
