// The page of a comparison: arms, differences from the baseline, and curves.
const shown = Data.isShare ? Format.percent : Format.number;
const change = Data.isShare ? value => `${Format.points(value)} points` : Format.number;
const COLORS = 8;
const color = place => (place % COLORS) + 1;
const mark = place => (place === Data.baseline ? "baseline" : place === Data.best ? "best" : "");

const hasEnds = interval => interval[1] !== null && interval[2] !== null;
const ends = (interval, format) => `${format(interval[1])} to ${format(interval[2])}`;
const within = interval => [shown(interval[0]), hasEnds(interval) && small(ends(interval, shown))];

const hero = html`<div class="hero" id="top">
  <div>
    <p class="eyebrow"><b>${Data.title}</b>${sum(Data.arms.map(arm => arm.seeds.length))} experiments</p>
    <h1>${Data.arms.length} arms compared by ${Data.metric}</h1>
    ${Data.notes.map(lead)}
  </div>
  ${forest("final", `Final ${Data.metric}`, shown, arm => arm.figure, {})}
</div>`;

// One row for each arm that has this interval.
function forest(key, title, format, intervalOf, { note, zero }) {
  const found = Data.arms.map((arm, place) => [arm, place, intervalOf(arm)]).filter(([, , interval]) => interval);
  const values = found.flatMap(([, , interval]) => interval.filter(value => value !== null));
  if (zero) values.push(0);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const row = ([arm, place, interval]) => ({
    label: arm.label,
    strong: place === Data.best,
    value: format(interval[0]),
    marks: [
      hasEnds(interval) ? { whisker: interval.slice(1, 3), color: color(place) } : {},
      { dot: interval[0], color: color(place) },
    ],
    details: [
      { name: "mean", value: format(interval[0]) },
      ...(hasEnds(interval) ? [{ name: "95% interval", value: ends(interval, format) }] : []),
    ],
  });
  const x = { domain: [low - pad, high + pad], format, tick: Data.isShare ? Format.percentTick : format, zero };
  return Charts.rows({ key, title, note, x, rows: found.map(row) });
}

function arms() {
  const seed = one => small(`${one.seed}: ${one.figure ? shown(one.figure[0]) : one.problem}`);
  const columns = [
    ["Arm", ([arm, place]) => [arm.label, small(mark(place))], "header"],
    [Data.metric, ([arm]) => (arm.figure ? within(arm.figure) : "–")],
    ["By seed", ([arm]) => arm.seeds.map(seed), "text"],
    ["Difference from the baseline", ([arm]) => (arm.difference ? arm.difference.text : "–"), "text"],
    ...Data.keys.map((key, index) => [key, ([arm]) => mono(arm.settings[index])]),
  ];
  const note = "95% intervals, not corrected. With few seeds the interval is over tasks, and supports no claim about settings.";
  const intervalOf = arm => arm.difference?.interval;
  const text = "Only the settings that differ. Differences are paired by seed and corrected for the number of arms (Holm).";
  return html`<${Section} id="arms" title="Arms" text=${text}>
    <${Table} columns=${columns} rows=${Data.arms.map((arm, place) => [arm, place])} caption="Arms" />
    ${Data.arms.some(intervalOf) && forest("differences", "Difference from the baseline", change, intervalOf, { zero: true, note })}
  <//>`;
}

function chartOf({ stage, metric, title, curves }) {
  const series = curves.map(({ arm, step, mean, low, high }) => {
    const look = { color: color(arm), dash: arm >= COLORS };
    return { name: Data.arms[arm].label, x: step, y: mean, low, high, area: true, ...look };
  });
  const x = { label: "step", name: "step", integer: true };
  return Charts.lines({ key: `${stage}-${metric}`, title, group: stage, smooth: true, x, y: { zero: false }, series });
}

function curves() {
  const stages = Map.groupBy(Data.charts, chart => chart.stage);
  if (!stages.size) return null;
  const text = `Means over the seeds of each arm; areas are ${Data.area}. Stages that all arms share are left out.`;
  const tiles = ([stage, charts]) => html`<${Part} title=${stage} /><div class="tiles">${charts.map(chartOf)}</div>`;
  return html`<${Section} id="curves" title="Curves" text=${text}>${[...stages].map(tiles)}<//>`;
}

// --- the same tasks in two experiments
const runs = Data.arms.flatMap(arm => arm.seeds.map(one => [arm, one]));
const MOST_TASKS = 20;

function Tasks() {
  const options = [...new Map(runs.map(([arm, one]) => [one.experiment, `${arm.label}, seed ${one.seed}`]))];
  const [left] = useSetting("left", options);
  const others = options.filter(([id]) => id !== left);
  const [right] = useSetting("right", others);
  if (!others.length) return null;
  const [a, b] = [left, right].map(id => runs.find(([, one]) => one.experiment === id)[1].tasks);
  const gap = task => Math.abs(a[task] - b[task]);
  const tasks = Object.keys(a).filter(task => Object.hasOwn(b, task)).sort((one, other) => gap(other) - gap(one));
  if (!tasks.length && !Data.index) return null;
  const place = task => ["", Data.stage, "samples", task].map(encodeURIComponent).join("/");
  const read = (task, text) =>
    Data.index ? html`<a href="/experiments/${left}?with=${encodeURIComponent(right)}#episodes${task && place(task)}">${text}</a>` : text;
  const columns = [
    ["Task", task => read(task, task), "header"],
    ["Left", task => Format.percent(a[task])],
    ["Right", task => Format.percent(b[task])],
  ];
  const most = `Tasks of stage ${Data.stage} whose pass rates differ most.${Data.index ? " A link shows the episodes of both." : ""}`;
  const text = tasks.length ? most : `The final figures of the two experiments have no tasks in common.`;
  return html`<${Section} id="tasks" title="Tasks" text=${text}>
    <div class="toolbar">
      <label class="control">Left<${Choice} name="left" label="Left" options=${options} /></label>
      <label class="control">Right<${Choice} name="right" label="Right" options=${others} /></label>
      ${Data.index && read("", "Read their episodes side by side")}
    </div>
    ${tasks.length > 0 && html`<${Table} columns=${columns} rows=${tasks.slice(0, MOST_TASKS)} caption="Tasks" />`}
  <//>`;
}

function experiments() {
  const columns = [
    ["Arm", ([arm]) => arm.label, "header"],
    ["Seed", ([, one]) => Format.integer(one.seed)],
    [Data.metric, ([, one]) => (one.figure ? within(one.figure) : one.problem)],
    ["Experiment", ([, one]) => mono(one.experiment), "text"],
  ];
  const text = "The figure of each seed, with its interval over tasks. perilune report EXPERIMENT writes its own page.";
  return html`
    <${Section} id="experiments" title="Experiments" text=${text}><${Table} columns=${columns} rows=${runs} caption="Experiments" /><//>`;
}

drawPage(hero, arms(), curves(), html`<${Tasks} />`, experiments());
finishPage(Data.footer);
