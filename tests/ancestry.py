"""Which collectives a collective depends on: what a schedule promises, and what a traced program holds."""


def expected_ancestors(launches, k):
    """Launches that ``k`` waits for, directly or through others, as far as there is anything to wait for.

    A bucket without elements passes on what it waited for; nothing can wait for itself.
    """

    def behind(k):
        return {
            i
            for j in launches[k].after
            for i in behind(j) | ({j} if launches[j].bucket.nbytes else set())
        }

    return behind(k) if launches[k].bucket.nbytes else set()


def ancestry(jaxpr):
    """For each equation: its primitive, and the psums ("psum", number) and inputs ("in", id) it depends on."""
    known = {v: frozenset({("in", id(v))}) for v in jaxpr.invars}
    count = 0
    for eqn in jaxpr.eqns:
        reads = [known.get(v, frozenset()) for v in eqn.invars if not hasattr(v, "val")]
        waits = frozenset().union(*reads)
        yield eqn.primitive.name, waits
        if eqn.primitive.name == "psum":
            waits = waits | {("psum", count)}
            count += 1
        known.update(dict.fromkeys(eqn.outvars, waits))
