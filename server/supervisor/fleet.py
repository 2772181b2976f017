"""Fleet: the desired set of processes, and the next action to reach it. Pure: time and events are arguments.

Created by `supervisor.py`, which carries out the actions. A generation is one engine and its front ends; there are two
while all processes are being replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.server.workers.backoff import Backoff

ENGINE = "engine"
FRONT = "front"
STARTING, LISTENING, READY, DRAINING = "starting", "listening", "ready", "draining"
ENGINE_WAIT_S = 1.0
"""How soon an engine that received a signal to end does so without its front ends. By then the supervisor has received
the signal too, if it was sent to all processes at once, as systemd does."""
_ORDER = {STARTING: 0, LISTENING: 1, READY: 2, DRAINING: 3}


@dataclass(slots=True)
class Member:
    """One process: its number, which is never reused, its role, and its index among the processes of that role."""

    number: int
    role: str
    index: int
    generation: int
    state: str = STARTING
    signaled: bool = False
    """Whether a signal has asked it to end: it then drains, and its end is not a failure."""

    @property
    def name(self) -> str:
        """The name shown in logs and by `ps`."""
        return self.role if self.role == ENGINE else f"{FRONT}-{self.index}"


@dataclass(slots=True)
class FleetActions:
    """The actions to carry out, in order: each is a method of the supervisor."""

    start: Callable[[Member, bool], None]
    """Start a process; False: it must not listen before it is ready."""
    pair: Callable[[Member, Member], None]
    """Connect a front end and an engine by a socket."""
    drain: Callable[[Member], None]
    kill: Callable[[Member], None]
    flush: Callable[[Member], None]
    """Have an engine hold no batch open: its front ends are about to end, and wait for the requests in it."""


@dataclass(slots=True)
class _PendingStart:
    """A process that is to be started again."""

    due_s: float
    role: str
    index: int
    generation: int


@dataclass(slots=True)
class Fleet:
    """The processes of one server: `fronts` front ends and an engine.

    Invariants: each index of the serving generation has one process, or a start that is due. A process that ends is
    restarted at once, and with growing delays while it keeps ending. An engine is drained when its front ends have
    gone. After `drain`, nothing is started.
    """

    fronts: int
    actions: FleetActions
    members: dict[int, Member] = field(default_factory=dict)
    generation: int = 0
    """The generation that serves."""
    next_generation: int | None = None
    """The generation that will replace it, while all processes are being replaced."""
    draining: bool = False
    restarts: dict[str, int] = field(default_factory=lambda: {ENGINE: 0, FRONT: 0})
    _last_number: int = 0
    _last_generation: int = 0
    _pending_starts: list[_PendingStart] = field(default_factory=list)
    _reconnected: set[int] = field(default_factory=set)
    _to_reconnect: set[int] = field(default_factory=set)
    _engine_drains_s: dict[int, float] = field(default_factory=dict)
    """Engines that a signal has asked to end, with the time until which they wait for their front ends."""
    _backoffs: dict[tuple[str, int], Backoff] = field(default_factory=dict)

    # -- queries -----------------------------------------------------------------------------------------------

    def members_of(self, generation: int, role: str) -> list[Member]:
        """Return the processes of a role in a generation."""
        return [member for member in self.members.values() if member.generation == generation and member.role == role]

    def has_reached(self, state: str, generation: int | None = None) -> bool:
        """Whether every process of a generation, by default the serving one, has reached a state."""
        number = self.generation if generation is None else generation
        engines, fronts = self.members_of(number, ENGINE), self.members_of(number, FRONT)
        reached = [_ORDER[member.state] >= _ORDER[state] and member.state != DRAINING for member in (*engines, *fronts)]
        return len(engines) == 1 and len(fronts) == self.fronts and all(reached)

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything; front ends listen at once, so probes are answered."""
        self._start(ENGINE, 0, self.generation)
        for index in range(self.fronts):
            self._start(FRONT, index, self.generation, early=True)

    def on_state(self, number: int, state: str, now_s: float) -> None:
        """Record a state that a process reports."""
        member = self.members.get(number)
        if member is None or _ORDER[state] <= _ORDER[member.state]:
            return
        member.state = state
        if state == READY:
            self._backoff(member).record_serving(now_s)
            self._advance_replacement()

    def on_exit(self, number: int, now_s: float) -> None:
        """Handle the end of a process."""
        member = self.members.pop(number, None)
        if member is None:
            return
        if self.draining or member.state == DRAINING:
            self._drain_engines()
        elif member.generation == self.next_generation and member.role == ENGINE:
            self._abort_replacement()
        elif member.generation in {self.generation, self.next_generation}:
            backoff = self._backoff(member)
            delay_s = backoff.next_delay_s(now_s)
            if member.signaled:
                backoff.reset()
                delay_s = 0.0
            self._pending_starts.append(_PendingStart(now_s + delay_s, member.role, member.index, member.generation))
            self.tick(now_s)

    def on_signal(self, number: int, now_s: float) -> None:
        """Record that a process received a signal to end from outside."""
        member = self.members.get(number)
        if member is not None:
            member.signaled = True
            if member.role == ENGINE:
                self._engine_drains_s[number] = now_s + ENGINE_WAIT_S

    def tick(self, now_s: float) -> None:
        """Start what is due, drain engines that have waited long enough, and reconnect front ends that had to wait."""
        due = [start for start in self._pending_starts if start.due_s <= now_s]
        self._pending_starts = [start for start in self._pending_starts if start.due_s > now_s]
        for start in due:
            self.restarts[start.role] += 1
            self._start(start.role, start.index, start.generation)
        for number in [number for number, due_s in self._engine_drains_s.items() if due_s <= now_s]:
            del self._engine_drains_s[number]
            member = self.members.get(number)
            if (
                member is not None
                and not self.draining
                and member.generation in {self.generation, self.next_generation}
            ):
                self.actions.drain(member)
        waiting, self._to_reconnect = self._to_reconnect, set()
        self._reconnected.clear()
        for number in sorted(waiting):
            self.on_disconnect(number)

    def on_disconnect(self, number: int) -> None:
        """Handle a front end's loss of its engine; if that engine lives, reconnect them.

        The first time at once, but only once per `tick`: an engine that is ending drops each new connection.
        """
        member = self.members.get(number)
        if member is None or member.role != FRONT or member.state == DRAINING:
            return
        if number in self._reconnected:
            self._to_reconnect.add(number)
        else:
            self._pair([member], self.members_of(member.generation, ENGINE))
            self._reconnected.add(number)

    def replace(self) -> bool:
        """Replace every process; False if that is already in progress, or everything is draining.

        The new engine loads beside the old one, then front ends join it, then the old front ends finish, then the old
        engine does. If the new engine ends before that, nothing changes.
        """
        if self.next_generation is not None or self.draining:
            return False
        self._last_generation += 1
        self.next_generation = self._last_generation
        self._start(ENGINE, 0, self.next_generation)
        return True

    def drain(self) -> None:
        """End everything in order."""
        self.draining = True
        self._pending_starts.clear()
        for member in list(self.members.values()):
            if member.role == FRONT:
                self._drain(member)
        self._drain_engines()

    # -- consequences ------------------------------------------------------------------------------------------

    def _start(self, role: str, index: int, generation: int, *, early: bool = False) -> None:
        self._last_number += 1
        member = self.members[self._last_number] = Member(self._last_number, role, index, generation)
        self.actions.start(member, early)
        fronts = [member] if role == FRONT else self.members_of(generation, FRONT)
        self._pair(fronts, [member] if role == ENGINE else self.members_of(generation, ENGINE))

    def _pair(self, fronts: list[Member], engines: list[Member]) -> None:
        for front in fronts:
            for engine in engines:
                self._to_reconnect.discard(front.number)
                self.actions.pair(front, engine)

    def _advance_replacement(self) -> None:
        next_generation = self.next_generation
        if next_generation is None or self.draining:
            return
        if self.has_reached(READY, next_generation):
            self._switch_generation(next_generation)
        elif not self._has_fronts(next_generation) and self.members_of(next_generation, ENGINE)[0].state == READY:
            for index in range(self.fronts):
                self._start(FRONT, index, next_generation)

    def _has_fronts(self, generation: int) -> bool:
        due = any(start.generation == generation and start.role == FRONT for start in self._pending_starts)
        return due or bool(self.members_of(generation, FRONT))

    def _switch_generation(self, generation: int) -> None:
        self.generation, self.next_generation = generation, None
        self._drain_other_generations()

    def _abort_replacement(self) -> None:
        """Keep the old generation: the new engine has ended, but its front ends may have accepted connections."""
        self.next_generation = None
        self._drain_other_generations()

    def _drain_other_generations(self) -> None:
        self._pending_starts = [start for start in self._pending_starts if start.generation == self.generation]
        for member in list(self.members.values()):
            if member.generation != self.generation and member.role == FRONT:
                self._drain(member)
        self._drain_engines()

    def _drain_engines(self) -> None:
        for member in list(self.members.values()):
            needed = not self.draining and member.generation in {self.generation, self.next_generation}
            if member.role == ENGINE and not needed:
                (self.actions.flush if self.members_of(member.generation, FRONT) else self._drain)(member)

    def _drain(self, member: Member) -> None:
        if member.state == DRAINING:
            return
        is_listening = member.state != STARTING
        member.state = DRAINING
        (self.actions.drain if is_listening else self.actions.kill)(member)

    def _backoff(self, member: Member) -> Backoff:
        return self._backoffs.setdefault((member.role, member.index), Backoff())
