"""Listings of a home's machines from its providers, cached briefly."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select

from perilune.control.machines.providers import Providers
from perilune.control.record.clock import Instant
from perilune.control.record.home import Home
from perilune.control.record.identity import cluster_names
from perilune.control.record.store import Machine, Store
from perilune.control.record.transitions import MachineState
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import RentedMachine, Sighting, cluster_tag
from perilune.execution.verdict import describe_error

LISTING_TTL_S = 0.5  # age up to which a listing is reused


@dataclass(frozen=True, slots=True)
class Listing:
    """This home's machines by key, as one provider listed them; None and the reason if it did not answer."""

    time: Instant
    machines: Mapping[str, RentedMachine] | None
    why: str = ""

    def sighting(self, key: str) -> Sighting:
        if self.machines is None:
            return Sighting(Presence.UNKNOWN, why=self.why)
        return Sighting.of(self.machines.get(key))


class Listings:
    """The latest listing of each provider."""

    def __init__(self, home: Home, store: Store, providers: Providers) -> None:
        self.home, self.store, self.providers = home, store, providers
        self._lock = threading.Lock()
        self._listings: dict[str, Listing] = {}
        self._seen: dict[str, RentedMachine] = {}

    def get(self, provider: str, *, fresh: bool = False) -> Listing:
        """Return the listing of a provider, at most `LISTING_TTL_S` old."""
        with self._lock:  # one thread asks, and the others wait and reuse its answer
            now = Instant.now()
            known = self._listings.get(provider)
            if known is None or fresh or now.since(known.time) >= LISTING_TTL_S:
                try:
                    asked = self.providers.get(provider)
                    machines = [machine for tag in self._tags(provider) for machine in asked.list(tag)]
                    known = Listing(now, {machine.key: machine for machine in machines})
                    self._seen.update(known.machines or {})
                except Exception as error:
                    known = Listing(now, None, describe_error(error))
                self._listings[provider] = known
            return known

    def _tags(self, provider: str) -> list[str]:
        """Return the tags of the home and of recorded machines, because the home's name may be lost."""
        alive = select(Machine.key).where(
            Machine.provider == provider, Machine.state != MachineState.GONE.value
        )
        return [cluster_tag(name) for name in cluster_names(self.home, self.store.read(alive))]

    def last_seen(self, provider: str, key: str) -> RentedMachine | None:
        """Return a machine as its provider last listed it to this process; None if it never did."""
        self.get(provider)
        return self._seen.get(key)

    def forget(self, provider: str) -> None:
        """Discard a provider's listing, because something has changed there."""
        self._listings.pop(provider, None)
