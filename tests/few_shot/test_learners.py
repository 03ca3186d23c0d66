"""Meta-learners: gradients against independent references, and the absence of side effects."""

import copy

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from recipes.few_shot.backbones import BACKBONES, calibrate
from recipes.few_shot.learners import LEARNERS, HeadAdapting, make

from ..problems import close
from . import problems

TASKS = 2


def learner(name, *, statistics="running", evaluating=True, width=2, momentum=None, **options):
    """A learner of the small problem, its body in evaluation mode, with other options of its method."""
    kind, settings = LEARNERS[name]
    settings = {**settings, **({"ridge": 0.5} if kind is HeadAdapting else {})}
    if "options" in settings:
        settings["options"] = {**settings["options"], **options}
    if momentum is not None:
        settings["momentum"] = momentum
    body = problems.body(statistics, width)
    calibrate(body, [s.images.flatten(0, 1) for s, _ in problems.episodes().fixed(4, 0)])
    body.train(not evaluating)
    made = kind(body, 2, tasks=TASKS, generator=torch.Generator().manual_seed(5), **settings)
    for value in made.network.parameters():
        value.data += 0.1 * torch.randn_like(value)
    return made


def exact(name, **options):
    made = learner(name, **options)
    return made, bo.check_hypergradient(
        made.optimizer, made.upper_loss, made.lower_loss, tasks=problems.episodes(), rtol=1e-3, repeats=2
    )


SOLVED = {"momentum": 0.0, "lower_lr": 0.9, "lower_steps": 30}


@pytest.mark.usually("aid")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("aid", {**SOLVED, "linear_steps": 20}),
        ("itd", SOLVED),
        ("f2sa", {**SOLVED, "nu": 1e-3}),
        ("anil", SOLVED),
    ],
)
def test_meta_gradients_are_hypergradients(name, options):
    _, report = exact(name, **options)
    assert report.relative_error < 1e-3


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
def test_pzobo_with_all_directions_is_the_hypergradient():
    options = {**SOLVED, "lower_steps": 14, "smoothing": 1e-3, "direction": "orthogonal"}
    count = sum(p.numel() for p in learner("pzobo", width=1).upper)
    _, report = exact("pzobo", **options, width=1, directions=count, difference="central", vectorize=True)
    assert report.relative_error < 1e-3


def test_the_control_misses_the_indirect_term():
    with pytest.raises(bo.GradcheckError, match="FirstOrder: hypergradient off"):
        exact("first-order", **SOLVED)


def test_imaml_is_the_derivative_of_the_proximal_solution():
    made = learner("imaml", lower_lr=0.15, lower_steps=40, linear_steps=15, proximal=5.0)
    report = bo.check_hypergradient(
        made.optimizer, made.upper_loss, made.lower_loss, tasks=problems.episodes(), rtol=1e-3, repeats=2
    )
    assert report.relative_error < 1e-3


def gradient(made, episodes=None):
    made.backward(episodes or problems.episodes())
    return torch.cat([p.grad.flatten() for p in made.upper])


def drawn(made):
    """The tasks of the next meta-step: support and query of each."""
    generator = torch.Generator()
    generator.set_state(made.generator.get_state())
    episodes = problems.episodes()
    tasks = episodes.sample(TASKS, generator)
    return episodes.lower(tasks, None, None), episodes.upper(tasks, None, None)


@pytest.mark.parametrize("name", ["maml", "fomaml"])
@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_maml_differentiates_its_steps(name, statistics):
    made = learner(name, statistics=statistics, lower_steps=2)
    support, query = drawn(made)
    start = [p.detach().clone().requires_grad_() for p in made.start]
    names = [n for n, _ in made.whole.named_parameters()]

    def loss(values, images, labels):
        body, head = ({n[2:]: v for n, v in zip(names, values, strict=True) if n[0] == k} for k in "01")
        features = torch.func.functional_call(made.body, body, (images,))
        return F.cross_entropy(features @ head["weight"].T + head["bias"], labels)

    total = 0.0
    for i in range(TASKS):
        values = start
        for _ in range(2):
            slopes = torch.autograd.grad(
                loss(values, support.images[i], support.labels[i]), values, create_graph=name == "maml"
            )
            values = [v - 0.4 * s for v, s in zip(values, slopes, strict=True)]
        total = total + loss(values, query.images[i], query.labels[i]) / TASKS
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, start)])
    close(gradient(made), expected, 1e-12, 1e-8)


def test_anil_differentiates_its_steps():
    made = learner("anil", statistics="batch")
    support, query = drawn(made)
    ridge = made.ridge
    total = 0.0
    for i in range(TASKS):
        weight, bias = made.start
        features = made.body(support.images[i])
        for _ in range(made.optimizer.lower_steps):
            value = F.cross_entropy(features @ weight.T + bias, support.labels[i])
            value = value + ridge / 2 * (weight.square().sum() + bias.square().sum())
            slopes = torch.autograd.grad(value, [weight, bias], create_graph=True)
            weight, bias = weight - 0.1 * slopes[0], bias - 0.1 * slopes[1]
        total = total + F.cross_entropy(made.body(query.images[i]) @ weight.T + bias, query.labels[i]) / TASKS
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, made.upper)])
    close(gradient(made), expected, 1e-12, 1e-8)


def test_bome_is_the_barrier_of_each_task():
    made = learner("bome", lower_steps=3, joint_steps=3)
    support, query = drawn(made)
    expected = 0.0
    for i in range(TASKS):
        head = [p.detach().clone().requires_grad_() for p in made.head.parameters()]
        body = [*made.body.parameters()]

        def lower(w, i=i):
            value = F.cross_entropy(made.body(support.images[i]) @ w[0].T + w[1], support.labels[i])
            return value + made.ridge / 2 * sum(v.square().sum() for v in w)

        def upper(w, i=i):
            return F.cross_entropy(made.body(query.images[i]) @ w[0].T + w[1], query.labels[i])

        def flat(value, inputs):
            return torch.cat([g.flatten() for g in torch.autograd.grad(value, inputs)])

        for _ in range(2):  # the head alone, from zero
            f, q = flat(upper(head), head), flat(lower(head), head)
            moved = 0.05 * (f + max(5 * (q @ q) - f @ q, 0) / (q @ q) * q)
            parts = moved.split([h.numel() for h in head])
            head = [(h - m.view_as(h)).detach().requires_grad_() for h, m in zip(head, parts, strict=True)]
        ends, speed = head, [torch.zeros_like(v) for v in head]
        for _ in range(3):
            slopes = torch.autograd.grad(lower(ends), ends)
            speed = [0.9 * m + s for m, s in zip(speed, slopes, strict=True)]
            ends = [(e - 0.01 * m).detach().requires_grad_() for e, m in zip(ends, speed, strict=True)]
        f, value = flat(upper(head), [*body, *head]), flat(lower(head), [*body, *head])
        q = value - torch.cat([flat(lower(ends), body), value.new_zeros(sum(h.numel() for h in head))])
        multiplier = max(5 * (q @ q) - f @ q, 0) / (q @ q)
        expected = expected + (f + multiplier * q)[: sum(b.numel() for b in body)] / TASKS
    close(gradient(made), expected, 1e-12, 1e-8)


def test_reptile_moves_towards_where_adaptation_ends():
    made = learner("reptile", statistics="batch")
    support, query = drawn(made)
    before = [p.detach().clone() for p in made.start]
    expected = 0.0
    for i in range(TASKS):
        images = torch.cat([support.images[i], query.images[i]])
        labels = torch.cat([support.labels[i], query.labels[i]])
        network = copy.deepcopy(made.whole)
        for p, s in zip(network.parameters(), before, strict=True):
            p.data.copy_(s)
        for _ in range(5):
            loss = F.cross_entropy(network[1](network[0](images)), labels)
            for p, g in zip(network.parameters(), torch.autograd.grad(loss, [*network.parameters()]), strict=True):
                p.data -= 0.1 * g
        ends = torch.cat([p.flatten() for p in network.parameters()])
        expected = expected + (torch.cat([s.flatten() for s in before]) - ends).detach() / TASKS
    close(gradient(made), expected, 1e-12, 1e-8)
    assert all(torch.equal(a, b) for a, b in zip(before, made.start, strict=True))


def test_prototypes_are_nearest_means():
    made = learner("protonet")
    support, query = drawn(made)
    scores = made.scores(support, query)
    for i in range(TASKS):
        known, asked = made.body(support.images[i]), made.body(query.images[i])
        means = torch.stack([known[support.labels[i] == c].mean(0) for c in range(2)])
        distances = torch.cdist(asked, means).square() * 10 / known.shape[1]
        close(scores[i].softmax(-1), (-distances).softmax(-1), 1e-10, 1e-10)
    value = F.cross_entropy(scores.flatten(0, 1), query.labels.flatten())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, made.upper)])
    close(gradient(made), expected, 1e-12, 1e-10)


def test_the_ridge_head_solves_its_problem():
    made = learner("ridge")
    support, query = drawn(made)
    log_lambda, log_scale, offset = (float(p.detach()) for p in made.scales.parameters())
    scores = made.scores(support, query)
    for i in range(TASKS):
        known, asked = made.body(support.images[i]), made.body(query.images[i])
        normal = known.T @ known + torch.tensor(log_lambda).exp() * torch.eye(known.shape[1])
        weight = torch.linalg.inv(normal) @ known.T @ F.one_hot(support.labels[i], 2).double()
        close(scores[i], torch.tensor(log_scale).exp() * asked @ weight + offset, 1e-8, 1e-8)
    assert all(p.grad is not None for p in (made.backward(problems.episodes()), made.upper)[1])


def test_steps_are_shorter_on_longer_features():
    torch.manual_seed(0)
    images = torch.randn(6, 3, 32, 32)
    bodies = [BACKBONES[name](3, 32) for name in ("cnn4", "resnet12")]
    with torch.no_grad():
        short, long = (body(images).square().sum(1).mean() for body in bodies)
    assert 0.7 < bodies[1].gain * short / long < 1.4
    rates = [make("anil", body, 5, tasks=1, seed=0).optimizer.param_groups[-1]["lr"] for body in bodies]
    assert rates == [0.1, 0.01]


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_lowers_its_loss_and_changes_no_statistics(name):
    """Over some meta-steps with Adam; a bilevel learner's step does not move the meta-learned parameters."""
    made = learner(name, evaluating=False)
    outer = torch.optim.Adam(made.upper, 0.02)
    before = {k: v.clone() for k, v in made.network.state_dict().items()}
    losses = []
    for _ in range(5):
        state = [p.detach().clone() for p in made.upper]
        made.generator.manual_seed(5)  # the same episodes each time
        losses.append(float(made.backward(problems.episodes())))
        assert all(torch.equal(a, b) for a, b in zip(state, made.upper, strict=True))
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.upper)
        outer.step()
    assert losses[-1] < losses[0]
    after = made.network.state_dict()
    buffers = [k for k in after if k.endswith((".mean", ".variance"))]
    assert buffers
    assert all(torch.equal(before[k], after[k]) for k in buffers)


@pytest.mark.parametrize("name", LEARNERS)
def test_scores_of_several_episodes_are_those_of_each(name):
    made = make(name, problems.body("support"), 2, tasks=2, seed=0)
    ((support, query),) = problems.episodes("test", beside=True).fixed(3, 0)
    with torch.no_grad():
        whole = made.scores(support, query)
        for i in range(3):
            one = (type(b)(*(t[i : i + 1] if t is not None else None for t in b)) for b in (support, query))
            close(made.scores(*one)[0], whole[i], 1e-10, 1e-10)


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
def test_features_are_computed_once_for_each_body_and_batch():
    counts = {}
    for name in ("first-order", "aid", "itd", "anil", "f2sa", "pzobo"):
        made = learner(name, vectorize=1 if name == "pzobo" else True)
        made.backward(problems.episodes())  # the first step also looks at what the losses depend on
        calls = []
        handle = made.body.layers.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made.backward(problems.episodes())
        handle.remove()
        counts[name] = len(calls) / TASKS
    # Support and query; AID's system once more with a graph; the support of a second path.
    assert counts["first-order"] == counts["itd"] == counts["anil"] == 2
    assert counts["aid"] == 3
    assert counts["pzobo"] == 3
    assert counts["f2sa"] <= 6


def test_bfloat16_bodies_give_single_precision_heads():
    torch.set_default_dtype(torch.float32)
    made = make("protonet", problems.body(), 2, tasks=2, seed=0, autocast=True)
    full = make("protonet", problems.body(), 2, tasks=2, seed=0)
    one, other = gradient(made), gradient(full)
    assert one.dtype == torch.float32
    assert not torch.equal(one, other)
    assert torch.cosine_similarity(one, other, 0) > 0.98
    with pytest.raises(SystemExit, match="no --autocast"):
        make("pzobo", problems.body(), 2, tasks=2, seed=0, autocast=True)
