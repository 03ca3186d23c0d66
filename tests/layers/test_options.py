"""Options as fields: one line of a class is an argument, its check, its text and an attribute."""

import inspect

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import REGISTRY, MethodInfo
from bilevel_optim.optimizer.options import InitVar, choice, count, fixed, flag, number, option


def is_positive(name, value):
    if value <= 0:
        raise ValueError(f"Invalid {name} value: {value}")


class Own(bo.AID):
    """A method of a user: other defaults, arguments of its own, and one that it fixes."""

    lower_steps: int = count(default=3)
    linear_steps: int = option(default=5)  # with the check of the base class
    linear_solver: str = fixed(default="minres")
    weight: float = number(default=0.5, least=0, most=1, saved=True)
    most: float | None = number(default=None, above=0, optional=True)
    kind: str = choice("a", "b", default="a")
    loud: bool = flag(default=False)
    given: InitVar[int] = option(default=4)
    _hidden: int = option(default=1, alias="shown", check=is_positive)

    def _arrange(self, options):
        super()._arrange(options)
        options["loud"] = options["loud"] or options["kind"] == "b"
        self.seen = options["given"]


def made(cls=Own, **options):
    x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    return cls([x], [y], lr=0.1, **options)


def test_a_field_is_an_argument_with_a_default_and_an_attribute():
    optimizer = made(weight=0.25, shown=7, given=9)
    assert (optimizer.weight, optimizer.most, optimizer.kind, optimizer._hidden) == (0.25, None, "a", 7)
    assert optimizer.lower_steps == 3, "another default of an option of the base class"
    assert optimizer.linear_solver == "minres", "fixed"
    assert optimizer.seen == 9
    assert not hasattr(optimizer, "given"), "an InitVar is no attribute"
    assert not hasattr(Own, "weight"), "nothing of it stays on the class"
    assert made(bo.AID, lower_steps=1).linear_solver == "cg", "the base class is as it was"


def test_the_signature_has_every_option_once_with_those_of_all_methods_last():
    parameters = inspect.signature(Own).parameters
    names = [*parameters]
    assert names[:5] == ["upper", "lower", "lr", "lower_lr", "lower_steps"]
    assert names.index("linear_steps") < names.index("weight") < names.index("warm_start")
    assert not {"linear_solver", "_hidden"} & {*names}
    assert parameters["shown"].default == 1
    assert (parameters["most"].annotation, parameters["lr"].annotation) == ("float | None", "float | None")
    assert parameters["given"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 1.5}, "Invalid weight value: 1.5"),
        ({"weight": True}, "Invalid weight value: True"),
        ({"weight": None}, "Invalid weight value: None"),
        ({"weight": float("nan")}, "Invalid weight value: nan"),
        ({"most": 0}, "Invalid most value: 0"),
        ({"most": float("inf")}, "Invalid most value: inf"),
        ({"kind": "c"}, r"Invalid kind value: c \(choose one of 'a', 'b'\)"),
        ({"loud": 1}, "Invalid loud value: 1"),
        ({"shown": -1}, "Invalid shown value: -1"),
        ({"lower_steps": 2.0}, "Invalid lower_steps value: 2.0"),
        ({"linear_steps": -1}, "Invalid linear_steps value: -1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_misspelt_options_get_a_suggestion():
    with pytest.raises(TypeError, match="Own has no option 'wieght'; did you mean 'weight'"):
        made(wieght=0.1)
    with pytest.raises(TypeError, match="Own has no option 'linear_solver'"):
        made(linear_solver="cg")
    with pytest.raises(TypeError, match="missing a required argument: 'lower_steps'"):
        made(bo.AID)


def test_options_that_depend_on_each_other_are_arranged_before_they_are_stored():
    assert made(kind="b").loud


def test_a_mixin_does_not_bring_back_defaults_of_the_base_class():
    class Mixin(bo.BilevelOptimizer):
        pass

    class Joined(Mixin, bo.PZOBO):
        pass

    assert made(Joined, lower_steps=1).warm_start is made(bo.PZOBO, lower_steps=1).warm_start is False


def test_an_option_needs_a_type():
    with pytest.raises(TypeError, match="option 'depth' of Untyped has no type: write depth: int"):

        class Untyped(bo.AID):
            depth = count(default=1)


def test_saved_options_are_those_that_say_so_inherited_ones_included():
    assert [*made()._saved_options] == ["weight"]
    assert [*made(bo.PZOBO, lower_steps=1)._saved_options] == ["directions", "smoothing"]
    first, second = made(weight=0.1), made()
    second.load_state_dict(first.state_dict())
    assert second.weight == 0.1


def test_the_text_has_the_methods_own_options():
    assert "weight=0.5" in repr(made())


def test_a_method_may_have_an_init_of_its_own():
    """A user's method from before there were fields; it is not in `methods`, because it declares nothing."""

    class Older(bo.AID):
        def __init__(self, upper, lower, *, lower_steps=2, extra=1, **others):
            self.extra = extra
            super().__init__(upper, lower, lower_steps=lower_steps, **others)

    class Passing(Older):
        def __init__(self, *arguments, **others):
            super().__init__(*arguments, **others)

    assert made(Passing, extra=5).extra == 5
    assert [*inspect.signature(Passing).parameters][:2] == ["upper", "lower"]
    optimizer = made(Older, extra=5, linear_steps=7)
    assert (optimizer.extra, optimizer.lower_steps, optimizer.linear_steps) == (5, 2, 7)
    assert {"extra", "linear_steps", "warm_start"} <= {*inspect.signature(Older).parameters}
    with pytest.raises(TypeError, match="Older has no option 'extar'; did you mean 'extra'"):
        made(Older, extar=5)
    assert "Older" not in REGISTRY


def test_requirements_on_the_lower_optimizer_follow_from_declarations():
    class Elementwise(bo.AID):
        declared = MethodInfo(paper="", family="control", when="", cost="", lower_optimizer="given gradient")

    try:
        with pytest.raises(ValueError, match="LBFGS evaluates gradients at points of its own"):
            made(Elementwise, lower_steps=1, lower_lr=0.1, lower_optimizer=torch.optim.LBFGS)
    finally:
        del REGISTRY["Elementwise"]


@pytest.mark.parametrize("shared", [[], {}, set()])
def test_a_default_that_optimizers_would_share_is_refused(shared):
    with pytest.raises(ValueError, match=r"an option has the mutable default .*: take a tuple, or None"):
        option(default=shared)
