// Results: evaluations, the split of the change by strategy, tasks and answers. Each function returns a section, or
// null if the experiment has no data for it.
const { section, part, table } = Page;
const tiles = (...nodes) => h("div.tiles.two", nodes);
const whole = (name, label) => ({ name, label, format: Format.integer, integer: true });

// --------------------------------------------------------------------------------- evaluations
const colorOf = (measure) => ({ "pass@1": 1, greedy: 3 })[measure] || 2;
const passes = [...new Set(Data.evaluations.flatMap((evaluation) => Object.keys(evaluation.measures)))]
  .filter((name) => name !== "greedy")
  .sort((a, b) => a.slice(5) - b.slice(5));
const measures = [...new Set([passes[0], last(passes), "greedy"])].filter((name) =>
  Data.evaluations.some((evaluation) => evaluation.measures[name]),
);

// [mean, low, high] of each point as the columns of a series.
const spread = (values) => {
  const column = (place) => values.map((value) => (value ? value[place] : null));
  return { y: column(0), low: column(1), high: column(2) };
};

function climbChart(height, key) {
  if (!Data.evaluations.length) return null;
  const place = new Map(Data.evaluations.map((evaluation, index) => [evaluation.stage, index]));
  const series = measures.map((name) => ({
    name,
    x: [...Data.evaluations.keys()],
    ...spread(Data.evaluations.map((evaluation) => evaluation.measures[name])),
    color: colorOf(name),
    points: true,
    hollow: name !== "pass@1",
    dash: name !== "pass@1",
  }));
  return Charts.lines({
    key,
    title: "Held-out accuracy at each evaluation",
    note: "Lines join each evaluation to that of the checkpoint before. Bars are 95% intervals from resampling tasks.",
    height,
    edges: Data.comparisons.map((comparison) => [place.get(comparison.before), place.get(comparison.after)]),
    x: { categories: Data.evaluations.map((evaluation) => evaluation.label) },
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
  const asked = (row) => `${row.stage === row.label ? "" : `${row.stage} · `}${row.tasks} tasks × ${row.samples}`;
  const columns = [
    { name: "Evaluation", header: true, value: (row) => [row.label, h("small", asked(row))] },
    ...measures.map((name) => ({ name, value: (row) => (row.measures[name] ? within(row.measures[name]) : "–") })),
    { name: "Mean tokens", value: (row) => Format.number(row.mean_length, 3) },
    { name: "Truncated", value: (row) => Format.percent(row.truncated) },
    { name: "Failures", value: (row) => Format.integer(row.failures) },
    { name: "Tokens/s", value: (row) => Format.integer(row.tokens_per_second) },
    { name: "Time", value: (row) => Format.seconds(row.seconds) },
  ];
  return table(columns, Data.evaluations, "Evaluations in stage order");
}

// One chart of paired differences for each pair of evaluations, all on one scale.
function differences(compared) {
  const bounds = compared.flatMap((one) => Object.values(one.differences).flatMap(([, low, high]) => [low, high]));
  const [lowest, highest] = [Math.min(0, ...bounds), Math.max(0, ...bounds)];
  const pad = 0.06 * Math.max(0.05, highest, -lowest);
  const x = {
    domain: [lowest && lowest - pad, highest && highest + pad],
    format: Format.points,
    tick: (value) => minus(`${Number((100 * value).toFixed(2))}`),
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
    details: [
      { name: "difference", value: `${Format.points(mean)} points` },
      { name: "95% interval", value: `${Format.points(low)} to ${Format.points(high)}` },
    ],
  });
  return compared.map(({ after_label: after, before_label: before, tasks, differences: found }) =>
    Charts.rows({
      key: "differences",
      title: `${after} minus ${before}`,
      note: `${tasks} shared tasks, paired.`,
      x,
      rows: measures.filter((name) => found[name]).map((name) => row(name, found[name])),
    }),
  );
}

function byEnvironment() {
  const mixtures = Data.evaluations.filter((one) => Object.keys(one.by_environment).length);
  if (!mixtures.length) return null;
  const names = [...new Set(mixtures.flatMap((one) => Object.keys(one.by_environment)))].sort();
  const chart = Charts.lines({
    key: "environments",
    title: "pass@1 on held-out tasks by environment",
    note: "The environments of the mixture, with 95% intervals from resampling tasks.",
    height: 260,
    x: { categories: mixtures.map((one) => one.label) },
    y: { ...SHARE, ticks: 5 },
    series: names.map((name, index) => ({
      name,
      x: [...mixtures.keys()],
      ...spread(mixtures.map((one) => one.by_environment[name])),
      color: (index % 6) + 1,
      points: true,
    })),
    valueLabels: true,
    showLegend: true,
  });
  return h("div.tiles", chart);
}

function evaluations() {
  if (!Data.evaluations.length) return null;
  const isPaired = (comparison) => Object.keys(comparison.differences).length > 0;
  const forest = differences(Data.comparisons.filter(isPaired));
  const unpaired = Data.comparisons.filter((comparison) => !isPaired(comparison));
  const hint = "Paired differences, task by task. An interval that excludes zero is a significant change.";
  return section(
    "evaluations",
    "Evaluations",
    "The same held-out tasks before and after each stage. pass@1 is the chance that one sample is right; pass@k that at least one of k is; greedy takes the likeliest token each time. A model that only becomes surer raises pass@1 towards pass@k; one that learns something new raises pass@k too.",
    evaluationsTable(),
    byEnvironment(),
    forest.length > 0 && [part("Changes between evaluations", hint), h(forest.length > 1 ? "div.tiles.two" : "div.tiles", forest)],
    unpaired.map(({ before_label: before, after_label: after }) =>
      h("p.muted", `${before} and ${after} judged different tasks, so there is no paired difference.`),
    ),
    tree(),
  );
}

// The stages as a tree: each below the one whose checkpoint it starts from.
function tree() {
  if (Data.stages.length < 3) return null;
  const result = ({ name }) => {
    const evaluation = Data.evaluations.find((one) => one.stage === name);
    const comparison = Data.comparisons.findLast((one) => one.after === name);
    const change = comparison?.differences["pass@1"];
    const versus = change ? `, ${Format.points(change[0])} points against ${comparison.before}` : "";
    return evaluation && h("b", `pass@1 ${Format.percent(evaluation.measures["pass@1"][0])}${versus}`);
  };
  const below = (parent) => {
    const children = Data.stages.filter((stage) => stage.parent === parent);
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

// ------------------------------------------------------------------------------- what climbed
function waterfall({ contributions, accuracy: [before, after], before_label, after_label }, fromShare, fromAccuracy) {
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
    details: contributions.map((one) => ({ name: one.strategy, value: `${Format.points(one[part])} points` })),
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
function dumbbell({ contributions, before_label, after_label }, key, title, field) {
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
  return Charts.rows({ key, title, legend, x: SHARE, rows: contributions.map(row) });
}

function climb() {
  const comparison = Data.climb;
  if (!comparison || !comparison.contributions.length) return null;
  const from_share = sum(comparison.contributions.map((one) => one.from_share));
  const from_accuracy = sum(comparison.contributions.map((one) => one.from_accuracy));
  const all = { strategy: "all", share: [null, null], accuracy: comparison.accuracy, from_share, from_accuracy };
  const columns = [
    { name: "Strategy", header: true, value: (row) => row.strategy },
    { name: "Share before", value: (row) => Format.percent(row.share[0]) },
    { name: "after", value: (row) => Format.percent(row.share[1]) },
    { name: "Accuracy before", value: (row) => Format.percent(row.accuracy[0]) },
    { name: "after", value: (row) => Format.percent(row.accuracy[1]) },
    { name: "From its share", value: (row) => Format.points(row.from_share) },
    { name: "From its accuracy", value: (row) => Format.points(row.from_accuracy) },
  ];
  const dumbbells = [
    dumbbell(comparison, "shares", "How often each strategy is chosen", "share"),
    dumbbell(comparison, "accuracies", "How often each strategy is right", "accuracy"),
  ];
  return section(
    "climb",
    "What changed",
    Data.headline.explanation,
    tiles(waterfall(comparison, from_share, from_accuracy), h("div.stack", dumbbells)),
    table(columns, [...comparison.contributions, all], "Contribution of each strategy in points"),
  );
}

// -------------------------------------------------------------------- difficulty, length, odds
// The last evaluation stands out, then the one before it.
const palette = (index, total) => (index === total - 1 ? 1 : index === total - 2 ? 2 : 7);

// A chart with one series of points for each evaluation; `points` gives its x and its y.
function byEvaluation(key, title, note, x, shown, points) {
  const series = shown.map((evaluation, index) => ({
    name: evaluation.label,
    ...points(evaluation),
    color: palette(index, shown.length),
    points: true,
    hollow: index !== shown.length - 1,
  }));
  return Charts.lines({ key, title, note, height: 230, x, y: SHARE, quietLegend: true, showLegend: true, series });
}

function difficulty() {
  const shown = Data.evaluations.filter((evaluation) => evaluation.by_difficulty.length);
  if (!shown.length) return null;
  const grades = [...new Set(shown.flatMap((one) => one.by_difficulty.map((row) => row[0])))].sort((a, b) => a - b);
  const x = { label: "difficulty", name: "difficulty", format: Format.number, ticks: grades.length <= 12 ? grades : undefined };
  const note = "Difficulty as given by the environment; each point is the mean over the tasks of that difficulty.";
  return byEvaluation("difficulty", "pass@1 by difficulty", note, x, shown, ({ by_difficulty: rows }) => ({
    x: rows.map((row) => row[0]),
    y: rows.map((row) => row[2]),
  }));
}

function passAtK() {
  if (passes.length <= 2) return null;
  const count = (name) => Number(name.slice(5));
  const note = "pass@k: the chance that at least one of k samples is right, by the unbiased estimator.";
  const x = { label: "k", name: "k =", format: Format.integer, ticks: passes.map(count) };
  return byEvaluation("passk", "pass@k for more samples", note, x, Data.evaluations, (evaluation) => {
    const found = passes.filter((name) => evaluation.measures[name]);
    return { x: found.map(count), ...spread(found.map((name) => evaluation.measures[name])) };
  });
}

function rates({ values, width, evaluations: shown }) {
  if (!shown.length) return null;
  return Charts.bars({
    key: "rates",
    title: "Histogram of pass rates",
    note: "Each task's share of right samples. Tasks near 0% or 100% mostly give dead groups: equal rewards give no gradient.",
    height: 230,
    mode: "grouped",
    x: {
      centers: values,
      width,
      ticks: values.length <= 21 ? values : undefined,
      label: "share of samples that are right",
      format: Format.percent,
      tick: (value) => `${Math.round(100 * value)}%`,
      name: "solved in",
    },
    y: { format: Format.integer },
    series: shown.map((one, index) => ({ name: one.label, values: one.counts, color: palette(index, shown.length) })),
  });
}

const objective = ({ label, note, p, w }) =>
  Charts.lines({
    key: "objective",
    title: `Implicit objective of ${label}`,
    note,
    height: 230,
    x: { label: "pass rate p of a task", name: "p =", ...PERCENT },
    y: { format: (value) => Format.number(value, 3), log: true },
    series: [{ name: "w(p)", x: p, y: w, color: 4 }],
    showLegend: true,
  });

function lengths({ centers, width, domain, evaluations: shown }) {
  if (!shown.length) return null;
  const bin = (center) =>
    `${width <= 1 ? Format.integer(center) : `${Math.ceil(center - width / 2)} to ${Math.ceil(center + width / 2) - 1}`} tokens`;
  const charts = shown.map((one) =>
    Charts.bars({
      key: "lengths",
      title: one.label,
      height: 200,
      mode: "mirrored",
      x: { centers, width, label: "tokens", format: bin, tick: Format.integer },
      y: { format: Format.integer, domain },
      series: [
        { name: "right", values: one.right, color: 1 },
        { name: "wrong", values: one.wrong, color: 2 },
      ],
    }),
  );
  const hint =
    "Right answers upwards, wrong ones downwards, on one scale. Long wrong answers at the right edge were truncated by the token limit.";
  return [part("Length of right and wrong answers", hint), h("div.tiles", charts)];
}

function tasksSection() {
  const charts = [difficulty(), passAtK(), rates(Data.rates), Data.objective && objective(Data.objective)].filter(Boolean);
  const more = [lengths(Data.lengths), ...Data.length_dynamics.map(lengthDynamics), ...Data.calibrations.map(calibration)];
  if (!charts.length && !more.some(Boolean)) return null;
  return section(
    "tasks",
    "Tasks and answers",
    "Pass rates by difficulty, the weights of the learning rule, and the lengths of right and wrong answers.",
    tiles(charts),
    more,
  );
}

function calibration({ stage, found }) {
  const isBelow = found.by_place.some((row) => row.value < 0); // values on a scale of their own
  const y = isBelow ? { format: (value) => Format.number(value, 2), zero: false } : SHARE;
  const chart = (key, title, note, x, rows, at) => {
    const series = (name, field, color) => ({ name, x: rows.map(at), y: rows.map((row) => row[field]), color, points: true });
    const sides = [series("estimated value", "value", 1), series("Monte Carlo value", "played", 2)];
    return Charts.lines({ key: `${stage}-${key}`, title, note, height: 230, x, y, showLegend: true, series: sides });
  };
  return [
    part(`Can process rewards be trusted? ${stage}`, found.said.map((one) => `${Format.capital(one)}.`).join(" ")),
    tiles(
      chart(
        "places",
        "Value of the prefixes of answers",
        "Mean over answers with that many segments. If the estimate falls and the Monte Carlo value does not, the estimate may have been requested at a prefix where the policy never answers.",
        whole("after", "segments written"),
        found.by_place,
        (row) => row.place,
      ),
      chart(
        "reliability",
        "Estimated and Monte Carlo values, by decile of the estimate",
        "Where the lines agree, the estimate is a calibrated probability of being right.",
        whole("decile", "decile of the estimate"),
        found.reliability,
        (_, index) => index + 1,
      ),
    ),
  ];
}

function lengthDynamics({ stage, found }) {
  const cell = (side, key, format) => (row) => (row[side] ? format(row[side][key]) : "–");
  const short = (value) => Format.number(value, 3);
  const sides = ["before", "after"].flatMap((side) => [
    { name: `Answers ${side}`, value: cell(side, "count", Format.integer) },
    { name: "length", value: cell(side, "length", short) },
    { name: "truncated", value: cell(side, "truncated", Format.percent) },
  ]);
  const columns = [
    { name: "Difficulty", header: true, value: (row) => row.difficulty },
    { name: "Verdict", text: true, value: (row) => (row.correct ? "right" : "wrong") },
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
    { name: "Measure", header: true, value: ([measure]) => measure },
    { name: "Before", value: ([, before]) => before },
    { name: "After", value: ([, , after]) => after },
    { name: "Change", value: ([, , , change]) => change || "–" },
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
