"""Which cases of a test run without ``--slow``, and which with it only.

Of a test in ``FOLDERS`` with a ``row``, one row of each kind of method runs, and each combination of its other
parameters with one of these rows. In ``THINNED``, where nearly all that is tested is code of the base class, it is
every third of these rows; which third depends on the test, so that each kind runs in a third of the tests.
``@pytest.mark.every_row`` keeps all rows, because a row has its own truth there;
``@pytest.mark.usually("a", "b")`` keeps the cases of these ids, or with a parameter of one of these names.
``@pytest.mark.few(n)`` keeps n cases, evenly spread, where all share their code. The markers and ``FOLDERS`` decide
alone: a test needs no other way to be short. Of the doctests, those of ``MAIN`` run, but for ``LONG``.
"""

from collections import Counter, defaultdict
from zlib import crc32

from bilevel_optim.optimizer.declaration import methods

FOLDERS = ("compiled", "faults", "generic")
THINNED = ("faults", "generic")
# A method of each kind: what the others of its kind share with it is most of their code.
MAIN = (
    *("AID", "ITD", "F2SA", "BOME", "PZOBO", "SOBA", "StocBiO", "RSVRB", "RAHGD", "RAGDA", "MAML", "RTMLMC"),
    "FirstOrder",
)
# What takes more than a second in its example.
LONG = ("BOME", "RSVRB", "RTMLMC", "suggest")


def is_slow(item):
    """Return True for a test that is marked so; ``item.keywords`` also holds the names of the folders around it."""
    return item.get_closest_marker("slow") is not None


def left_out(items):
    """Return the items that run with ``--slow`` only, besides those that are marked so."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not is_slow(item):
            cases[item.path, item.originalname].append(item)
    kept = {id(case) for own in cases.values() for case in _kept(own)}
    return [case for own in cases.values() for case in own if id(case) not in kept] + [*filter(_is_long, items)]


def _is_long(item):
    """Return whether an item is an example of ``LONG``, or of a method not in ``MAIN``; many make a thousand steps."""
    module, _, name = item.name.rpartition(".")
    if not module.startswith("bilevel_optim."):
        return False
    return name in LONG or (module.startswith("bilevel_optim.methods.") and name in methods() and name not in MAIN)


def _kept(cases):
    """Return the cases of a test that run usually."""
    names = {name for mark in cases[0].iter_markers("usually") for name in mark.args}
    if names:
        return [case for case in cases if names & {case.callspec.id, *map(_name, case.callspec.params.values())}]
    few = cases[0].get_closest_marker("few")
    if few:
        (most,) = few.args
        return [cases[i * len(cases) // most] for i in range(most)] if len(cases) > most else cases
    if "row" not in cases[0].callspec.params or cases[0].path.parent.name not in FOLDERS:
        return cases
    if cases[0].get_closest_marker("every_row"):
        return cases
    rows = main_rows([case.callspec.params["row"] for case in cases])
    if cases[0].path.parent.name in THINNED:
        rows = rows[crc32(cases[0].originalname.encode()) % 3 :: 3] or rows
    by_row, by_others, used, kept = defaultdict(list), defaultdict(list), Counter(), []
    for case in cases:
        row = case.callspec.params["row"].name
        if row in rows:
            by_row[row].append(case)
            by_others[_others(case)].append(case)
    for own in by_others.values():
        kept.append(min(own, key=lambda case: used[case.callspec.params["row"].name]))
        used[kept[-1].callspec.params["row"].name] += 1
    for row, own in by_row.items():
        if not used[row]:
            kept.append(min(own, key=lambda case: used[_others(case)]))
            used[_others(kept[-1])] += 1
    return kept


def main_rows(rows):
    """Return the names of the main methods, and of the first row of each family that has none of them, in order."""
    found = {row.name: row for row in rows if row.name in MAIN}
    families = {row.declared.family for row in found.values()}
    for row in rows:
        if row.declared.family not in families:
            families.add(row.declared.family)
            found[row.name] = row
    return sorted(found, key=lambda name: found[name].declared.family)


def _others(case):
    return tuple([f"{name}={_name(value)}" for name, value in sorted(case.callspec.params.items()) if name != "row"])


def _name(value):
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
