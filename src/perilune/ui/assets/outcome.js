// Results: evaluations, the split of the change by strategy, tasks and answers. A component draws nothing if the
// experiment has no data for it.
const figures = (kind, all) => html`<div class=${kind}>${all.map(Charts.figure)}</div>`;

// --- evaluations
const within = ([mean, low, high]) => [
  Format.percent(mean),
  low !== null && small(`${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`),
];

function evaluationsTable() {
  const asked = row => `${row.stage === row.label ? "" : `${row.stage} · `}${row.tasks} tasks × ${row.samples}`;
  const columns = [
    ["Evaluation", row => [row.label, small(asked(row))], "header"],
    ...Data.measures.map(name => [name, row => (row.measures[name] ? within(row.measures[name]) : "–")]),
    ["Mean tokens", row => Format.number(row.mean_length, 3)],
    ["Truncated", row => Format.percent(row.truncated)],
    ["Failures", row => Format.integer(row.failures)],
    ["Tokens/s", row => Format.integer(row.tokens_per_second)],
    ["Time", row => Format.seconds(row.seconds)],
  ];
  return html`<${Table} columns=${columns} rows=${Data.evaluations} caption="Evaluations in stage order" />`;
}

function Evaluations() {
  const { differences, environments, comparisons } = Data;
  if (!Data.evaluations.length) return null;
  const unpaired = comparisons.filter(comparison => !Object.keys(comparison.differences).length);
  const text =
    "The same held-out tasks before and after each stage. pass@1 is the chance that one sample is right; pass@k that at least one of k is; greedy takes the likeliest token each time. A model that only becomes surer raises pass@1 towards pass@k; one that learns something new raises pass@k too.";
  const order = "Each stage stands below the one whose checkpoint it starts from.";
  const hint = "Paired differences, task by task. An interval that excludes zero is a significant change.";
  const notPaired = ({ before_label: before, after_label: after }) =>
    html`<p class="muted">${before} and ${after} judged different tasks, so there is no paired difference.</p>`;
  return html`<${Section} id="evaluations" title="Evaluations" text=${text}>
    ${evaluationsTable()}
    ${hardest()}
    ${environments.length > 0 && figures("tiles", environments)}
    ${differences.length > 0 && html`
      <${Part} title="Changes between evaluations" text=${hint} />
      ${figures(differences.length > 1 ? "tiles two" : "tiles", differences)}`}
    ${unpaired.map(notPaired)}
    ${Data.stages.length > 2 && html`<${Part} title="Stages" text=${order} />${below("")}`}
  <//>`;
}

// The tasks that failed most at the last evaluation, each with a link to a wrong answer.
function hardest() {
  if (!Data.hardest.length) return null;
  const columns = [
    ["Task", row => html`<a class="mono" href=${row.link}>${row.prompt}</a>`, "header"],
    ["Right", row => `${row.right} of ${row.samples}`],
    ["Failures", row => row.why, "text"],
    ["Most frequent wrong answer", row => [mono(row.answer || "(empty)"), small(`${row.times} of ${row.samples}`)], "text"],
  ];
  if (Data.hardest.some(row => row.expected)) columns.push(["Right answer", row => mono(row.expected), "text"]);
  const title = `Tasks that fail most in ${Data.hardest[0].stage}`;
  return html`<${Part} title=${title} /><${Table} columns=${columns} rows=${Data.hardest} caption=${title} />`;
}

// The stages as a tree: those that start from the checkpoint of `parent`, each with the stages below it.
function below(parent) {
  const result = name => {
    const evaluation = Data.evaluations.find(one => one.stage === name);
    const comparison = Data.comparisons.findLast(one => one.after === name);
    const change = comparison?.differences["pass@1"];
    const versus = change ? `, ${Format.points(change[0])} points against ${comparison.before}` : "";
    return evaluation && html`<b>pass@1 ${Format.percent(evaluation.measures["pass@1"][0])}${versus}</b>`;
  };
  const children = Data.stages.filter(stage => stage.parent === parent);
  const item = ({ name, state, task, uses }) => html`<li>
    <span class="state ${state}" title=${state}>${name}</span>
    <small>${[task, ...uses.map(([field, from]) => `${field} from ${from}`)].join(", ")}</small>
    ${result(name)}
    ${below(name)}
  </li>`;
  return children.length > 0 && html`<ul class="tree">${children.map(item)}</ul>`;
}

function Climb() {
  const [waterfall, ...dumbbells] = Data.contributions.map(Charts.figure);
  if (!waterfall) return null;
  return html`<${Section} id="climb" title="What changed" text=${Data.headline.explanation}>
    <div class="tiles two">${waterfall}<div class="stack">${dumbbells}</div></div>
  <//>`;
}

// --- difficulty, length, odds
function Tasks() {
  const { tasks, lengths, length_dynamics: dynamics, calibrations } = Data;
  if (![tasks, lengths, dynamics, calibrations].some(one => one.length)) return null;
  const hint =
    "Right answers upwards, wrong ones downwards, on one scale. Long wrong answers at the right edge were truncated by the token limit.";
  const calibration = ({ stage, text, figures: all }) =>
    html`<${Part} title="Can process rewards be trusted? ${stage}" text=${text} />${figures("tiles two", all)}`;
  return html`<${Section} id="tasks" title="Tasks and answers"
    text="Pass rates by difficulty, the weights of the learning rule, and the lengths of right and wrong answers.">
    ${figures("tiles two", tasks)}
    ${lengths.length > 0 && html`<${Part} title="Length of right and wrong answers" text=${hint} />${figures("tiles", lengths)}`}
    ${dynamics.map(lengthDynamics)}
    ${calibrations.map(calibration)}
  <//>`;
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
  const text = `From the first to the last steps the mean length went from ${short(found.before)} to ${short(found.after)} tokens: ${Format.signed(found.behaviour)} by writing differently, ${Format.signed(found.composition)} by being asked tasks of other difficulty.`;
  return html`
    <${Part} title="Why lengths changed in ${stage}" text=${text} />
    <${Table} columns=${columns} rows=${found.table} caption="Length by difficulty and verdict in ${stage}" />`;
}

function Forgetting() {
  if (!Data.forgetting.length) return null;
  const columns = [
    ["Measure", ([measure]) => measure, "header"],
    ["Before", ([, before]) => before],
    ["After", ([, , after]) => after],
    ["Change", ([, , , change]) => change || "–"],
  ];
  const text =
    "What training cost elsewhere: the same English passages and the same tasks of other environments, before and after each stage. Changes are paired, with 95% intervals. The KL to the start is measured on answers to held-out tasks of the run.";
  const ofStage = ({ stage, rows, note }) => html`
    <${Part} title="Stage ${stage}" text=${note} />
    ${rows.length > 0 && html`<${Table} columns=${columns} rows=${rows} caption="Forgetting in ${stage}" />`}`;
  return html`<${Section} id="forgetting" title="Forgetting" text=${text}>${Data.forgetting.map(ofStage)}<//>`;
}

globalThis.Outcome = { Evaluations, Climb, Forgetting, Tasks };
