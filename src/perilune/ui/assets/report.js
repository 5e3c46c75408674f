// Lays out the report: head, facts, notices and provenance. The other files draw the other sections.
const { section, part, table, copyable, definitions } = Page;
const state = row => h("span", { class: `state ${row.state}` }, row.state);
const mono = (text, title) => h("span.mono", { title }, text || "–");

function hero() {
  const { experiment, headline } = Data;
  const chart = Data.climb_chart ? Charts.figure(Data.climb_chart) : Course.mainChart();
  return h(
    "div.hero",
    { id: "top" },
    h(
      "div",
      h("p.eyebrow", h("b", experiment.name), state(experiment)),
      h("h1", headline.title),
      headline.paragraphs.map(text => h("p.lead", text)),
    ),
    chart && h("div", chart),
  );
}

const facts = () =>
  h("dl.facts", Data.facts.map(([name, value, more]) => h("div", h("dt", name), h("dd", value, more && h("small", more)))));

function notices() {
  const told = Data.notices.filter(notice => !(Data.live && notice.kind === "active")); // the progress bars show it
  return told.map(({ kind, title, text, log }) =>
    h(`div.notice.${kind}`, { role: "note" }, h("b", title), text && ` ${text}`, log && h("pre", { tabindex: 0 }, log)),
  );
}

// --- provenance
const block = (title, hint, ...nodes) => h("details", h("summary", title, hint && h("span.muted", hint)), h("div", nodes));
const titled = (title, node) => [h("h3.part", title), node];

function software(source) {
  const packages = source.packages.map(([name, version]) => h("div", h("span", name), h("span.mono.muted", version)));
  const listed = packages.length > 0 && titled(`Packages (${packages.length})`, h("div.columns", packages));
  return block("Software", source.software_name, definitions(source.software), listed);
}

const ofRun = stage =>
  block(
    `Run of ${stage.name}`,
    stage.task,
    definitions(stage.facts),
    stage.summary && titled("summary.json", copyable(stage.summary)),
    stage.spec && titled("job.json", copyable(stage.spec)),
    stage.log && titled("End of the log", h("pre", { tabindex: 0 }, stage.log)),
  );

function provenance() {
  const columns = [
    ["Stage", row => [row.name, h("small", row.task)], "header"],
    ["Run", row => mono(row.run_id), "text"],
    ["State", row => [state(row), row.cause && h("small", row.cause)], "text"],
    ["Attempts", row => Format.integer(row.attempts)],
    ["Bundle digest", row => mono(row.digest?.slice(0, 16), row.digest), "text"],
    ["Time", row => Format.seconds(row.seconds)],
  ];
  const source = Data.provenance;
  const what =
    "Verification recomputes every digest; reproduction runs the frozen bundle again and compares metrics, episodes and the final checkpoint.";
  return section(
    "provenance",
    "Provenance",
    "What ran, with which code and machine, and how to reproduce it. The facts were recorded by the runs themselves.",
    table(columns, Data.stages, "Runs"),
    h(
      "div",
      block("Verify and reproduce", "commands", h("p.lead", what), copyable(source.commands)),
      source.recipe && block("Recipe", "resolved, with every default filled in", copyable(source.recipe)),
      source.machine.length > 0 && block("Machine", source.machine_name, definitions(source.machine)),
      source.software.length > 0 && software(source),
      Data.stages.map(ofRun),
    ),
  );
}

const add = (...nodes) => document.getElementById("main").append(...nodes.flat().filter(Boolean));

function details() {
  add(Outcome.evaluations(), Outcome.climb(), Outcome.forgetting(), Course.curves(), Course.time());
  add(Episodes.section(), Outcome.tasksSection(), provenance());
  Page.finish(Data.footer);
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// The browser paints the head before the rest is drawn. A hidden page is not painted, so it does not wait.
async function build() {
  add(Verdict.panel(), Verdict.progress(), hero(), facts(), notices());
  if (!document.hidden) await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
  details();
}

// Draw the head and the times again, after the data have changed.
function refresh() {
  for (const [selector, make] of [["#top.hero", hero], [".facts", facts], ["#time", Course.time]]) {
    const [old, fresh] = [document.querySelector(selector), make()];
    if (old && fresh) old.replaceWith(fresh);
  }
}

globalThis.Report = { built: build(), refresh };
