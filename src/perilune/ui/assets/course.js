// Training curves, time and hardware.
const { section, part, table } = Page;

// --- horizontal axis
const UNITS = {
  step: { label: "step", name: "step", integer: true, time: false, format: Format.integer },
  tokens: { label: "tokens", name: "tokens", integer: true, time: false, format: Format.integer },
  seconds: { label: "time of the steps", name: "", integer: false, time: true, format: Format.seconds },
};
const isOffered = name => name === "step" || Data.training.every(one => one.columns[`reached/${name}`]);
const axes = Page.select("Horizontal axis", Object.keys(UNITS).filter(isOffered), setAxis);
const x = {};
let axis;
Address.keep("axis", axes);
setAxis();

function setAxis() {
  axis = axes.value;
  Object.assign(x, UNITS[axis]);
  for (const { stage } of Data.training) for (const group of ["training", "main"]) Charts.refresh(`${group}-${stage}`);
}

// The value of each step on the axis. For steps that arrived later, the page adds up tokens or seconds.
function reached({ columns, timings }) {
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
const stepAt = (training, value) => training.columns.step[reached(training).indexOf(value)];

// --- curves
const isPresent = value => !isNothing(value);

function seriesOf(training, names) {
  const { columns } = training;
  const found = names.filter(([key]) => columns[key]?.some(isPresent));
  return found.map(([key, name, color]) => {
    const column = columns[key];
    if (!key.startsWith("eval/")) return { name, x: reached(training), y: column, color };
    // Evaluations are rare, so their line also crosses the steps without one.
    const places = [...column.keys()].filter(place => isPresent(column[place]));
    const at = values => values && places.map(place => values[place]);
    const [low, high] = [at(columns[`${key}/low`]), at(columns[`${key}/high`])];
    return { name, x: at(reached(training)), y: at(column), low, high, color, points: true };
  });
}

// The series of a chart, and whether all their values are equal, so that one number is enough.
function chosen(training, chart) {
  const series = seriesOf(training, chart.series);
  const isSteady = training.steps_total > 1 && series.every(one => !one.points && one.y.every(value => value === one.y[0]));
  return { chart, series, isSteady };
}
const chosenOf = training => training.charts.map(chart => chosen(training, chart)).filter(one => one.series.length);

// A text that changes when a stage needs different charts.
const shapeOf = training => chosenOf(training).map(({ chart, series, isSteady }) => `${chart.key} ${isSteady} ${series.length}`).join("\n");

function steadyFigure(training, { chart: { key, title, note, y }, series }) {
  const format = AXES[y]?.format || Format.number;
  const said = one => (series.length > 1 ? `${one.name}, at every step` : "at every step");
  const values = series.map(one => h("p", format(one.y[0]), h("small", said(one))));
  return h("figure.chart.steady", { "data-chart": `${training.stage}-${key}` }, h("h4", title), values, h("figcaption", note));
}

function curve(training, { chart: { key, title, note, y, series } }) {
  const { stage } = training;
  const pick = Episodes.has(stage) ? value => Episodes.open(stage, stepAt(training, value)) : undefined;
  const drawn = { x, y: AXES[y], series: () => seriesOf(training, series), group: `training-${stage}`, smooth: true, pick };
  return Charts.lines({ key: `${stage}-${key}`, title, note, ...drawn, showLegend: true });
}

const drawn = new Map(); // stage -> the shape of its charts
function block(training) {
  const { stage, steps_kept: kept, steps_total: total } = training;
  drawn.set(stage, shapeOf(training));
  const all = chosenOf(training);
  const charts = all.filter(one => !one.isSteady).map(one => curve(training, one));
  const steady = all.filter(one => one.isSteady).map(one => steadyFigure(training, one));
  const thinned = kept < total ? ` Shown: every ${Math.round(total / kept)}th of ${total} steps.` : "";
  const hint = Episodes.has(stage) ? " Click a chart to read that step's episodes." : "";
  return h(
    "div",
    { "data-stage": stage },
    part(stage, `${training.description}${thinned}${hint}`),
    h(charts.length === 4 ? "div.tiles.two" : "div.tiles", charts),
    steady.length > 0 && h("div.tiles.small", steady),
  );
}

// The main curve of the last rl stage, or else of the last training; null without training.
function mainChart() {
  const training = [...Data.training].reverse().sort((a, b) => (b.task === "rl") - (a.task === "rl"))[0];
  if (!training) return null;
  const { columns, stage } = training;
  const sets = Object.keys(columns).filter(key => /^eval\/[^/]+\/pass@1$/.test(key));
  const names = columns.reward
    ? [["reward", "reward", 1], ...sets.map(key => [key, key.split("/")[1], 3])]
    : [["loss", "loss", 1], ["validation_loss", "held out", 3]];
  const title = `${columns.reward ? "Reward" : "Loss"} in stage ${stage}`;
  const note = "All steps as they were recorded, without smoothing.";
  const series = () => seriesOf(training, names);
  return Charts.lines({ key: "main", title, note, height: 200, x, series, group: `main-${stage}`, showLegend: true });
}

// Draw the curves of a stage again after its columns have grown.
function update(stage) {
  const training = Data.training.find(one => one.stage === stage);
  Charts.refresh(`main-${stage}`);
  if (drawn.get(stage) === shapeOf(training)) return Charts.refresh(`training-${stage}`);
  const old = [...document.querySelectorAll("#curves [data-stage]")].find(one => one.dataset.stage === stage);
  return old?.replaceWith(block(training));
}

function curves() {
  const trained = Data.training.filter(training => chosenOf(training).length);
  if (!trained.length) return null;
  const shown = h("output", "off");
  const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "Smoothing" });
  slider.oninput = () => {
    const weight = Number(slider.value);
    shown.textContent = weight ? weight.toFixed(2) : "off";
    Charts.smooth(weight);
  };
  Address.keep("smoothing", slider);
  const hint = "Smoothing draws a moving average over the exact values; tooltips always show exact values.";
  return section(
    "curves",
    "Training curves",
    "All steps of all training stages. Point at a chart, or use the arrow keys, to read all charts at the same step. Drag over a range, or press z, to look closer; 0 shows the whole range.",
    h("div.toolbar", h("label.control", "Smoothing", slider, shown), axes.length > 1 && h("label.control", "Axis", axes), h("small.muted", hint)),
    trained.map(block),
  );
}

// --- time, hardware
const PARTS = [["sampling", 1], ["scoring", 5], ["learning", 2], ["other", 7]];
const tiles = charts => h("div.tiles.two", charts);

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
    x: { centers: step, width, ...UNITS.step },
    y: CLOCK,
    series: parts.map(([name, color]) => ({ name, values: timings[name], color })),
  };
  const throughput = {
    key: `${stage}-throughput`,
    title: `Tokens per second: ${stage}`,
    x: UNITS.step,
    y: { format: Format.integer },
    showLegend: true,
    smooth: true,
    group: `training-${stage}`,
    series: [{ name: task === "rl" ? "sampled tokens/s" : "tokens/s", x: step, y: rates, color: 3 }],
  };
  return [...(parts.length ? [Charts.bars(times)] : []), ...(isUsed(rates) ? [Charts.lines(throughput)] : [])];
}

function time() {
  const overview = Data.times.map(Charts.figure);
  const steps = Data.training.flatMap(stepCharts);
  const { hardware } = Data;
  if (!overview.length && !steps.length && !hardware) return null;
  return section(
    "time",
    "Time and machine",
    Data.machine_sentence,
    tiles(overview),
    Data.placements.length > 0 && machines(),
    steps.length > 0 && [part("Step by step"), tiles(steps)],
    hardware && [part("Hardware", hardware.note), tiles(hardware.figures.map(Charts.figure))],
  );
}

// The machine and the cost of each attempt.
function machines() {
  const columns = [
    ["Stage", row => [row.stage, h("small", `attempt ${row.number}`)], "header"],
    ["Where", row => [row.placement, row.machines > 1 && h("small", `${row.machines} machines`)], "text"],
    ["Outcome", row => [row.state, h("small", row.cause)], "text"],
    ["Time", row => Format.seconds(row.seconds)],
    ["Price per hour", row => Format.number(row.price || null)],
    ["Cost", row => known(value => value.toFixed(4))(row.cost)],
  ];
  return [
    part("Machines and cost", "All attempts. Cost counts from the request of a machine to the proof that it is gone."),
    table(columns, Data.placements, "Machines and cost"),
  ];
}

globalThis.Course = { curves, mainChart, time, update };
