"""`ids.py`."""

import os
import uuid

from mmserve.frontend.ids import fresh_id


def test_ids_are_random_uuids_that_never_come_again() -> None:
    ids = [fresh_id() for _ in range(3000)]
    assert len(set(ids)) == len(ids)
    for one in ids:
        parsed = uuid.UUID(one)
        assert (str(parsed), parsed.version, parsed.variant) == (one, 4, uuid.RFC_4122)


def test_a_fork_has_ids_of_its_own() -> None:
    fresh_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, "".join(fresh_id() for _ in range(50)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == 50 * 36
    assert not {fresh_id() for _ in range(50)} & {theirs[at : at + 36] for at in range(0, 1800, 36)}
