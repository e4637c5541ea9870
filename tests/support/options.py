"""Options of calls on ranks by plain names, for tests that combine any of them."""

from dataclasses import fields

from cqs.distributed import JointTokens, Strategy

STRATEGY = [field.name for field in fields(Strategy)]
JOINT = [f"joint_{field.name}" for field in fields(JointTokens)]


def grouped(options):
    """Return options of a call, those of a strategy and of joint tokens in one value each."""
    rest = {name: value for name, value in options.items() if name not in STRATEGY + JOINT}
    for name, kind, names in (("strategy", Strategy, STRATEGY), ("joint", JointTokens, JOINT)):
        given = {each: options[each] for each in names if each in options}
        if given and name not in rest:
            rest[name] = kind(**{each.removeprefix("joint_"): given[each] for each in given})
    return rest
