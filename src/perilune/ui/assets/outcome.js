// Results: evaluations, the split of the change by strategy, tasks and answers. Each function returns a section, or
// null if the experiment has no data for it.
"use strict";

const Outcome = ((data) => {
  const { section, part, table } = Page;
  const percent = { format: Format.percent, tick: Format.percentTick };
  const unit = { domain: [0, 1], ...percent };

  // --------------------------------------------------------------------------------- evaluations
  const MEASURE_COLORS = { "pass@1": 1, greedy: 3 };
  const colorOf = (measure) => MEASURE_COLORS[measure] || 2;
  const passes = [...new Set(data.evaluations.flatMap((evaluation) => Object.keys(evaluation.measures)))]
    .filter((name) => name !== "greedy")
    .sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)));
  const measures = [...new Set([passes[0], passes[passes.length - 1], "greedy"])].filter((name) =>
    data.evaluations.some((evaluation) => evaluation.measures[name]),
  );

  const spread = (values) => Object.fromEntries(["y", "low", "high"].map((name, place) => [name, values.map((value) => value[place])]));

  function climbChart(height, key) {
    if (!data.evaluations.length) return null;
    const at = data.evaluations.map((_, index) => index);
    const place = new Map(data.evaluations.map((evaluation, index) => [evaluation.stage, index]));
    const series = measures.map((name) => {
      const values = data.evaluations.map((evaluation) => evaluation.measures[name] || [null, null, null]);
      return {
        name,
        x: at,
        ...spread(values),
        color: colorOf(name),
        points: true,
        hollow: name !== "pass@1",
        dash: name !== "pass@1",
      };
    });
    return Charts.lines({
      key,
      title: "Held-out accuracy at each evaluation",
      note: "Lines join each evaluation to that of the checkpoint before. Bars are 95% intervals from resampling tasks.",
      height,
      edges: data.comparisons.map((comparison) => [place.get(comparison.before), place.get(comparison.after)]),
      x: { categories: data.evaluations.map((evaluation) => evaluation.label) },
      y: { ...unit, ticks: 5 },
      series,
      valueLabels: true,
      quietLegend: true,
    });
  }

  const within = ([mean, low, high]) => [
    Format.percent(mean),
    low === null ? null : h("small", {}, `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`),
  ];

  function evaluations() {
    if (!data.evaluations.length) return null;
    const columns = [
      {
        name: "Evaluation",
        header: true,
        value: (row) => [
          row.label,
          h(
            "small",
            {},
            row.stage === row.label
              ? `${row.tasks} tasks × ${row.samples}`
              : `${row.stage} · ${row.tasks} tasks × ${row.samples}`,
          ),
        ],
      },
      ...measures.map((name) => ({ name, value: (row) => (row.measures[name] ? within(row.measures[name]) : "–") })),
      { name: "Mean tokens", value: (row) => Format.number(row.mean_length, 3) },
      { name: "Truncated", value: (row) => Format.percent(row.truncated) },
      { name: "Failures", value: (row) => Format.integer(row.failures) },
      { name: "Tokens/s", value: (row) => Format.integer(row.tokens_per_second) },
      { name: "Time", value: (row) => Format.seconds(row.seconds) },
    ];
    const differences = data.comparisons.filter((comparison) => Object.keys(comparison.differences).length);
    const bounds = differences.flatMap((comparison) =>
      Object.values(comparison.differences).flatMap(([, low, high]) => [low, high]),
    );
    const [lowest, highest] = [Math.min(0, ...bounds), Math.max(0, ...bounds)];
    const pad = 0.06 * Math.max(0.05, highest, -lowest);
    const forest = differences.map((comparison) =>
      Charts.rows({
        key: "differences",
        title: `${comparison.after_label} minus ${comparison.before_label}`,
        note: `${comparison.tasks} shared tasks, paired.`,
        x: {
          domain: [lowest && lowest - pad, highest && highest + pad],
          format: Format.points,
          tick: (value) => minus(`${Number((100 * value).toFixed(2))}`),
          label: "points",
          zero: true,
        },
        rows: measures
          .filter((name) => comparison.differences[name])
          .map((name) => [name, comparison.differences[name]])
          .map(([name, [mean, low, high]]) => ({
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
          })),
      }),
    );
    const unpaired = data.comparisons.filter((comparison) => !Object.keys(comparison.differences).length);
    const parts = [...new Set(data.evaluations.flatMap((one) => Object.keys(one.by_environment)))].sort();
    const mixtures = data.evaluations.filter((one) => Object.keys(one.by_environment).length);
    const byEnvironment = () =>
      Charts.lines({
        key: "environments",
        title: "pass@1 on held-out tasks by environment",
        note: "The environments of the mixture, with 95% intervals from resampling tasks.",
        height: 260,
        x: { categories: mixtures.map((one) => one.label) },
        y: { ...unit, ticks: 5 },
        series: parts.map((name, index) => {
          const values = mixtures.map((one) => one.by_environment[name] || [null, null, null]);
          return {
            name,
            x: mixtures.map((_, place) => place),
            ...spread(values),
            color: (index % 6) + 1,
            points: true,
          };
        }),
        valueLabels: true,
        showLegend: true,
      });
    return section(
      "evaluations",
      "Evaluations",
      "The same held-out tasks before and after each stage. pass@1 is the chance that one sample is right; pass@k that at least one of k is; greedy takes the likeliest token each time. A model that only becomes surer raises pass@1 towards pass@k; one that learns something new raises pass@k too.",
      table(columns, data.evaluations, "Evaluations in stage order"),
      mixtures.length ? h("div", { class: "tiles" }, byEnvironment()) : null,
      forest.length
        ? [
            part(
              "Changes between evaluations",
              "Paired differences, task by task. An interval that excludes zero is a significant change.",
            ),
            h("div", { class: `tiles${forest.length > 1 ? " two" : ""}` }, forest),
          ]
        : null,
      unpaired.map((comparison) =>
        h(
          "p",
          { class: "muted" },
          `${comparison.before_label} and ${comparison.after_label} judged different tasks, so there is no paired difference.`,
        ),
      ),
      tree(),
    );
  }

  // The stages as a tree: each below the one whose checkpoint it starts from.
  function tree() {
    if (data.stages.length < 3) return null;
    const judged = new Map(data.evaluations.map((evaluation) => [evaluation.stage, evaluation]));
    const compared = new Map(data.comparisons.map((comparison) => [comparison.after, comparison]));
    const result = (stage) => {
      const evaluation = judged.get(stage.name);
      if (!evaluation) return null;
      const change = compared.get(stage.name)?.differences["pass@1"];
      const versus = change ? `, ${Format.points(change[0])} points against ${compared.get(stage.name).before}` : "";
      return h("b", {}, `pass@1 ${Format.percent(evaluation.measures["pass@1"][0])}${versus}`);
    };
    const below = (parent) => {
      const children = data.stages.filter((stage) => stage.parent === parent);
      if (!children.length) return null;
      return h(
        "ul",
        { class: "tree" },
        children.map((stage) =>
          h(
            "li",
            {},
            h("span", { class: `state ${stage.state}`, title: stage.state }, stage.name),
            h("small", {}, [stage.task, ...stage.uses.map(([field, name]) => `${field} from ${name}`)].join(", ")),
            result(stage),
            below(stage.name),
          ),
        ),
      );
    };
    return [part("Stages", "Each stage stands below the one whose checkpoint it starts from."), below("")];
  }

  // ------------------------------------------------------------------------------- what climbed
  function climb() {
    const comparison = data.climb;
    if (!comparison || !comparison.contributions.length) return null;
    const fromShare = comparison.contributions.reduce((total, one) => total + one.from_share, 0);
    const fromAccuracy = comparison.contributions.reduce((total, one) => total + one.from_accuracy, 0);
    const [before, after] = comparison.accuracy;
    const middle = before + fromShare;
    const dumbbell = (title, pick, key) =>
      Charts.rows({
        key,
        title,
        legend: [
          { name: comparison.before_label, color: 7, hollow: true },
          { name: comparison.after_label, color: 1 },
        ],
        x: unit,
        rows: comparison.contributions.map((one) => {
          const [from, to] = pick(one);
          const isKnown = from !== null && to !== null;
          return {
            label: one.strategy,
            value: `${Format.percent(from)} → ${Format.percent(to)}`,
            marks: [
              ...(isKnown ? [{ bar: [from, to], color: 1, thin: true }] : []),
              { dot: from, color: 7, hollow: true },
              { dot: to, color: 1 },
            ],
            details: [
              { name: comparison.before_label, value: Format.percent(from) },
              { name: comparison.after_label, value: Format.percent(to) },
            ],
          };
        }),
      });
    const low = Math.min(0, before, middle, after);
    const waterfall = Charts.rows({
      key: "waterfall",
      title: "Change of pass@1 by strategy",
      note: "Share effect: change in a strategy's share times its mean accuracy. Accuracy effect: change in its accuracy times its mean share. Their sum is the whole difference.",
      rowHeight: 46,
      x: {
        domain: [low, Math.max(before, middle, after) * 1.04],
        ...percent,
        zero: true,
      },
      rows: [
        {
          label: comparison.before_label,
          value: Format.percent(before),
          strong: true,
          marks: [{ bar: [0, before], color: 7 }],
          details: [{ name: "pass@1", value: Format.percent(before) }],
        },
        {
          label: "choice of strategy",
          value: `${Format.points(fromShare)} points`,
          marks: [{ bar: [before, middle], color: fromShare < 0 ? 2 : 5 }],
          details: comparison.contributions.map((one) => ({
            name: one.strategy,
            value: `${Format.points(one.from_share)} points`,
          })),
        },
        {
          label: "accuracy within",
          value: `${Format.points(fromAccuracy)} points`,
          marks: [{ bar: [middle, middle + fromAccuracy], color: fromAccuracy < 0 ? 2 : 3 }],
          details: comparison.contributions.map((one) => ({
            name: one.strategy,
            value: `${Format.points(one.from_accuracy)} points`,
          })),
        },
        {
          label: comparison.after_label,
          value: Format.percent(after),
          strong: true,
          marks: [{ bar: [0, after], color: 1 }],
          details: [{ name: "pass@1", value: Format.percent(after) }],
        },
      ],
    });
    const rows = [
      ...comparison.contributions,
      {
        strategy: "all",
        share: [null, null],
        accuracy: comparison.accuracy,
        from_share: fromShare,
        from_accuracy: fromAccuracy,
      },
    ];
    return section(
      "climb",
      "What changed",
      data.headline.explanation,
      h(
        "div",
        { class: "tiles two" },
        waterfall,
        h(
          "div",
          { class: "stack" },
          dumbbell("How often each strategy is chosen", (one) => one.share, "shares"),
          dumbbell("How often each strategy is right", (one) => one.accuracy, "accuracies"),
        ),
      ),
      table(
        [
          { name: "Strategy", header: true, value: (row) => row.strategy },
          { name: "Share before", value: (row) => Format.percent(row.share[0]) },
          { name: "after", value: (row) => Format.percent(row.share[1]) },
          { name: "Accuracy before", value: (row) => Format.percent(row.accuracy[0]) },
          { name: "after", value: (row) => Format.percent(row.accuracy[1]) },
          { name: "From its share", value: (row) => Format.points(row.from_share) },
          { name: "From its accuracy", value: (row) => Format.points(row.from_accuracy) },
        ],
        rows,
        "Contribution of each strategy in points",
      ),
    );
  }

  // -------------------------------------------------------------------- difficulty, length, odds
  function tasksSection() {
    const nodes = [];
    const shown = data.evaluations.filter((evaluation) => evaluation.by_difficulty.length);
    const grades = [...new Set(shown.flatMap((evaluation) => evaluation.by_difficulty.map((row) => row[0])))].sort(
      (a, b) => a - b,
    );
    const palette = (index, total) => (total === 1 ? 1 : index === total - 1 ? 1 : index === total - 2 ? 2 : 7);
    if (shown.length) {
      nodes.push(
        Charts.lines({
          key: "difficulty",
          title: "pass@1 by difficulty",
          note: "Difficulty as given by the environment; each point is the mean over the tasks of that difficulty.",
          height: 230,
          x: {
            label: "difficulty",
            name: "difficulty",
            format: (value) => Format.number(value),
            ticks: grades.length <= 12 ? grades : undefined,
          },
          y: unit,
          quietLegend: true,
          showLegend: true,
          series: shown.map((evaluation, index) => ({
            name: evaluation.label,
            x: evaluation.by_difficulty.map((row) => row[0]),
            y: evaluation.by_difficulty.map((row) => row[2]),
            color: palette(index, shown.length),
            points: true,
            hollow: index !== shown.length - 1,
          })),
        }),
      );
    }
    if (passes.length > 2) {
      nodes.push(
        Charts.lines({
          key: "passk",
          title: "pass@k for more samples",
          note: "pass@k: the chance that at least one of k samples is right, by the unbiased estimator.",
          height: 230,
          x: { label: "k", name: "k =", format: Format.integer, ticks: passes.map((name) => Number(name.slice(5))) },
          y: unit,
          quietLegend: true,
          showLegend: true,
          series: data.evaluations.map((evaluation, index) => {
            const known = passes.filter((name) => evaluation.measures[name]);
            return {
              name: evaluation.label,
              x: known.map((name) => Number(name.slice(5))),
              ...spread(known.map((name) => evaluation.measures[name])),
              color: palette(index, data.evaluations.length),
              points: true,
              hollow: index !== data.evaluations.length - 1,
            };
          }),
        }),
      );
    }
    const { rates } = data;
    if (rates.evaluations.length) {
      const total = rates.evaluations.length;
      nodes.push(
        Charts.bars({
          key: "rates",
          title: "Histogram of pass rates",
          note: "Each task's share of right samples. Tasks near 0% or 100% mostly give dead groups: equal rewards give no gradient.",
          height: 230,
          mode: "grouped",
          x: {
            centers: rates.values,
            width: rates.width,
            ticks: rates.values.length <= 21 ? rates.values : undefined,
            label: "share of samples that are right",
            format: Format.percent,
            tick: (value) => `${Math.round(100 * value)}%`,
            name: "solved in",
          },
          y: { format: Format.integer },
          series: rates.evaluations.map((one, index) => ({
            name: one.label,
            values: one.counts,
            color: palette(index, total),
          })),
        }),
      );
    }
    if (data.objective) {
      const { objective } = data;
      nodes.push(
        Charts.lines({
          key: "objective",
          title: `Implicit objective of ${objective.label}`,
          note: objective.note,
          height: 230,
          x: { label: "pass rate p of a task", name: "p =", format: Format.percent, tick: Format.percentTick },
          y: { format: (value) => Format.number(value, 3), log: true },
          series: [{ name: "w(p)", x: objective.p, y: objective.w, color: 4 }],
          showLegend: true,
        }),
      );
    }
    const lengths = data.lengths.evaluations.map((one) =>
      Charts.bars({
        key: "lengths",
        title: one.label,
        height: 200,
        mode: "mirrored",
        x: {
          centers: data.lengths.centers,
          width: data.lengths.width,
          label: "tokens",
          format: (value) => binLabel(value, data.lengths.width),
          tick: (value) => Format.integer(value),
        },
        y: { format: Format.integer, domain: data.lengths.domain },
        series: [
          { name: "right", values: one.right, color: 1 },
          { name: "wrong", values: one.wrong, color: 2 },
        ],
      }),
    );
    const dynamics = data.length_dynamics.map(lengthDynamics);
    const calibrated = data.calibrations.map(calibration);
    if (!nodes.length && !lengths.length && !dynamics.length && !calibrated.length) return null;
    return section(
      "tasks",
      "Tasks and answers",
      "Pass rates by difficulty, the weights of the learning rule, and the lengths of right and wrong answers.",
      h("div", { class: "tiles two" }, nodes),
      lengths.length
        ? [
            part(
              "Length of right and wrong answers",
              "Right answers upwards, wrong ones downwards, on one scale. Long wrong answers at the right edge were truncated by the token limit.",
            ),
            h("div", { class: "tiles" }, lengths),
          ]
        : null,
      dynamics,
      calibrated,
    );
  }

  function calibration({ stage, found }) {
    const sides = [
      ["estimated value", "value", 1],
      ["Monte Carlo value", "played", 2],
    ];
    const below = found.by_place.some((row) => row.value < 0); // values on a scale of their own
    const chart = (key, title, note, x, rows, at) =>
      Charts.lines({
        key: `${stage}-${key}`,
        title,
        note,
        height: 230,
        x,
        y: below ? { format: (value) => Format.number(value, 2), zero: false } : unit,
        showLegend: true,
        series: sides.map(([name, field, color]) => ({
          name,
          x: rows.map(at),
          y: rows.map((row) => row[field]),
          color,
          points: true,
        })),
      });
    return [
      part(`Can process rewards be trusted? ${stage}`, `${found.said.map((one) => `${Format.capital(one)}.`).join(" ")}`),
      h(
        "div",
        { class: "tiles two" },
        chart(
          "places",
          "Value of the prefixes of answers",
          "Mean over answers with that many segments. If the estimate falls and the Monte Carlo value does not, the estimate may have been requested at a prefix where the policy never answers.",
          { label: "segments written", name: "after", format: Format.integer, integer: true },
          found.by_place,
          (row) => row.place,
        ),
        chart(
          "reliability",
          "Estimated and Monte Carlo values, by decile of the estimate",
          "Where the lines agree, the estimate is a calibrated probability of being right.",
          { label: "decile of the estimate", name: "decile", format: Format.integer, integer: true },
          found.reliability,
          (_, index) => index + 1,
        ),
      ),
    ];
  }

  function lengthDynamics({ stage, found }) {
    const cell = (name, key, format) => (row) => (row[name] ? format(row[name][key]) : "–");
    const columns = [
      { name: "Difficulty", header: true, value: (row) => row.difficulty },
      { name: "Verdict", text: true, value: (row) => (row.correct ? "right" : "wrong") },
    ];
    for (const name of ["before", "after"]) {
      columns.push(
        { name: `Answers ${name}`, value: cell(name, "count", Format.integer) },
        { name: "length", value: cell(name, "length", (value) => Format.number(value, 3)) },
        { name: "truncated", value: cell(name, "truncated", Format.percent) },
      );
    }
    return [
      part(
        `Why lengths changed in ${stage}`,
        `From the first to the last steps the mean length went from ${Format.number(found.before, 3)} to ${Format.number(found.after, 3)} tokens: ${Format.signed(found.behaviour)} by writing differently, ${Format.signed(found.composition)} by being asked tasks of other difficulty.`,
      ),
      table(columns, found.table, `Length by difficulty and verdict in ${stage}`),
    ];
  }

  function forgetting() {
    if (!data.forgetting.length) return null;
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
      data.forgetting.map(({ stage, rows, note }) => [
        part(`Stage ${stage}`, note),
        rows.length ? table(columns, rows, `Forgetting in ${stage}`) : null,
      ]),
    );
  }

  function binLabel(center, width) {
    if (width <= 1) return `${Format.integer(center)} tokens`;
    return `${Math.ceil(center - width / 2)} to ${Math.ceil(center + width / 2) - 1} tokens`;
  }

  return { climbChart, evaluations, climb, forgetting, tasksSection };
})(Data);
