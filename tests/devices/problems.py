"""The problems of the other tests, with everything that they hold on the simulated device."""

from torch import Tensor, nn

import bilevel_optim as bo

from .simulated import DEVICE, from_device, to_device


def placed(problem):
    """The same problem there; data of loaders and finite sums stay where they are."""
    made = {}

    def there(value):
        if isinstance(value, Tensor):
            if id(value) not in made:
                new = to_device(value)
                made[id(value)] = nn.Parameter(new) if isinstance(value, nn.Parameter) else new
            return made[id(value)]
        if isinstance(value, nn.Module):
            for module in value.modules():
                for own in (module._parameters, module._buffers):
                    own.update({name: there(t) for name, t in own.items()})
        if isinstance(value, (list, tuple)):
            return type(value)(map(there, value))
        if isinstance(value, dict):
            return {name: there(v) for name, v in value.items()}
        if isinstance(value, bo.TensorTasks):
            return bo.TensorTasks(there(value._data["lower"]), there(value._data["upper"]))
        return value

    for name, value in vars(problem).items():
        setattr(problem, name, there(value))
    return problem


def results(problem, optimizer, loss):
    """Return a step's values, gradients, state and diagnostics, as CPU tensors."""
    found = {"loss": loss}
    for level in ("x", "y"):
        for i, t in enumerate(getattr(problem, level)):
            found |= {f"{level}{i}": t, f"{level}{i}.grad": t.grad}
            found |= {f"{level}{i}.{name}": value for name, value in optimizer.state[t].items()}
    found |= optimizer.diagnostics
    return {name: from_device(t.detach()) for name, t in found.items() if isinstance(t, Tensor)}


def is_there(optimizer):
    """Return True if all parameters, their gradients and their state are on the device."""
    tensors = [t for group in optimizer.param_groups for t in group["params"]]
    kept = [t for state in optimizer.state.values() for name, t in state.items() if "step" not in name]
    return all(t is None or t.device == DEVICE for t in (*tensors, *(t.grad for t in tensors), *kept))
