"""The form of a step's data and state: torch's guards and a comparison of attributes tell the same."""

import pytest
import torch

from bilevel_optim.compiled.forms import DataForm, structure_of


def data():
    return [
        (torch.zeros(3, 2), torch.ones(3, dtype=torch.int64)),
        (torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)),
    ]


def fits(form, value):
    tensors = []
    return form.fits(structure_of(value, tensors), tensors)


OTHERS = {
    "a shape": lambda first, second: [(torch.zeros(4, 2), first[1]), second],
    "strides": lambda first, second: [(torch.zeros(2, 3).t(), first[1]), second],
    "a type": lambda first, second: [(first[0].bfloat16(), first[1]), second],
    "a gradient": lambda first, second: [(first[0].requires_grad_(), first[1]), second],
    "a negated view": lambda first, second: [(torch._neg_view(first[0]), first[1]), second],
    "a tensor more": lambda first, second: [(*first, first[1]), second],
    "a sample less": lambda first, second: [first],
    "a list": lambda first, second: [[*first], second],
    "a number": lambda first, second: [(first[0], 1.0), second],
}
SAME = {
    "other values": lambda first, second: [second, first],
    "one sample twice": lambda first, second: [first, first],
    "a parameter without a gradient": lambda first, second: [
        (torch.nn.Parameter(first[0], requires_grad=False), first[1]),
        second,
    ],
}


@pytest.mark.parametrize(("made", "used"), [(True, True), (True, False), (False, True), (False, False)])
def test_forms_are_told_apart_with_and_without_gradients(made, used):
    with torch.set_grad_enabled(made):
        form, needing = DataForm.of(data()), DataForm.of(OTHERS["a gradient"](*data()))
    with torch.set_grad_enabled(used):
        assert fits(form, data())
        assert fits(needing, OTHERS["a gradient"](*data()))
        assert not fits(needing, data())
        for name, change in OTHERS.items():
            assert not fits(form, change(*data())), name
        for name, change in SAME.items():
            assert fits(form, change(*data())), name


def test_memory_of_another_shape_in_the_same_tensor_is_noticed():
    value = data()
    form = DataForm.of(value)
    value[0][0].data = torch.zeros(5, 2)
    assert not fits(form, value)


def test_inside_a_mode_that_changes_torchs_dispatch_the_forms_are_the_same():
    form = DataForm.of(data())
    with torch.autocast("cpu", torch.bfloat16):
        assert fits(form, data())
    with torch.inference_mode():
        assert fits(form, data())


def test_batches_that_are_tuples_of_tensors_are_compared_in_a_row():
    batches = data()
    form = DataForm.of((batches[0],))
    assert form.fit_plainly(batches)
    for name in ("a shape", "strides", "a type", "a tensor more", "a list", "a number"):
        other = OTHERS[name](*data())
        assert not form.fit_plainly(other), name
        assert not form.fit_plainly([*batches, *batches, *other, *batches]), name


def test_numbers_still_to_be_conjugated_have_a_form_of_their_own():
    value = [torch.ones(2, dtype=torch.complex64)]
    assert fits(DataForm.of(value), [value[0] + 1])
    assert not fits(DataForm.of(value), [value[0].conj()])
    assert not DataForm.of((value[0],)).fit_plainly([(value[0].conj(),)])
