// Lays out the report: head, facts, notices and provenance. The other files draw the other sections.
const state = row => html`<span class="state ${row.state}">${row.state}</span>`;

function Hero() {
  useUpdates("document");
  const { experiment, headline } = Data;
  const chart = Data.climb_chart ? Charts.figure(Data.climb_chart) : html`<${Course.MainChart} />`;
  return html`<div class="hero" id="top">
    <div>
      <p class="eyebrow"><b>${experiment.name}</b>${state(experiment)}</p>
      <h1>${headline.title}</h1>
      ${headline.paragraphs.map(lead)}
    </div>
    ${(Data.climb_chart || Data.training.length > 0) && html`<div>${chart}</div>`}
  </div>`;
}

function Facts() {
  useUpdates("document");
  const fact = ([name, value, more]) => html`<div><dt>${name}</dt><dd>${value}${more && small(more)}</dd></div>`;
  return html`<dl class="facts">${Data.facts.map(fact)}</dl>`;
}

function notice({ kind, title, text, log }) {
  if (Data.live && kind === "active") return null; // the progress bars show it
  return html`<div class="notice ${kind}" role="note">
    <b>${title}</b>${text && ` ${text}`}${log && html`<pre tabindex="0">${log}</pre>`}
  </div>`;
}

// --- provenance
const Block = ({ title, hint, children }) => html`
  <details><summary>${title}${hint && html`<span class="muted">${hint}</span>`}</summary><div>${children}</div></details>`;
const titled = (title, content) => html`<h3 class="part">${title}</h3>${content}`;

function software({ software_name: name, software: pairs, packages }) {
  const item = ([one, version]) => html`<div><span>${one}</span><span class="mono muted">${version}</span></div>`;
  return html`<${Block} title="Software" hint=${name}>
    <${Definitions} pairs=${pairs} />
    ${packages.length > 0 && titled(`Packages (${packages.length})`, html`<div class="columns">${packages.map(item)}</div>`)}
  <//>`;
}

const run = ({ name, task, facts, summary, spec, log }) => html`<${Block} title="Run of ${name}" hint=${task}>
  <${Definitions} pairs=${facts} />
  ${summary && titled("summary.json", html`<${Copyable} text=${summary} />`)}
  ${spec && titled("job.json", html`<${Copyable} text=${spec} />`)}
  ${log && titled("End of the log", html`<pre tabindex="0">${log}</pre>`)}
<//>`;

// Which key signed the result of a run, shortened.
function signature({ facts }) {
  const said = facts.find(([name]) => name === "Signed result")?.[1] || "–";
  return mono(said.replace(/^(key .{16}).*/, "$1"), said);
}

function Provenance() {
  const columns = [
    ["Stage", row => [row.name, small(row.task)], "header"],
    ["Run", row => mono(row.run_id || "–"), "text"],
    ["State", row => [state(row), row.cause && small(row.cause)], "text"],
    ["Attempts", row => Format.integer(row.attempts)],
    ["Bundle digest", row => mono(row.digest?.slice(0, 16) || "–", row.digest), "text"],
    ["Signed result", signature, "text"],
    ["Time", row => Format.seconds(row.seconds)],
  ];
  const { commands, recipe, machine, machine_name: name, ...source } = Data.provenance;
  const text = "What ran, with which code and machine, and how to reproduce it. The facts were recorded by the runs themselves.";
  const what =
    "Verification recomputes every digest; reproduction runs the frozen bundle again and compares metrics, episodes and the final checkpoint.";
  return html`<${Section} id="provenance" title="Provenance" text=${text}>
    <${Table} columns=${columns} rows=${Data.stages} caption="Runs" />
    <div>
      <${Block} title="Verify and reproduce" hint="commands">${lead(what)}<${Copyable} text=${commands} /><//>
      ${recipe && html`<${Block} title="Recipe" hint="resolved, with every default filled in"><${Copyable} text=${recipe} /><//>`}
      ${machine.length > 0 && html`<${Block} title="Machine" hint=${name}><${Definitions} pairs=${machine} /><//>`}
      ${source.software.length > 0 && software(source)}
      ${Data.stages.map(run)}
    </div>
  <//>`;
}

const head = html`<${Verdict.Panel} /><${Verdict.Progress} /><${Hero} /><${Facts} />${Data.notices.map(notice)}`;
const results = html`<${Outcome.Evaluations} /><${Outcome.Climb} /><${Outcome.Forgetting} /><${Course.Time} /><${Course.Curves} />`;

// The browser paints the head before the rest is drawn. A hidden page is not painted, so it does not wait.
drawPage(head);
if (!document.hidden) await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
Episodes.start();
drawPage(head, results, html`<${Episodes.Browser} /><${Outcome.Tasks} /><${Provenance} />`);
finishPage(Data.footer);
document.getElementById(location.hash.slice(1))?.scrollIntoView();
