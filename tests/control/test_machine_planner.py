"""The pure function that plans a machine's lifecycle, driven through simulated clouds."""

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.control.machines.leases import Lease, compute_cost
from perilune.control.machines.planner import (
    CONFIRM_INTERVAL_S,
    CREATE_INTERVAL_S,
    Desire,
    Operation,
    RecordedMachine,
    plan_machine,
)
from perilune.control.record.clock import Instant
from perilune.control.record.transitions import MachineState, check_transition
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import MachineStatus, RentedMachine, Sighting

LEASE = Lease(max_lifetime=300.0, idle=40.0, max_cost=1.0, ready_within=60.0)
PRICE, KEY = 3600.0 / 200.0, "perilune-c-r-1-0"  # 1.0 is spent after 200 s
GRACE = 30.0  # seconds that ending may take once the provider answers again
NEXT = {
    Operation.READY: MachineState.READY,
    Operation.DRAIN: MachineState.DRAINING,
    Operation.MARK_TERMINATING: MachineState.TERMINATING,
    Operation.RECORD_GONE: MachineState.GONE,
}


def at(seconds: float, wall: float = 0.0) -> Instant:
    return Instant("boot", seconds, wall)


@dataclass
class World:
    """A cloud with at most one machine, with delays, errors, lost responses and preemptions."""

    chance: random.Random
    visibility: float
    trouble: float  # probability that a call fails, in one of several ways
    until: float  # when all trouble ends
    now: float = 0.0
    born: float | None = None
    ended: float | None = None
    told: MachineStatus = MachineStatus.RUNNING
    shown: float = 0.0
    notice: bool = False
    made: int = 0

    def alive(self) -> bool:
        return self.born is not None and self.born <= self.now and self.ended is None

    def troubled(self) -> bool:
        return self.now < self.until and self.chance.random() < self.trouble

    def create(self) -> None:
        kind = self.chance.choice(["before", "after", "late", "full"]) if self.troubled() else "fine"
        if kind in {"before", "full"} or self.born is not None:
            return
        late = self.chance.uniform(0, 20) if kind == "late" else 0.0
        self.born, self.made = self.now + late, self.made + 1
        self.shown = self.born + self.chance.uniform(0, self.visibility)

    def terminate(self) -> None:
        if self.troubled() and self.chance.random() < 0.5:
            return  # an error without effect
        if self.alive():
            self.end()

    def end(self) -> None:
        self.ended, self.shown = self.now, self.now + self.chance.uniform(0, self.visibility)

    def look(self) -> Sighting:
        if self.troubled():
            return Sighting(Presence.UNKNOWN, why="no answer")
        if self.born is None or (self.ended is None and self.now < max(self.shown, self.born)):
            return Sighting(Presence.ABSENT)
        if self.ended is not None and self.now >= self.shown:
            if self.now > self.ended + 40:
                return Sighting(Presence.ABSENT)  # forgotten
            return self.sighting(MachineStatus.ENDED)
        return self.sighting(MachineStatus.PENDING if self.now < self.born + 3 else MachineStatus.RUNNING)

    def sighting(self, status: MachineStatus) -> Sighting:
        leaves = 5.0 if self.notice else None
        return Sighting(Presence.PRESENT, RentedMachine(KEY, "m", "small", PRICE, status, 0.0, leaves))


@dataclass
class Life:
    """The control plane's record of the machine, and all operations it performed."""

    recorded: RecordedMachine
    done: list[tuple[float, Operation, str]] = field(default_factory=list)

    def reconcile(self, world: World, desire: Desire) -> None:
        now, seen = at(world.now), world.look()
        idle = self.recorded.idle_since
        idle = None if desire is Desire.HELD else idle or now
        self.recorded = replace(self.recorded, idle_since=idle)
        plan = plan_machine(desire, self.recorded, seen, now)
        if seen.presence is Presence.UNKNOWN:  # never conclude anything from silence
            assert set(plan.operations) <= {Operation.MARK_TERMINATING, Operation.TERMINATE, Operation.DRAIN}
            assert Operation.DRAIN not in plan.operations or desire is not Desire.HELD
            assert not set(plan.operations) - {Operation.DRAIN} or self.condemned(desire, now)
        for operation in plan.operations:
            self.done.append((world.now, operation, plan.reason))
            self.apply(operation, world, now)

    def condemned(self, desire: Desire, now: Instant) -> bool:
        """Whether the record alone, without an observation, calls for termination."""
        age = now.since(self.recorded.leased)
        idle = self.recorded.idle_since
        return (
            self.recorded.state is MachineState.TERMINATING
            or desire is Desire.RELEASED
            or (desire is Desire.COLLECTED and self.recorded.state is MachineState.REQUESTED)
            or age >= min(LEASE.max_lifetime, LEASE.max_cost / PRICE * 3600)
            or (idle is not None and now.since(idle) >= LEASE.idle)
            or (self.recorded.state is MachineState.REQUESTED and age >= LEASE.ready_within)
        )

    def apply(self, operation: Operation, world: World, now: Instant) -> None:
        if operation in NEXT:
            check_transition(self.recorded.state, NEXT[operation])
            self.recorded = replace(self.recorded, state=NEXT[operation])
        match operation:
            case Operation.CREATE:
                self.recorded = replace(self.recorded, asked=now)
                world.create()
            case Operation.TERMINATE:
                assert self.recorded.state is MachineState.TERMINATING  # the intent is recorded first
                world.terminate()
            case Operation.RECORD_MISSING | Operation.MARK_TERMINATING:
                missing = now if operation is Operation.RECORD_MISSING else None
                self.recorded = replace(self.recorded, missing_since=missing)
            case Operation.RECORD_FOUND:
                self.recorded = replace(self.recorded, missing_since=None)


def begun(visibility: float = 0.0) -> Life:
    state = MachineState.REQUESTED
    return Life(RecordedMachine(state, LEASE, PRICE, leased=at(0.0), visibility=visibility))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**9),
    st.floats(0, 12),
    st.floats(0, 0.9),
    st.sampled_from([10.0, 60.0, 400.0]),
    st.sampled_from([30.0, 100.0, 10_000.0]),
    st.booleans(),
)
def test_every_machine_is_terminated_within_its_maximum_cost(
    seed: int, visibility: float, trouble: float, stormy_until: float, work: float, preempted: bool
) -> None:
    chance = random.Random(seed)
    world = World(chance, visibility, trouble, stormy_until)
    life = begun(visibility)
    collected = work + chance.uniform(0, 100)
    while world.now < 1500.0:
        desire = Desire.HELD if world.now < work else Desire.COLLECTED
        life.reconcile(world, Desire.RELEASED if world.now >= collected else desire)
        world.now += chance.choice([0.5, 1.0, 5.0, 20.0])
        if preempted and world.alive() and chance.random() < 0.05:
            if world.notice:
                world.end()
            world.notice = True
    assert life.recorded.state is MachineState.GONE and not world.alive()
    assert world.made <= 1  # the key is idempotent
    if world.born is not None and world.ended is not None:
        # Failures may outlast the lease; a machine cannot be terminated while the API is down.
        latest = max(LEASE.max_cost / PRICE * 3600, stormy_until) + visibility + 20.0 + GRACE
        assert compute_cost(PRICE, world.ended - world.born) <= compute_cost(PRICE, latest)
    buried = [moment for moment, operation, _ in life.done if operation is Operation.RECORD_GONE]
    missed = [moment for moment, operation, _ in life.done if operation is Operation.RECORD_MISSING]
    assert buried[-1] - missed[-1] >= max(visibility, CONFIRM_INTERVAL_S)  # two observations, some time apart


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.floats(0, 12), st.floats(0, 0.9))
def test_needed_machine_is_not_terminated_before_its_lease_ends(
    seed: int, visibility: float, trouble: float
) -> None:
    world = World(random.Random(seed), visibility, trouble, until=1e9)
    life = begun(visibility)
    life.recorded = replace(life.recorded, lease=LEASE.model_copy(update={"ready_within": 190.0}))
    while world.now < 190.0:
        life.reconcile(world, Desire.HELD)
        world.now += world.chance.choice([0.5, 1.0, 5.0])
    assert {operation for _, operation, _ in life.done} <= {
        Operation.CREATE, Operation.READY, Operation.RECORD_MISSING, Operation.RECORD_FOUND
    }  # fmt: skip
    assert world.ended is None


def test_wall_clock_jump_changes_no_lease() -> None:
    recorded = begun().recorded
    for days in (-1, 1):
        leap = Instant("boot", 10.0, wall=days * 86400.0)
        assert leap.since(recorded.leased) == 10.0
        plan = plan_machine(Desire.HELD, recorded, Sighting(Presence.UNKNOWN), leap)
        assert plan.operations == ()
    assert Instant("next boot", 3.0, wall=250.0).since(recorded.leased) == 250.0  # by the wall clock
    assert Instant("next boot", 3.0, wall=-250.0).since(recorded.leased) == 0.0


def test_machine_seen_again_after_gone_is_terminated() -> None:
    recorded = replace(begun().recorded, state=MachineState.GONE)
    seen = World(random.Random(0), 0.0, 0.0, 0.0).sighting(MachineStatus.RUNNING)
    plan = plan_machine(Desire.RELEASED, recorded, seen, at(50.0))
    assert plan.operations == (Operation.MARK_TERMINATING, Operation.TERMINATE)
    for quiet in (Sighting(Presence.UNKNOWN), Sighting(Presence.ABSENT)):
        assert plan_machine(Desire.RELEASED, recorded, quiet, at(50.0)).operations == ()


def test_planner_repeats_create_only_after_a_delay() -> None:
    asked = replace(begun(8.0).recorded, asked=at(0.0))
    for seconds, planned in ((4.0, ()), (7.9, ()), (8.1, (Operation.CREATE,))):
        plan = plan_machine(Desire.HELD, asked, Sighting(Presence.ABSENT), at(seconds))
        assert plan.operations == planned
    quick = replace(asked, visibility=0.0)
    plan = plan_machine(Desire.HELD, quick, Sighting(Presence.ABSENT), at(CREATE_INTERVAL_S + 0.1))
    assert plan.operations == (Operation.CREATE,)


def test_refusal_ends_machine_and_silent_provider_still_gets_terminate_calls() -> None:
    refused = replace(begun().recorded, asked=at(0.0), refused=True)
    plan = plan_machine(Desire.HELD, refused, Sighting(Presence.ABSENT), at(1.0))
    assert plan.operations == (Operation.MARK_TERMINATING,)
    going = replace(begun().recorded, state=MachineState.TERMINATING)
    plan = plan_machine(Desire.HELD, going, Sighting(Presence.UNKNOWN), at(5000.0))
    assert plan.operations == (Operation.TERMINATE,)
