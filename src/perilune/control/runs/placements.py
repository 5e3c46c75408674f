"""The placement of each run: that of its recorded template, or this machine."""

from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.rented import RentedPlacement
from perilune.control.record.home import Home
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.templates import LocalTarget, RentedTarget, SshTarget, Template, recorded_template
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
        policy: for runs that were submitted without a template.
    """

    def __init__(self, home: Home, fleet: Fleet, policy: RetryPolicy) -> None:
        self.home, self.fleet, self.policy = home, fleet, policy
        self.local = LocalPlacement()
        self._templates: dict[str, Template | None] = {}
        self._ssh_placements: dict[str, Placement] = {}

    def get(self, run_id: str) -> Placement:
        template = self._template(run_id)
        return self.local if template is None else self.build(template)

    def capabilities(self, run_id: str) -> Capabilities:
        """Return the capabilities of a run's placement; this machine's if its template is unreadable."""
        try:
            return self.get(run_id).capabilities
        except PeriluneError:
            return self.local.capabilities

    def build(self, template: Template) -> Placement:
        container = template.container
        match template.placement:
            case LocalTarget() if container is None:
                return self.local
            case LocalTarget() as here:
                own = Site(workspace=str(self.home.root / "containers"))
                return RemotePlacement(
                    LocalHost(), here.site or own, template.limits, container, bring=template.effective_bring
                )
            case SshTarget() as there:
                key = template.model_dump_json(include={"placement", "launcher", "limits", "bring"})
                if key not in self._ssh_placements:
                    host = SshHost(there, self.home.root / "ssh")
                    self._ssh_placements[key] = RemotePlacement(
                        host, there.site, template.limits, container, bring=template.effective_bring
                    )
                return self._ssh_placements[key]
            case RentedTarget() as rental:
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
                        bring=template.effective_bring,
                        lasting=lasting,
                    ),
                    process.NAME if container is None else container.name,
                )

    def retry_policy(self, run_id: str) -> RetryPolicy:
        template = self.readable_template(run_id)
        return self.policy if template is None else template.retry_policy()

    def bring_setting(self, run_id: str) -> Bring:
        """Return which checkpoints of a run are fetched from another machine."""
        template = self.readable_template(run_id)
        return template.effective_bring if template is not None and template.is_remote else "all"

    def readable_template(self, run_id: str) -> Template | None:
        """Return the template of a run; None also if it is damaged, for which `get` raises."""
        try:
            return self._template(run_id)
        except PeriluneError:
            return None

    def _template(self, run_id: str) -> Template | None:
        if run_id not in self._templates:
            self._templates[run_id] = recorded_template(self.home, run_id)
        return self._templates[run_id]
