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
STARTING, ANSWERS, READY, DRAINING = "starting", "answers", "ready", "draining"
ALONE_S = 1.0
"""How soon an engine that received a signal to end does so without its front ends. By then the supervisor has received
the signal too, if it was sent to all processes at once, as systemd does."""
_ORDER = {STARTING: 0, ANSWERS: 1, READY: 2, DRAINING: 3}


@dataclass(slots=True)
class Member:
    """One process: its number, which is never reused, its role, and its place among the processes of that role."""

    number: int
    role: str
    place: int
    generation: int
    state: str = STARTING
    asked: bool = False
    """Whether a signal has asked it to end: it then drains, and its end is not a failure."""

    @property
    def name(self) -> str:
        """The name shown in logs and by `ps`."""
        return self.role if self.role == ENGINE else f"{FRONT}-{self.place}"


@dataclass(slots=True)
class FleetActions:
    """The actions to carry out, in order: each is a method of the supervisor."""

    start: Callable[[Member, bool], None]
    """Start a process; False: it must not listen before it is ready."""
    pair: Callable[[Member, Member], None]
    """Connect a front end and an engine by a socket."""
    drain: Callable[[Member], None]
    kill: Callable[[Member], None]
    hurry: Callable[[Member], None]
    """Have an engine hold no batch open: its front ends are about to end, and wait for the requests in it."""


@dataclass(slots=True)
class _Due:
    """A process that is to be started again."""

    at_s: float
    role: str
    place: int
    generation: int


@dataclass(slots=True)
class Fleet:
    """The processes of one server: `fronts` front ends and an engine.

    Invariants: each place of the serving generation has one process, or a start that is due. A process that ends is
    restarted at once, and with growing delays while it keeps ending. An engine is drained when its front ends have
    gone. After `drain`, nothing is started.
    """

    fronts: int
    asked: FleetActions
    members: dict[int, Member] = field(default_factory=dict)
    generation: int = 0
    """The generation that serves."""
    following: int | None = None
    """The generation that will replace it, while all processes are being replaced."""
    draining: bool = False
    restarts: dict[str, int] = field(default_factory=lambda: {ENGINE: 0, FRONT: 0})
    _last: int = 0
    _newest: int = 0
    _due: list[_Due] = field(default_factory=list)
    _rejoined: set[int] = field(default_factory=set)
    _unlinked: set[int] = field(default_factory=set)
    _alone: dict[int, float] = field(default_factory=dict)
    """Engines that a signal has asked to end, with the time until which they wait for their front ends."""
    _backoffs: dict[tuple[str, int], Backoff] = field(default_factory=dict)

    # -- queries -----------------------------------------------------------------------------------------------

    def of(self, generation: int, role: str) -> list[Member]:
        """Return the processes of a role in a generation."""
        return [each for each in self.members.values() if each.generation == generation and each.role == role]

    def reached(self, state: str, generation: int | None = None) -> bool:
        """Whether every process of a generation, by default the serving one, has reached a state."""
        number = self.generation if generation is None else generation
        engines, fronts = self.of(number, ENGINE), self.of(number, FRONT)
        far = [_ORDER[each.state] >= _ORDER[state] and each.state != DRAINING for each in (*engines, *fronts)]
        return len(engines) == 1 and len(fronts) == self.fronts and all(far)

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything; front ends listen at once, so probes are answered."""
        self._start(ENGINE, 0, self.generation)
        for place in range(self.fronts):
            self._start(FRONT, place, self.generation, early=True)

    def said(self, number: int, state: str, now_s: float) -> None:
        """Record a state that a process reports."""
        member = self.members.get(number)
        if member is None or _ORDER[state] <= _ORDER[member.state]:
            return
        member.state = state
        if state == READY:
            self._backoff(member).record_serving(now_s)
            self._go_on()

    def ended(self, number: int, now_s: float) -> None:
        """Handle the end of a process."""
        member = self.members.pop(number, None)
        if member is None:
            return
        if self.draining or member.state == DRAINING:
            self._drain_engines()
        elif member.generation == self.following and member.role == ENGINE:
            self._give_up()
        elif member.generation in {self.generation, self.following}:
            backoff = self._backoff(member)
            after_s = backoff.next_delay_s(now_s)
            if member.asked:
                backoff.reset()
                after_s = 0.0
            self._due.append(_Due(now_s + after_s, member.role, member.place, member.generation))
            self.tick(now_s)

    def asked_to_end(self, number: int, now_s: float) -> None:
        """Record that a process received a signal to end from outside."""
        member = self.members.get(number)
        if member is not None:
            member.asked = True
            if member.role == ENGINE:
                self._alone[number] = now_s + ALONE_S

    def tick(self, now_s: float) -> None:
        """Start what is due, drain engines that have waited long enough, and reconnect front ends that had to wait."""
        due = [each for each in self._due if each.at_s <= now_s]
        self._due = [each for each in self._due if each.at_s > now_s]
        for each in due:
            self.restarts[each.role] += 1
            self._start(each.role, each.place, each.generation)
        for number in [number for number, at_s in self._alone.items() if at_s <= now_s]:
            del self._alone[number]
            member = self.members.get(number)
            if member is not None and not self.draining and member.generation in {self.generation, self.following}:
                self.asked.drain(member)
        waiting, self._unlinked = self._unlinked, set()
        self._rejoined.clear()
        for number in sorted(waiting):
            self.unlinked(number)

    def unlinked(self, number: int) -> None:
        """Handle a front end's loss of its engine; if that engine lives, reconnect them.

        The first time at once, but only once per `tick`: an engine that is ending drops each new connection.
        """
        member = self.members.get(number)
        if member is None or member.role != FRONT or member.state == DRAINING:
            return
        if number in self._rejoined:
            self._unlinked.add(number)
        else:
            self._pair([member], self.of(member.generation, ENGINE))
            self._rejoined.add(number)

    def replace(self) -> bool:
        """Replace every process; False if that is already in progress, or everything is draining.

        The new engine loads beside the old one, then front ends join it, then the old front ends finish, then the old
        engine does. If the new engine ends before that, nothing changes.
        """
        if self.following is not None or self.draining:
            return False
        self._newest += 1
        self.following = self._newest
        self._start(ENGINE, 0, self.following)
        return True

    def drain(self) -> None:
        """End everything in order."""
        self.draining = True
        self._due.clear()
        for member in list(self.members.values()):
            if member.role == FRONT:
                self._drain(member)
        self._drain_engines()

    # -- consequences ------------------------------------------------------------------------------------------

    def _start(self, role: str, place: int, generation: int, *, early: bool = False) -> None:
        self._last += 1
        member = self.members[self._last] = Member(self._last, role, place, generation)
        self.asked.start(member, early)
        fronts = [member] if role == FRONT else self.of(generation, FRONT)
        self._pair(fronts, [member] if role == ENGINE else self.of(generation, ENGINE))

    def _pair(self, fronts: list[Member], engines: list[Member]) -> None:
        for front in fronts:
            for engine in engines:
                self._unlinked.discard(front.number)
                self.asked.pair(front, engine)

    def _go_on(self) -> None:
        following = self.following
        if following is None or self.draining:
            return
        if self.reached(READY, following):
            self._change_over(following)
        elif not self._fronts_begun(following) and self.of(following, ENGINE)[0].state == READY:
            for place in range(self.fronts):
                self._start(FRONT, place, following)

    def _fronts_begun(self, generation: int) -> bool:
        due = any(each.generation == generation and each.role == FRONT for each in self._due)
        return due or bool(self.of(generation, FRONT))

    def _change_over(self, following: int) -> None:
        self.generation, self.following = following, None
        self._end_others()

    def _give_up(self) -> None:
        """Keep the old generation: the new engine has ended, but its front ends may have accepted connections."""
        self.following = None
        self._end_others()

    def _end_others(self) -> None:
        self._due = [each for each in self._due if each.generation == self.generation]
        for member in list(self.members.values()):
            if member.generation != self.generation and member.role == FRONT:
                self._drain(member)
        self._drain_engines()

    def _drain_engines(self) -> None:
        for member in list(self.members.values()):
            needed = not self.draining and member.generation in {self.generation, self.following}
            if member.role == ENGINE and not needed:
                (self.asked.hurry if self.of(member.generation, FRONT) else self._drain)(member)

    def _drain(self, member: Member) -> None:
        if member.state == DRAINING:
            return
        begun = member.state != STARTING
        member.state = DRAINING
        (self.asked.drain if begun else self.asked.kill)(member)

    def _backoff(self, member: Member) -> Backoff:
        return self._backoffs.setdefault((member.role, member.place), Backoff())
