// Training curves, time and hardware.

// --- horizontal axis
const AXIS = {
  step: { label: "step", name: "step", integer: true, time: false, format: Format.integer },
  tokens: { label: "tokens", name: "tokens", integer: true, time: false, format: Format.integer },
  seconds: { label: "time of the steps", name: "", integer: false, time: true, format: Format.seconds },
};
const isOffered = name => name === "step" || Data.training.every(one => one.columns[`reached/${name}`]);
const axes = Object.keys(AXIS).filter(isOffered);
const useAxis = () => useSetting("axis", axes)[0];

// The value of each step on the axis. For steps that arrived later, the page adds up tokens or seconds.
function reached({ columns, timings }, axis) {
  const counted = columns[`reached/${axis}`];
  if (axis === "step" || !counted) return columns.step;
  const spent = place => {
    if (axis === "tokens") return columns.tokens?.[place] || 0;
    const row = timings.step ? timings.step.indexOf(columns.step[place]) : -1;
    return row < 0 ? 0 : sum(PARTS.map(([name]) => timings[name]?.[row]));
  };
  let total = 0;
  return columns.step.map((_, place) => (total = counted[place] ?? total + spent(place)));
}
const stepAt = (training, axis, value) => training.columns.step[reached(training, axis).indexOf(value)];

// --- curves
const isPresent = value => !isNothing(value);

function seriesOf(training, names, axis) {
  const { columns } = training;
  const found = names.filter(([key]) => columns[key]?.some(isPresent));
  const x = reached(training, axis);
  return found.map(([key, name, color]) => {
    const column = columns[key];
    if (!key.startsWith("eval/")) return { name, x, y: column, color };
    // Evaluations are rare, so their line also crosses the steps without one.
    const places = [...column.keys()].filter(place => isPresent(column[place]));
    const at = values => values && places.map(place => values[place]);
    const [low, high, y] = [at(columns[`${key}/low`]), at(columns[`${key}/high`]), at(column)];
    const extreme = /(loss|nll)$/.test(key) ? Math.min : Math.max;
    const best = key === training.best && y.length > 1 ? y.indexOf(extreme(...y)) : undefined;
    return { name, x: at(x), y, low, high, color, points: true, best };
  });
}

// Whether all values of a chart are equal, so that one number is enough.
const isSteady = ({ series }) => series.every(one => !one.points && one.y.every(value => value === one.y[0]));

function steadyFigure(stage, { key, title, note, y, series }) {
  const format = AXES[y]?.format || Format.number;
  const said = one => (series.length > 1 ? `${one.name}, at every step` : "at every step");
  return html`<figure class="chart steady" data-chart="${stage}-${key}">
    <h4>${title}</h4>
    ${series.map(one => html`<p>${format(one.y[0])}${small(said(one))}</p>`)}
    <figcaption>${note}</figcaption>
  </figure>`;
}

function curve(training, axis, { key, title, note, y, series }) {
  const { stage } = training;
  const pick = Episodes.has(stage) ? value => Episodes.open(stage, stepAt(training, axis, value)) : undefined;
  const drawn = { x: AXIS[axis], y: AXES[y], series, group: `training-${stage}`, smooth: true, pick };
  return Charts.lines({ key: `${stage}-${key}`, title, note, ...drawn, showLegend: true });
}

const trainingOf = stage => Data.training.find(one => one.stage === stage);
const isDrawn = ({ charts, columns }) => charts.some(chart => chart.series.some(([key]) => columns[key]?.some(isPresent)));

// The curves of a stage.
function Block({ stage }) {
  useUpdates(`steps ${stage}`);
  const axis = useAxis();
  const training = trainingOf(stage);
  const { charts, description, steps_kept: kept, steps_total: total } = training;
  const all = charts.map(chart => ({ ...chart, series: seriesOf(training, chart.series, axis) })).filter(one => one.series.length);
  const [steady, moving] = [true, false].map(wanted => all.filter(one => (total > 1 && isSteady(one)) === wanted));
  const thinned = kept < total ? ` Shown: every ${Math.round(total / kept)}th of ${total} steps.` : "";
  const hint = Episodes.has(stage) ? " Click a chart to read that step's episodes." : "";
  return html`<div data-stage=${stage}>
    <${Part} title=${stage} text=${`${description}${thinned}${hint}`} />
    <div class=${moving.length === 4 ? "tiles two" : "tiles"}>${moving.map(one => curve(training, axis, one))}</div>
    ${steady.length > 0 && html`<div class="tiles small">${steady.map(one => steadyFigure(stage, one))}</div>`}
  </div>`;
}

// The main curve of the last rl stage, or else of the last training.
function MainChart() {
  const training = [...Data.training].reverse().sort((a, b) => (b.task === "rl") - (a.task === "rl"))[0];
  useUpdates(`steps ${training.stage}`);
  const axis = useAxis();
  const { columns, stage } = training;
  const sets = Object.keys(columns).filter(key => /^eval\/[^/]+\/pass@1$/.test(key));
  const names = columns.reward
    ? [["reward", "reward", 1], ...sets.map(key => [key, key.split("/")[1], 3])]
    : [["loss", "loss", 1], ["validation_loss", "held out", 3]];
  const title = `${columns.reward ? "Reward" : "Loss"} in stage ${stage}`;
  const note = "All steps as they were recorded, without smoothing.";
  const drawn = { x: AXIS[axis], series: seriesOf(training, names, axis), group: `main-${stage}` };
  return Charts.lines({ key: "main", title, note, height: 200, ...drawn, showLegend: true });
}

function Smoothing() {
  const weight = Number(useSetting("smoothing")[0]);
  const slider = html`<${Field} name="smoothing" usual="0" label="Smoothing" type="range" min="0" max="0.95" step="0.05" />`;
  return html`<label class="control">Smoothing${slider}<output>${weight ? weight.toFixed(2) : "off"}</output></label>`;
}

function Curves() {
  const trained = Data.training.filter(isDrawn);
  if (!trained.length) return null;
  const text =
    "All steps of all training stages. Point at a chart, or use the arrow keys, to read all charts at the same step. Drag over a range, or press z, to look closer; 0 shows the whole range.";
  const hint = "Smoothing draws a moving average over the exact values; tooltips always show exact values.";
  return html`<${Section} id="curves" title="Training curves" text=${text}>
    <div class="toolbar">
      <${Smoothing} />
      ${axes.length > 1 && html`<label class="control">Axis<${Choice} name="axis" label="Horizontal axis" options=${axes} /></label>`}
      <small class="muted">${hint}</small>
    </div>
    ${trained.map(({ stage }) => html`<${Block} key=${stage} stage=${stage} />`)}
  <//>`;
}

// --- time, hardware
const PARTS = [["sampling", 1], ["scoring", 5], ["learning", 2], ["other", 7]];
const tiles = charts => html`<div class="tiles two">${charts}</div>`;

function stepCharts({ stage, task, timings }) {
  const { step, tokens_per_second: rates } = timings;
  if (!step) return [];
  const isUsed = values => values?.some(value => value > 0);
  const width = step.length > 1 ? Math.min(...step.slice(1).map((value, index) => value - step[index])) : 1;
  const parts = PARTS.filter(([name]) => isUsed(timings[name]));
  const times = {
    key: `${stage}-steptime`,
    title: `Time of a step: ${stage}`,
    total: true,
    x: { centers: step, width, ...AXIS.step },
    y: CLOCK,
    series: parts.map(([name, color]) => ({ name, values: timings[name], color })),
  };
  const line = ([key, title, name, color, y, values]) =>
    Charts.lines({
      key: `${stage}-${key}`,
      title: `${title}: ${stage}`,
      x: AXIS.step,
      y,
      showLegend: true,
      smooth: true,
      group: `training-${stage}`,
      series: [{ name, x: step, y: values, color }],
    });
  const curves = [
    ["throughput", "Tokens per second", task === "rl" ? "sampled tokens/s" : "tokens/s", 3, { format: Format.integer }, rates],
    ["prefix-hits", "Prefix cache", "prompt tokens in the cache", 4, PERCENT, timings.prefix_hits],
    ["weights", "Size of a weight update", "last update", 6, { format: Format.bytes }, timings.weights_bytes],
  ];
  return [...(parts.length ? [Charts.bars(times)] : []), ...curves.filter(curve => isUsed(last(curve))).map(line)];
}

function Time() {
  useUpdates("document");
  const steps = Data.training.flatMap(stepCharts);
  const { hardware, times, placements } = Data;
  if (!times.length && !steps.length && !hardware) return null;
  return html`<${Section} id="time" title="Time and machine" text=${Data.machine_sentence}>
    ${tiles(times.map(Charts.figure))}
    ${placements.length > 0 && machines(placements)}
    ${steps.length > 0 && html`<${Part} title="Step by step" />${tiles(steps)}`}
    ${hardware && html`<${Part} title="Hardware" text=${hardware.note} />${tiles(hardware.figures.map(Charts.figure))}`}
  <//>`;
}

// The machine and the cost of each attempt.
function machines(placements) {
  const columns = [
    ["Stage", row => [row.stage, small(`attempt ${row.number}`)], "header"],
    ["Where", row => [row.placement, row.machines > 1 && small(`${row.machines} machines`)], "text"],
    ["Outcome", row => [row.state, small(row.cause)], "text"],
    ["Time", row => Format.seconds(row.seconds)],
    ["Price per hour", row => Format.number(row.price || null)],
    ["Cost", row => known(value => value.toFixed(4))(row.cost)],
  ];
  const text = "All attempts. Cost counts from the request of a machine to the proof that it is gone.";
  return html`
    <${Part} title="Machines and cost" text=${text} />
    <${Table} columns=${columns} rows=${placements} caption="Machines and cost" />`;
}

globalThis.Course = { Curves, MainChart, Time };
