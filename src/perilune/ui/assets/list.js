// The first page: the experiments of a home, newest first, each with its health, state and curve.
const STATES = [["", "any state"], "active", "failed", "cancelled", "succeeded", "queued", "waiting"];

function Spark({ step, value }) {
  const [width, height] = [132, 30];
  const numbers = value.filter(one => one !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const x = one => (2 + ((width - 4) * (one - step[0])) / (last(step) - step[0] || 1)).toFixed(1);
  const y = one => (height - 3 - ((height - 6) * (one - low)) / (high - low || 1)).toFixed(1);
  const d = `M${step.map((one, place) => `${x(one)},${y(value[place])}`).join("L")}`;
  return html`<svg viewBox="0 0 ${width} ${height}" width=${width} height=${height} aria-hidden="true">
    <path class="line" d=${d} stroke="var(--c1)" />
    <circle cx=${x(last(step))} cy=${y(last(value))} r="2.6" fill="var(--c1)" />
  </svg>`;
}

const date = seconds =>
  new Date(1000 * seconds).toLocaleString(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

// The last figure of an experiment, and its source.
function figure({ stages }) {
  const judged = stages.findLast(stage => stage["pass@1"]);
  if (judged) {
    const { mean, low, high } = judged["pass@1"];
    return [`pass@1 ${Format.percent(mean)}`, `${Format.percent(low)} to ${Format.percent(high)}, ${judged.stage}`];
  }
  const trained = stages.findLast(stage => stage.curve);
  if (!trained) return ["", ""];
  const { name, value } = trained.curve;
  const format = /pass|accuracy/.test(name) ? Format.percent : Format.number;
  return [`${spaced(name)} ${format(last(value), 3)}`, `last step of ${trained.stage}`];
}

function progress({ stages }) {
  const running = stages.find(stage => stage.state === "active");
  if (!running) return `${stages.filter(stage => stage.state === "succeeded").length} of ${stages.length} stages`;
  const { done, total } = running.progress || {};
  return total ? `${running.stage} ${Format.integer(done)}/${Format.integer(total)}` : running.stage;
}

function Row({ one, isChosen, choose }) {
  const drawn = one.stages.findLast(stage => stage.curve && stage.task !== "evaluate");
  const [value, more] = figure(one);
  const { health } = one;
  const first = health && health.findings[0];
  const since = first && first.since !== null ? ` since step ${first.since}` : "";
  const label = `Compare ${one.name} of ${date(one.submitted)}`;
  return html`<li>
    <input type="checkbox" checked=${isChosen} aria-label=${label} onchange=${choose} />
    <a class="experiment" href="/experiments/${one.experiment_id}">
      <span class="who"><b>${one.name}</b><small>${[date(one.submitted), ...one.overrides].join(" · ")}</small></span>
      <span class="when"><span class="state ${one.state}">${one.state}</span><small>${progress(one)}</small></span>
      <span class="curve">${drawn && html`<${Spark} ...${drawn.curve} />`}</span>
      <span class="what"><b>${value}</b><small>${more}</small></span>
      <span class="how">
        ${health && html`<span class="pill ${health.status}">${health.status}</span>`}
        ${first && html`<small>${first.name}${since} in ${health.stage}</small>`}
      </span>
    </a>
  </li>`;
}

function List() {
  useUpdates("list");
  const [sought] = useSetting("q");
  const [state] = useSetting("state", STATES);
  const [kept, keep] = useSetting("compare");
  const { experiments, older } = Data;
  const chosen = kept.split(",").filter(id => experiments.some(one => one.experiment_id === id)); // to compare
  const isFound = wordFilter(sought);
  const textOf = one => [one.name, one.experiment_id, ...one.overrides, ...one.stages.map(stage => stage.stage)].join(" ");
  const shown = experiments.filter(one => (!state || one.state === state) && isFound(textOf(one)));
  const row = one => {
    const others = chosen.filter(id => id !== one.experiment_id);
    const isChosen = others.length < chosen.length;
    const choose = () => keep((isChosen ? others : [...chosen, one.experiment_id]).join(","));
    return html`<${Row} key=${one.experiment_id} one=${one} isChosen=${isChosen} choose=${choose} />`;
  };
  const move = event => moveFocus(event, "a.experiment", { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 });
  return html`
    <h1 class="small" id="top">Experiments</h1>
    <div class="toolbar">
      <${Field} name="q" type="search" label="Search" placeholder="Search name, override, stage" />
      <${Choice} name="state" label="State" options=${STATES} />
      <span class="muted" role="status">${Format.integer(shown.length)} of ${Format.integer(experiments.length + older)} experiments</span>
      <a class="plain" hidden=${chosen.length < 2} href="/compare/${chosen.join(",")}">Compare ${chosen.length}</a>
    </div>
    <p class="notice" hidden=${experiments.length > 0}>
      <b>No experiments yet. </b>perilune quickstart makes one in a few minutes; it appears here.
    </p>
    <ol class="experiments" onkeydown=${move}>${shown.map(row)}</ol>`;
}

drawPage(html`<${List} />`);
finishPage(Data.home);

new EventSource("/events").addEventListener("list", event => {
  Object.assign(Data, JSON.parse(event.data));
  redraw("list");
});
