#!/bin/bash
# torchdata's StatefulDataLoader with shuffle=True, a generator and no workers, resumed in an epoch: the epoch ends as it
# would have, and every later epoch has another order. With a worker all epochs are as they would have been.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 torchdata==0.11.0
"$PY" -W ignore - <<'EOF'
import sys, torch
from torchdata.stateful_dataloader import StatefulDataLoader


def make(workers):
    seeded = torch.Generator().manual_seed(5)
    return StatefulDataLoader(range(12), batch_size=2, shuffle=True, generator=seeded, num_workers=workers)


def examples(batches):
    return [int(i) for batch in batches for i in batch]


def runs(workers):
    """The rest of an epoch after three batches, and two more epochs: uninterrupted, and resumed in a new loader."""
    loader = make(workers)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    uninterrupted = examples(batches), examples(loader), examples(loader)
    resumed = make(workers)
    resumed.load_state_dict(state)
    return uninterrupted, (examples(resumed), examples(resumed), examples(resumed))


truth, seen = runs(0)
print("the epoch goes on with", truth[0], "and, resumed, with", seen[0])
print("guess: both then have the epochs", truth[1], truth[2])
print("seen, resumed:", seen[1], seen[2])
one, other = runs(1)
print("with one worker the same:", one == other)
sys.exit(not (truth[0] == seen[0] and truth[1] != seen[1] and truth[2] != seen[2] and one == other))
EOF
