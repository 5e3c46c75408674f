// The line at the top: health of the experiment, cause, remedy and progress.
const GRAVITY = ["broken", "watch", "healthy"];

const since = finding => (finding.since === null ? "" : `, since step ${Format.integer(finding.since)}`);

const findings = health =>
  health.findings.map(finding => html`<li>
    <b>${Format.capital(finding.name)}</b>
    <span class="muted">stage ${health.stage}${since(finding)}</span>
    <span class="why">${Format.capital(finding.why)}.</span>
    <span class="remedy">${Format.capital(finding.remedy)}.</span>
  </li>`);

function calm(healths) {
  const { steps, stage } = last(healths);
  const done = steps ? `${Format.integer(steps)} ${steps === 1 ? "step" : "steps"} of ` : "";
  return `No alarm in ${done}stage ${stage}${healths.length > 1 ? ", nor in earlier stages" : ""}.`;
}

// The verdicts on all stages; hidden if no stage trained.
function Panel() {
  useUpdates("status");
  const healths = Data.health;
  const statuses = healths.map(one => one.status);
  const worst = GRAVITY.find(one => statuses.includes(one));
  if (!worst) return html`<div id="verdict" hidden />`;
  const troubled = healths.filter(one => one.findings.length);
  return html`<div class="verdict ${worst}" id="verdict" role="status" aria-label="Health">
    <strong>${Format.capital(worst)}</strong>
    ${troubled.length ? html`<ul>${troubled.map(findings)}</ul>` : html`<p>${calm(healths)}</p>`}
  </div>`;
}

const PARTS = ["sampling", "scoring", "learning", "other", "evaluation"];
const RECENT = 30; // steps from which the remaining time is estimated

// Seconds that the rest of a stage takes at the speed of its latest steps; null if unknown.
function left(one) {
  const timings = Data.training.find(found => found.stage === one.stage)?.timings;
  const count = Math.min(RECENT, timings?.step?.length || 0);
  const isBroken = Data.health.some(({ stage, status }) => stage === one.stage && status === "broken");
  if (!count || isBroken || one.unit !== "steps") return null;
  const spent = sum(PARTS.map(part => sum((timings[part] || []).slice(-count))));
  return (spent / count) * (one.total - one.done);
}

function bar(one) {
  const rest = left(one);
  const share = 100 * (one.total ? Math.min(1, one.done / one.total) : 0);
  const figures = Object.entries(one.figures || {}).map(([name, value]) => `${spaced(name)} ${Format.number(value, 3)}`);
  const done = `${Format.integer(one.done)} of ${Format.integer(one.total)} ${one.unit}`;
  return html`<div class="progress">
    <b>${one.stage}</b>
    <span class="track" role="progressbar" aria-label=${one.stage} aria-valuenow=${Math.round(share)}>
      <i style=${{ "--share": `${share}%` }} />
    </span>
    <span>${done}${rest !== null && `, ${Format.seconds(rest)} left`}</span>
    <span class="muted">${figures.join(" · ")}</span>
  </div>`;
}

function Progress() {
  useUpdates("status");
  return html`<div id="progress" hidden=${!Data.progress?.length}>${Data.progress?.map(bar)}</div>`;
}

globalThis.Verdict = { Panel, Progress };
