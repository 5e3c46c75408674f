"""The placement of each run: that of its recorded template, or this machine."""

from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.rented import RentedPlacement
from perilune.control.record.home import Home
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.templates import Here, OnRented, OverSsh, Template, recorded_template
from perilune.errors import PeriluneError
from perilune.execution.hosts.local import LocalHost
from perilune.execution.hosts.ssh import SshHost
from perilune.execution.launchers import process
from perilune.execution.placements.local import LocalPlacement
from perilune.execution.placements.mirror import Bring
from perilune.execution.placements.protocol import Capabilities, Placement
from perilune.execution.placements.remote import RemotePlacement, Site


class Placements:
    """The placements of a home's runs. Runs on the same host share a placement object and its connections.

    Args:
        fleet: the home's rented machines.
        policy: for runs that were submitted without a template.
    """

    def __init__(self, home: Home, fleet: Fleet, policy: RetryPolicy) -> None:
        self.home, self.fleet, self.policy = home, fleet, policy
        self.local = LocalPlacement()
        self._templates: dict[str, Template | None] = {}
        self._made: dict[str, Placement] = {}

    def of(self, run_id: str) -> Placement:
        """The placement of a run's attempts."""
        template = self._template(run_id)
        return self.local if template is None else self.make(template)

    def capabilities(self, run_id: str) -> Capabilities:
        """The capabilities of a run's placement; those of this machine if its template is unreadable."""
        try:
            return self.of(run_id).capabilities
        except PeriluneError:
            return self.local.capabilities

    def make(self, template: Template) -> Placement:
        """The placement of a template."""
        container = template.container
        match template.placement:
            case Here() if container is None:
                return self.local
            case Here() as here:
                own = Site(workspace=str(self.home.root / "containers"))
                return RemotePlacement(
                    LocalHost(), here.site or own, template.limits, container, bring=template.brings
                )
            case OverSsh() as there:
                key = template.model_dump_json(include={"placement", "launcher", "limits", "bring"})
                if key not in self._made:
                    host = SshHost(there, self.home.root / "ssh")
                    self._made[key] = RemotePlacement(
                        host, there.site, template.limits, container, bring=template.brings
                    )
                return self._made[key]
            case OnRented() as rental:
                longest = min(template.limits.max_lifetime, rental.lease.max_lifetime)
                limits = template.limits.model_copy(update={"max_lifetime": longest})
                return RentedPlacement(
                    self.fleet,
                    rental,
                    lambda host, variables, lasting, left: RemotePlacement(
                        host,
                        rental.site.with_environment(variables),
                        limits.model_copy(update={"max_lifetime": min(limits.max_lifetime, left)}),
                        container,
                        bring=template.brings,
                        lasting=lasting,
                    ),
                    process.NAME if container is None else container.name,
                )

    def policy_of(self, run_id: str) -> RetryPolicy:
        """The retry policy of a run."""
        template = self._readable(run_id)
        return self.policy if template is None else template.policy()

    def bring(self, run_id: str) -> Bring:
        """Which checkpoints of a run are fetched from another machine."""
        template = self._readable(run_id)
        return template.brings if template is not None and template.elsewhere else "all"

    def turn(self, run_id: str) -> tuple[int | None, int]:
        """Slots of a run's placement (None is unlimited), and the run's priority."""
        template = self._readable(run_id)
        return (None, 0) if template is None else (template.slots, template.priority)

    def place(self, run_id: str) -> Here | OverSsh | OnRented | None:
        """The placement settings that runs with shared slots have in common; None without a template."""
        template = self._readable(run_id)
        return None if template is None else template.placement

    def _readable(self, run_id: str) -> Template | None:
        """The template of a run; None also if it is damaged, for which `of` raises."""
        try:
            return self._template(run_id)
        except PeriluneError:
            return None

    def _template(self, run_id: str) -> Template | None:
        if run_id not in self._templates:
            self._templates[run_id] = recorded_template(self.home, run_id)
        return self._templates[run_id]
