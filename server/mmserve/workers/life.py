"""A worker's life, and when it may begin anew. Quiet: no process, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from mmserve.errors import ServeError


class State(Enum):
    STARTING = "starting"  # its process is asked for
    LOADING = "loading"  # its process is there and loads the model
    READY = "ready"
    DRAINING = "draining"  # takes no new batch
    STOPPED = "stopped"  # its process is reaped, or never came to be


class Event(Enum):
    CONNECTED = "connected"
    LOADED = "loaded"
    STOP_ASKED = "stop asked"
    EXITED = "exited"


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.STARTING, Event.CONNECTED): State.LOADING,
    (State.LOADING, Event.LOADED): State.READY,
    **{
        (state, Event.STOP_ASKED): State.DRAINING
        for state in (State.STARTING, State.LOADING, State.READY, State.DRAINING)
    },
    # A process that was told to stop may still say what it was about to.
    (State.DRAINING, Event.CONNECTED): State.DRAINING,
    (State.DRAINING, Event.LOADED): State.DRAINING,
    **{(state, Event.EXITED): State.STOPPED for state in State if state is not State.STOPPED},
}


class InvalidTransition(ServeError):
    def __init__(self, story: list[tuple[Event, State]], event: Event) -> None:
        told = ", ".join(f"{past.value} → {state.value}" for past, state in story)
        super().__init__(f"a worker cannot take {event.value!r} after: {told or 'its start'}")


class Life:
    """The state of one worker and how it came to it."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.story: list[tuple[Event, State]] = []

    def move(self, event: Event) -> State:
        """Raises InvalidTransition for an event that the table lacks."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise InvalidTransition(self.story, event)
        self.state = following
        self.story.append((event, following))
        return following

    @property
    def was_ready(self) -> bool:
        return any(event is Event.LOADED for event, _ in self.story)


#: Seconds before the n-th restart in a row, as Multi Model Server paces them, then a minute.
PAUSES_S = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
LONGEST_PAUSE_S = 60
#: A worker that lived so long, or was given work, has shown that a restart makes sense.
PROVEN_AFTER_S = 5.0


class Restarts:
    """When the successor of an ended worker may start.

    Args:
        limit: restarts in a row before it is given up; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.failures = 0

    def pause_s(self, *, was_used: bool, ready_s: float) -> float | None:
        """Seconds to wait after this end; None when the limit is reached.

        Args:
            was_used: it was given work; what that did to it may not happen again, and requests
                that do it again must not keep the others waiting.
            ready_s: seconds it was ready; 0 where it never was.
        """
        if was_used or ready_s >= PROVEN_AFTER_S:
            self.failures = 0
            return 0.0
        self.failures += 1
        if self.limit is not None and self.failures > self.limit:
            return None
        index = self.failures - 1
        return PAUSES_S[index] if index < len(PAUSES_S) else LONGEST_PAUSE_S
