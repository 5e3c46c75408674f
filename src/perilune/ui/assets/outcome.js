// Results: evaluations, the split of the change by strategy, tasks and answers. Each function returns a section, or
// null if the experiment has no data for it.
const { section, part, table } = Page;
const tiles = (...nodes) => h("div.tiles.two", nodes);

// --- evaluations
const within = ([mean, low, high]) => [
  Format.percent(mean),
  low !== null && h("small", `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`),
];

function evaluationsTable() {
  const asked = row => `${row.stage === row.label ? "" : `${row.stage} · `}${row.tasks} tasks × ${row.samples}`;
  const columns = [
    ["Evaluation", row => [row.label, h("small", asked(row))], "header"],
    ...Data.measures.map(name => [name, row => (row.measures[name] ? within(row.measures[name]) : "–")]),
    ["Mean tokens", row => Format.number(row.mean_length, 3)],
    ["Truncated", row => Format.percent(row.truncated)],
    ["Failures", row => Format.integer(row.failures)],
    ["Tokens/s", row => Format.integer(row.tokens_per_second)],
    ["Time", row => Format.seconds(row.seconds)],
  ];
  return table(columns, Data.evaluations, "Evaluations in stage order");
}

function evaluations() {
  if (!Data.evaluations.length) return null;
  const forest = Data.differences.map(Charts.figure);
  const unpaired = Data.comparisons.filter(comparison => !Object.keys(comparison.differences).length);
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
  if (Data.hardest.some(row => row.expected)) columns.push(["Right answer", row => h("span.mono", row.expected), "text"]);
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

function climb() {
  const [waterfall, ...dumbbells] = Data.contributions.map(Charts.figure);
  if (!waterfall) return null;
  return section("climb", "What changed", Data.headline.explanation, tiles(waterfall, h("div.stack", dumbbells)));
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

globalThis.Outcome = { evaluations, climb, forgetting, tasksSection };
