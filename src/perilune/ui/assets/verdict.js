// The line at the top: is the experiment healthy, why not, since when, and what to do. And how far it is.
"use strict";

const Verdict = ((data) => {
  const GRAVITY = ["broken", "watch", "healthy"];
  const WORDS = { broken: "Broken", watch: "Watch", healthy: "Healthy" };
  const gravest = (healths) =>
    [...healths].sort((a, b) => GRAVITY.indexOf(a.status) - GRAVITY.indexOf(b.status))[0] || null;

  const since = (finding) => (finding.since === null ? "" : `since step ${Format.integer(finding.since)}`);

  function findings(health) {
    return health.findings.map((finding) =>
      h(
        "li",
        {},
        h("b", {}, Format.capital(finding.name)),
        h("span", { class: "muted" }, [`stage ${health.stage}`, since(finding)].filter(Boolean).join(", ")),
        h("span", { class: "why" }, `${Format.capital(finding.why)}.`),
        h("span", { class: "remedy" }, `${Format.capital(finding.remedy)}.`),
      ),
    );
  }

  function calm(healths) {
    const last = healths[healths.length - 1];
    const steps = `${Format.integer(last.steps)} ${last.steps === 1 ? "step" : "steps"}`;
    return `No alarm in ${healths.length === 1 ? `${steps} of stage ${last.stage}` : `${healths.length} stages`}.`;
  }

  // The panel of the verdicts on all stages; null if no stage trained.
  function panel(healths = data.health) {
    const worst = gravest(healths);
    if (!worst) return h("div", { id: "verdict", hidden: true });
    const told = healths.filter((one) => one.findings.length);
    return h(
      "div",
      { id: "verdict", class: `verdict ${worst.status}`, role: "status", "aria-label": "Health" },
      h("strong", {}, WORDS[worst.status]),
      told.length ? h("ul", {}, told.map(findings)) : h("p", {}, calm(healths)),
    );
  }

  const PARTS = ["sampling", "scoring", "learning", "other", "evaluation"];
  const RECENT = 30; // steps that tell how long the others will take

  // Seconds that the rest of a stage takes at the pace of its latest steps; null if that is not known.
  function left(one) {
    const training = data.training.find((found) => found.stage === one.stage);
    const count = training && training.timings.step ? Math.min(RECENT, training.timings.step.length) : 0;
    if (!count || one.unit !== "steps") return null;
    const spent = PARTS.map((part) => (training.timings[part] || []).slice(-count).reduce((sum, value) => sum + (value || 0), 0));
    return (spent.reduce((sum, value) => sum + value, 0) / count) * (one.total - one.done);
  }

  function bar(one) {
    const rest = left(one);
    const share = one.total ? Math.min(1, one.done / one.total) : 0;
    const fill = h("i", {});
    fill.style.setProperty("--share", `${100 * share}%`);
    const figures = Object.entries(one.figures || {}).map(([name, value]) => `${name} ${Format.number(value, 3)}`);
    return h(
      "div",
      { class: "progress" },
      h("b", {}, one.stage),
      h("span", { class: "track", role: "progressbar", "aria-label": one.stage, ariaValueNow: String(Math.round(100 * share)) }, fill),
      h("span", {}, `${Format.integer(one.done)} of ${Format.integer(one.total)} ${one.unit}${rest === null ? "" : `, ${Format.seconds(rest)} left`}`),
      h("span", { class: "muted" }, figures.join(" · ")),
    );
  }

  const progress = (running = []) => h("div", { id: "progress", hidden: !running.length }, running.map(bar));

  return { panel, progress, WORDS };
})(Data);
