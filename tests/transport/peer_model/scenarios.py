"""Uses of a transport, small enough for every order."""

from __future__ import annotations

from tests.transport.peer_model.machine import Machine
from tests.transport.peer_model.scripts import Model, Protocol, Sent


def ring(protocol: Protocol, world: int, hops: int, passes: int = 1) -> Machine:
    """Each rank's block goes round through two slots, as a ring's executor lets it; a drain ends each pass."""
    model = Model(world, 2, protocol)
    for me in model.scripts:
        after, before = (me.rank + 1) % world, (me.rank - 1) % world
        bound = [me.bind([Sent(after, h % 2)], [Sent(before, (h + 1) % 2)]) for h in range(hops)]
        for n in range(passes):
            tags = [n * world + (me.rank - h) % world + 1 for h in range(hops + 1)]
            me.kernel("pack", writes=[(0, tags[0])])
            for h in range(hops):
                started = me.start(bound[h])
                me.kernel(f"attend {h}", reads=[(h % 2, tags[h])])
                me.wait(started)
            me.kernel(f"attend {hops}", reads=[(hops % 2, tags[hops])])
            if n < passes - 1:
                me.drain()
        me.close()
    return model.machine()


def star(protocol: Protocol, world: int) -> Machine:
    """Rank 0 sends to each other rank, then they answer: pairs with unequal numbers."""
    model = Model(world, world, protocol)
    root, others = model.scripts[0], model.scripts[1:]
    root.kernel("pack", writes=[(0, 1)])
    waits = [root.start(root.bind([Sent(me.rank, 0)], [])) for me in others]
    waits += [root.start(root.bind([], [Sent(me.rank, me.rank)])) for me in others]
    for each in waits:
        root.wait(each)
    root.kernel("attend", reads=[(me.rank, me.rank + 1) for me in others])
    for me in others:
        me.wait(me.start(me.bind([], [Sent(0, 0)])))
        me.kernel("attend", reads=[(0, 1)], writes=[(1, me.rank + 1)])
        me.wait(me.start(me.bind([Sent(0, 1)], [])))
    for me in model.scripts:
        me.close()
    return model.machine()


def two_messages(protocol: Protocol) -> Machine:
    """Two messages of a pair in one exchange, both ways, twice."""
    model = Model(2, 4, protocol)
    for me in model.scripts:
        peer = 1 - me.rank
        bound = me.bind([Sent(peer, 0), Sent(peer, 1)], [Sent(peer, 2), Sent(peer, 3)])
        for n in (1, 2):
            mine, theirs = 100 * n + 10 * me.rank, 100 * n + 10 * peer
            me.kernel("pack", writes=[(0, mine), (1, mine + 1)])
            me.wait(me.start(bound))
            me.kernel("attend", reads=[(2, theirs), (3, theirs + 1)])
        me.close()
    return model.machine()


def ahead(protocol: Protocol) -> Machine:
    """Two exchanges are started before either is waited for."""
    model = Model(2, 4, protocol)
    for me in model.scripts:
        peer = 1 - me.rank
        me.kernel("pack", writes=[(0, 10 + me.rank), (1, 20 + me.rank)])
        started = [me.start(me.bind([Sent(peer, n)], [Sent(peer, 2 + n)])) for n in (0, 1)]
        for n, each in enumerate(started):
            me.wait(each)
            me.kernel(f"attend {n}", reads=[(2 + n, 10 * (n + 1) + peer)])
        me.close()
    return model.machine()


def other_order(protocol: Protocol) -> Machine:
    """Rank 1 binds two receives and starts the second one first."""
    model = Model(2, 2, protocol)
    root, me = model.scripts
    root.kernel("pack", writes=[(0, 1), (1, 2)])
    for each in [root.start(root.bind([Sent(1, slot)], [])) for slot in (0, 1)]:
        root.wait(each)
    bound = [me.bind([], [Sent(0, slot)]) for slot in (0, 1)]
    for each in [me.start(bound[1]), me.start(bound[0])]:
        me.wait(each)
    me.kernel("attend", reads=[(1, 1), (0, 2)])
    for script in model.scripts:
        script.close()
    return model.machine()
