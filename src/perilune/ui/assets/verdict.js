// The line at the top: health of the experiment, cause, remedy and progress.
const GRAVITY = ["broken", "watch", "healthy"];

const since = finding => (finding.since === null ? "" : `, since step ${Format.integer(finding.since)}`);

const findings = health =>
  health.findings.map(finding =>
    h(
      "li",
      h("b", Format.capital(finding.name)),
      h("span.muted", `stage ${health.stage}${since(finding)}`),
      h("span.why", `${Format.capital(finding.why)}.`),
      h("span.remedy", `${Format.capital(finding.remedy)}.`),
    ),
  );

function calm(healths) {
  const { steps, stage } = last(healths);
  const done = steps ? `${Format.integer(steps)} ${steps === 1 ? "step" : "steps"} of ` : "";
  return `No alarm in ${done}stage ${stage}${healths.length > 1 ? ", nor in earlier stages" : ""}.`;
}

// The panel of the verdicts on all stages; hidden if no stage trained.
function panel() {
  const healths = Data.health;
  const statuses = healths.map(one => one.status);
  const worst = GRAVITY.find(one => statuses.includes(one));
  if (!worst) return h("div", { id: "verdict", hidden: true });
  const told = healths.filter(one => one.findings.length);
  return h(
    `div.verdict.${worst}`,
    { id: "verdict", role: "status", "aria-label": "Health" },
    h("strong", Format.capital(worst)),
    told.length ? h("ul", told.map(findings)) : h("p", calm(healths)),
  );
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
  const meaning = { role: "progressbar", "aria-label": one.stage, ariaValueNow: String(Math.round(share)) };
  const done = `${Format.integer(one.done)} of ${Format.integer(one.total)} ${one.unit}`;
  return h(
    "div.progress",
    h("b", one.stage),
    h("span.track", meaning, h("i", { "--share": `${share}%` })),
    h("span", done, rest !== null && `, ${Format.seconds(rest)} left`),
    h("span.muted", figures.join(" · ")),
  );
}

const progress = () => h("div", { id: "progress", hidden: !Data.progress?.length }, Data.progress?.map(bar));

globalThis.Verdict = { panel, progress };
