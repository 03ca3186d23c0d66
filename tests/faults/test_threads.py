"""Threads share what Python and torch keep for the process."""

import threading
import time
import warnings

import pytest
import torch
from torch import nn

import bilevel_optim as bo


@pytest.mark.parametrize("method", ["SOBA", "F2SA"])
def test_warnings_are_filtered_as_before(method):
    """Steps that overlap leave the filters of the process as they were."""

    def steps(wait):
        time.sleep(wait)
        net, x = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
        given = {"lower_steps": 1} if method == "F2SA" else {}
        optimizer = getattr(bo, method)([x], list(net.parameters()), lr=0.1, lower_lr=0.1, **given)

        def lower():
            time.sleep(0.01)
            return net(torch.ones(3, 2)).square().mean() + x.exp().sum() * net.weight.square().sum()

        for _ in range(2):
            optimizer.step(lambda: net(torch.ones(1, 2)).sum(), lower)

    steps(0)  # what is filtered for good
    before = [*warnings.filters]
    threads = [threading.Thread(target=steps, args=(0.003 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
