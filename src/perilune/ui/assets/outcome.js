// Results: evaluations, the split of the change by strategy, tasks and answers. Each function returns a section, or
// null if the experiment has no data for it.
const { section, part, table } = Page;
const tiles = (...nodes) => h("div.tiles.two", nodes);

// --- evaluations
const colorOf = measure => ({ "pass@1": 1, greedy: 3 })[measure] || 2;
const passes = [...new Set(Data.evaluations.flatMap(evaluation => Object.keys(evaluation.measures)))]
  .filter(name => name !== "greedy")
  .sort((a, b) => a.slice(5) - b.slice(5));
const measures = [...new Set([passes[0], last(passes), "greedy"])].filter(name =>
  Data.evaluations.some(evaluation => evaluation.measures[name]),
);

// [mean, low, high] of each point as the columns of a series.
const spread = values => {
  const column = place => values.map(value => (value ? value[place] : null));
  return { y: column(0), low: column(1), high: column(2) };
};

function climbChart() {
  if (!Data.evaluations.length) return null;
  const place = new Map(Data.evaluations.map((evaluation, index) => [evaluation.stage, index]));
  const series = measures.map(name => ({
    name,
    x: [...Data.evaluations.keys()],
    ...spread(Data.evaluations.map(evaluation => evaluation.measures[name])),
    color: colorOf(name),
    points: true,
    hollow: name !== "pass@1",
    dash: name !== "pass@1",
  }));
  return Charts.lines({
    key: "climb",
    title: "Held-out accuracy at each evaluation",
    note: "Lines join each evaluation to that of the checkpoint before. Bars are 95% intervals from resampling tasks.",
    height: 240,
    edges: Data.comparisons.map(comparison => [place.get(comparison.before), place.get(comparison.after)]),
    x: { categories: Data.evaluations.map(evaluation => evaluation.label) },
    y: { ...SHARE, ticks: 5 },
    series,
    valueLabels: true,
    quietLegend: true,
  });
}

const within = ([mean, low, high]) => [
  Format.percent(mean),
  low !== null && h("small", `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`),
];

function evaluationsTable() {
  const asked = row => `${row.stage === row.label ? "" : `${row.stage} · `}${row.tasks} tasks × ${row.samples}`;
  const columns = [
    ["Evaluation", row => [row.label, h("small", asked(row))], "header"],
    ...measures.map(name => [name, row => (row.measures[name] ? within(row.measures[name]) : "–")]),
    ["Mean tokens", row => Format.number(row.mean_length, 3)],
    ["Truncated", row => Format.percent(row.truncated)],
    ["Failures", row => Format.integer(row.failures)],
    ["Tokens/s", row => Format.integer(row.tokens_per_second)],
    ["Time", row => Format.seconds(row.seconds)],
  ];
  return table(columns, Data.evaluations, "Evaluations in stage order");
}

// One chart of paired differences for each pair of evaluations, all on one scale.
function differences(compared) {
  const bounds = compared.flatMap(one => Object.values(one.differences).flatMap(([, low, high]) => [low, high]));
  const [lowest, highest] = [Math.min(0, ...bounds), Math.max(0, ...bounds)];
  const pad = 0.06 * Math.max(0.05, highest, -lowest);
  const x = {
    domain: [lowest && lowest - pad, highest && highest + pad],
    format: Format.points,
    tick: value => minus(`${Number((100 * value).toFixed(2))}`),
    label: "points",
    zero: true,
  };
  const row = (name, [mean, low, high]) => ({
    label: name,
    value: `${Format.points(mean)}  [${Format.points(low)}, ${Format.points(high)}]`,
    marks: [
      { whisker: [low, high], color: colorOf(name) },
      { dot: mean, color: colorOf(name) },
    ],
    details: [{ name: "95% interval", value: `${Format.points(mean)} points, ${Format.points(low)} to ${Format.points(high)}` }],
  });
  return compared.map(({ after_label: after, before_label: before, tasks, differences: found }) =>
    Charts.rows({
      key: "differences",
      title: `${after} minus ${before}`,
      note: `${tasks} shared tasks, paired.`,
      x,
      rows: measures.filter(name => found[name]).map(name => row(name, found[name])),
    }),
  );
}

function evaluations() {
  if (!Data.evaluations.length) return null;
  const isPaired = comparison => Object.keys(comparison.differences).length > 0;
  const forest = differences(Data.comparisons.filter(isPaired));
  const unpaired = Data.comparisons.filter(comparison => !isPaired(comparison));
  const hint = "Paired differences, task by task. An interval that excludes zero is a significant change.";
  return section(
    "evaluations",
    "Evaluations",
    "The same held-out tasks before and after each stage. pass@1 is the chance that one sample is right; pass@k that at least one of k is; greedy takes the likeliest token each time. A model that only becomes surer raises pass@1 towards pass@k; one that learns something new raises pass@k too.",
    evaluationsTable(),
    hardest(),
    Data.environments.length > 0 && h("div.tiles", Data.environments.map(Charts.figure)),
    forest.length > 0 && [part("Changes between evaluations", hint), h(forest.length > 1 ? "div.tiles.two" : "div.tiles", forest)],
    unpaired.map(({ before_label: before, after_label: after }) =>
      h("p.muted", `${before} and ${after} judged different tasks, so there is no paired difference.`),
    ),
    tree(),
  );
}

// The tasks that failed most at the last evaluation, each with a link to a wrong answer.
function hardest() {
  if (!Data.hardest.length) return null;
  const columns = [
    ["Task", row => h("a.mono", { href: row.link }, row.prompt), "header"],
    ["Right", row => `${row.right} of ${row.samples}`],
    ["Failures", row => row.why, "text"],
    ["Most frequent wrong answer", row => [h("span.mono", row.answer || "(empty)"), h("small", `${row.times} of ${row.samples}`)], "text"],
  ];
  const title = `Tasks that fail most in ${Data.hardest[0].stage}`;
  return [part(title), table(columns, Data.hardest, title)];
}

// The stages as a tree: each below the one whose checkpoint it starts from.
function tree() {
  if (Data.stages.length < 3) return null;
  const result = ({ name }) => {
    const evaluation = Data.evaluations.find(one => one.stage === name);
    const comparison = Data.comparisons.findLast(one => one.after === name);
    const change = comparison?.differences["pass@1"];
    const versus = change ? `, ${Format.points(change[0])} points against ${comparison.before}` : "";
    return evaluation && h("b", `pass@1 ${Format.percent(evaluation.measures["pass@1"][0])}${versus}`);
  };
  const below = parent => {
    const children = Data.stages.filter(stage => stage.parent === parent);
    const item = ({ name, state, task, uses }) =>
      h(
        "li",
        h("span", { class: `state ${state}`, title: state }, name),
        h("small", [task, ...uses.map(([field, from]) => `${field} from ${from}`)].join(", ")),
        result({ name }),
        below(name),
      );
    return children.length > 0 && h("ul.tree", children.map(item));
  };
  return [part("Stages", "Each stage stands below the one whose checkpoint it starts from."), below("")];
}

// --- what climbed
function waterfall({ contributions, accuracy: [before, after], before_label, after_label }) {
  const [fromShare, fromAccuracy] = ["from_share", "from_accuracy"].map(part => sum(contributions.map(one => one[part])));
  const middle = before + fromShare;
  const low = Math.min(0, before, middle, after);
  const end = (label, value, color) => ({
    label,
    value: Format.percent(value),
    strong: true,
    marks: [{ bar: [0, value], color }],
    details: [{ name: "pass@1", value: Format.percent(value) }],
  });
  const effect = (label, value, from, color, part) => ({
    label,
    value: `${Format.points(value)} points`,
    marks: [{ bar: [from, from + value], color: value < 0 ? 2 : color }],
    details: contributions.map(one => ({ name: one.strategy, value: `${Format.points(one[part])} points` })),
  });
  return Charts.rows({
    key: "waterfall",
    title: "Change of pass@1 by strategy",
    note: "Share effect: change in a strategy's share times its mean accuracy. Accuracy effect: change in its accuracy times its mean share. Their sum is the whole difference.",
    rowHeight: 46,
    x: { domain: [low, Math.max(before, middle, after) * 1.04], ...PERCENT, zero: true },
    rows: [
      end(before_label, before, 7),
      effect("choice of strategy", fromShare, before, 5, "from_share"),
      effect("accuracy within", fromAccuracy, middle, 3, "from_accuracy"),
      end(after_label, after, 1),
    ],
  });
}

// Before and after of one figure of each strategy.
function dumbbell({ contributions, before_label, after_label }, title, field) {
  const row = ({ strategy, [field]: [from, to] }) => ({
    label: strategy,
    value: `${Format.percent(from)} → ${Format.percent(to)}`,
    marks: [
      from !== null && to !== null ? { bar: [from, to], color: 1, thin: true } : {},
      { dot: from, color: 7, hollow: true },
      { dot: to, color: 1 },
    ],
    details: [
      { name: before_label, value: Format.percent(from) },
      { name: after_label, value: Format.percent(to) },
    ],
  });
  const legend = [
    { name: before_label, color: 7, hollow: true },
    { name: after_label, color: 1 },
  ];
  return Charts.rows({ key: field, title, legend, x: SHARE, rows: contributions.map(row) });
}

function climb() {
  const comparison = Data.climb;
  if (!comparison || !comparison.contributions.length) return null;
  const dumbbells = [
    dumbbell(comparison, "How often each strategy is chosen", "share"),
    dumbbell(comparison, "How often each strategy is right", "accuracy"),
  ];
  return section("climb", "What changed", Data.headline.explanation, tiles(waterfall(comparison), h("div.stack", dumbbells)));
}

// --- difficulty, length, odds
function tasksSection() {
  const { tasks, lengths } = Data;
  const dynamics = Data.length_dynamics.map(lengthDynamics);
  const calibrations = Data.calibrations.map(({ stage, text, figures }) => [
    part(`Can process rewards be trusted? ${stage}`, text),
    tiles(figures.map(Charts.figure)),
  ]);
  if (![tasks, lengths, dynamics, calibrations].some(one => one.length)) return null;
  const hint =
    "Right answers upwards, wrong ones downwards, on one scale. Long wrong answers at the right edge were truncated by the token limit.";
  return section(
    "tasks",
    "Tasks and answers",
    "Pass rates by difficulty, the weights of the learning rule, and the lengths of right and wrong answers.",
    tiles(tasks.map(Charts.figure)),
    lengths.length > 0 && [part("Length of right and wrong answers", hint), h("div.tiles", lengths.map(Charts.figure))],
    dynamics,
    calibrations,
  );
}

function lengthDynamics({ stage, found }) {
  const cell = (side, key, format) => row => (row[side] ? format(row[side][key]) : "–");
  const short = value => Format.number(value, 3);
  const sides = ["before", "after"].flatMap(side => [
    [`Answers ${side}`, cell(side, "count", Format.integer)],
    ["length", cell(side, "length", short)],
    ["truncated", cell(side, "truncated", Format.percent)],
  ]);
  const columns = [
    ["Difficulty", row => row.difficulty, "header"],
    ["Verdict", row => (row.correct ? "right" : "wrong"), "text"],
    ...sides,
  ];
  return [
    part(
      `Why lengths changed in ${stage}`,
      `From the first to the last steps the mean length went from ${short(found.before)} to ${short(found.after)} tokens: ${Format.signed(found.behaviour)} by writing differently, ${Format.signed(found.composition)} by being asked tasks of other difficulty.`,
    ),
    table(columns, found.table, `Length by difficulty and verdict in ${stage}`),
  ];
}

function forgetting() {
  if (!Data.forgetting.length) return null;
  const columns = [
    ["Measure", ([measure]) => measure, "header"],
    ["Before", ([, before]) => before],
    ["After", ([, , after]) => after],
    ["Change", ([, , , change]) => change || "–"],
  ];
  return section(
    "forgetting",
    "Forgetting",
    "What training cost elsewhere: the same English passages and the same tasks of other environments, before and after each stage. Changes are paired, with 95% intervals. The KL to the start is measured on answers to held-out tasks of the run.",
    Data.forgetting.map(({ stage, rows, note }) => [
      part(`Stage ${stage}`, note),
      rows.length > 0 && table(columns, rows, `Forgetting in ${stage}`),
    ]),
  );
}

globalThis.Outcome = { climbChart, evaluations, climb, forgetting, tasksSection };
