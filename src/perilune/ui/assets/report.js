// Lays the report out: one function a section, each given the data and returning nodes (or null when the
// experiment has nothing to show there). Figures come from charts.js, the episode browser from episodes.js.
"use strict";

const Report = (() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const percent = { format: Format.percent, tick: Format.percentTick };
  const unit = { domain: [0, 1], ...percent };

  function section(id, title, lead, ...nodes) {
    return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), lead ? h("p", { class: "lead" }, lead) : null, ...nodes);
  }

  const part = (title, lead) => [h("h3", { class: "part" }, title), lead ? h("p", { class: "lead" }, lead) : null];

  function table(columns, rows, caption) {
    const cell = (column, row) => h(column.header ? "th" : "td", { class: column.text ? "text" : "", scope: column.header ? "row" : null }, column.value(row));
    return h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h("table", {}, h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.text ? "text" : "" }, column.name)))), h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => cell(column, row)))))),
    );
  }

  function copyable(text) {
    const block = h("pre", { tabindex: 0 }, text);
    const button = h("button", { type: "button", class: "chip" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        getSelection().selectAllChildren(block);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    return h("div", { class: "copyable" }, block, button);
  }

  const definitions = (pairs, name = "keyvalue") => h("dl", { class: name }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]));
  const bytes = (value) => (value === 0 ? "0" : value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${Math.round(value / 1e3)} kB`);
  const seriesOf = (training, names) => names.filter(([key]) => training.columns[key]).map(([key, name, index, more]) => ({ name, x: training.columns.step, y: training.columns[key], color: index, ...more }));

  // ---------------------------------------------------------------------------------------- head
  function hero() {
    const { experiment, headline } = data;
    const chart = climbChart(276, "climb");
    return h(
      "div",
      { class: "hero", id: "top" },
      h(
        "div",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, experiment.name), h("span", { class: `state ${experiment.state}` }, experiment.state)),
        h("h1", {}, headline.title),
        headline.paragraphs.map((text) => h("p", { class: "lead" }, text)),
      ),
      chart ? h("div", {}, chart) : null,
    );
  }

  function facts() {
    return h("dl", { class: "facts" }, data.facts.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null))));
  }

  function notices() {
    return data.notices.map((notice) => h("div", { class: `notice ${notice.kind}`, role: "note" }, h("b", {}, notice.title), notice.text ? ` ${notice.text}` : "", notice.log ? h("pre", { tabindex: 0 }, notice.log) : null));
  }

  // --------------------------------------------------------------------------------- evaluations
  const MEASURE_COLORS = { "pass@1": 1, greedy: 3 };
  const colorOf = (measure) => MEASURE_COLORS[measure] || 2;
    const passes = [...new Set(data.evaluations.flatMap((evaluation) => Object.keys(evaluation.measures)))].filter((name) => name !== "greedy").sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)));
  const measures = [...new Set([passes[0], passes[passes.length - 1], "greedy"])].filter((name) => data.evaluations.some((evaluation) => evaluation.measures[name]));

  function climbChart(height, key) {
    if (!data.evaluations.length) return null;
    const at = data.evaluations.map((_, index) => index);
    const series = measures.map((name) => {
      const values = data.evaluations.map((evaluation) => evaluation.measures[name] || [null, null, null]);
      return { name, x: at, y: values.map((value) => value[0]), low: values.map((value) => value[1]), high: values.map((value) => value[2]), color: colorOf(name), points: true, hollow: name !== "pass@1", dash: name !== "pass@1" };
    });
    return Charts.lines({
      key,
      title: "Held-out accuracy at each evaluation",
      note: "Bars are 95% intervals from resampling tasks.",
      height,
      x: { categories: data.evaluations.map((evaluation) => evaluation.label) },
      y: { ...unit, ticks: 5 },
      series,
      valueLabels: true,
      quietLegend: true,
    });
  }

  const within = ([mean, low, high]) => [Format.percent(mean), low === null ? null : h("small", {}, `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`)];

  function evaluations() {
    if (!data.evaluations.length) return null;
    const columns = [
      { name: "Evaluation", header: true, value: (row) => [row.label, h("small", {}, row.stage === row.label ? `${row.tasks} tasks × ${row.samples}` : `${row.stage} · ${row.tasks} tasks × ${row.samples}`)] },
      ...measures.map((name) => ({ name, value: (row) => (row.measures[name] ? within(row.measures[name]) : "–") })),
      { name: "Mean tokens", value: (row) => Format.number(row.mean_length, 3) },
      { name: "Truncated", value: (row) => Format.percent(row.truncated) },
      { name: "Failures", value: (row) => Format.integer(row.failures) },
      { name: "Tokens/s", value: (row) => Format.integer(row.tokens_per_second) },
      { name: "Time", value: (row) => Format.seconds(row.seconds) },
    ];
    const differences = data.comparisons.filter((comparison) => Object.keys(comparison.differences).length);
    const largest = Math.max(0.05, ...differences.flatMap((comparison) => Object.values(comparison.differences).flatMap(([, low, high]) => [Math.abs(low), Math.abs(high)])));
    const lowest = Math.min(0, ...differences.flatMap((comparison) => Object.values(comparison.differences).map(([, low]) => low)));
    const highest = Math.max(0, ...differences.flatMap((comparison) => Object.values(comparison.differences).map(([, , high]) => high)));
    const pad = largest * 0.06;
    const forest = differences.map((comparison) =>
      Charts.rows({
        key: "differences",
        title: `${comparison.after_label} minus ${comparison.before_label}`,
        note: `${comparison.tasks} shared tasks, paired.`,
        x: { domain: [lowest && lowest - pad, highest && highest + pad], format: (value) => `${Format.points(value)}`, tick: (value) => `${Number((100 * value).toFixed(2))}`.replace("-", "−"), label: "points", zero: true },
        rows: measures.filter((name) => comparison.differences[name]).map((name) => [name, comparison.differences[name]]).map(([name, [mean, low, high]]) => ({
          label: name,
          value: `${Format.points(mean)}  [${Format.points(low)}, ${Format.points(high)}]`,
          marks: [{ whisker: [low, high], color: colorOf(name) }, { dot: mean, color: colorOf(name) }],
          details: [{ name: "difference", value: `${Format.points(mean)} points` }, { name: "95% interval", value: `${Format.points(low)} to ${Format.points(high)}` }],
        })),
      }),
    );
    const unpaired = data.comparisons.filter((comparison) => !Object.keys(comparison.differences).length);
    return section(
      "evaluations",
      "Evaluations",
      "The same held-out tasks before and after each stage. pass@1 is the chance that one sample is right; pass@k that at least one of k is; greedy takes the likeliest token each time. A model that only becomes surer raises pass@1 towards pass@k; one that learns something new raises pass@k too.",
      table(columns, data.evaluations, "Evaluations in stage order"),
      forest.length ? [part("What each step changed", "Paired differences, task by task. An interval that stays clear of zero is a change that resampling the tasks does not explain away."), h("div", { class: `tiles${forest.length > 1 ? " two" : ""}` }, forest)] : null,
      unpaired.map((comparison) => h("p", { class: "muted" }, `${comparison.before_label} and ${comparison.after_label} were not judged on the same tasks, so no paired difference is given.`)),
    );
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
        legend: [{ name: comparison.before_label, color: 7, hollow: true }, { name: comparison.after_label, color: 1 }],
        x: { domain: [0, 1], format: Format.percent, tick: Format.percentTick },
        rows: comparison.contributions.map((one) => {
          const [from, to] = pick(one);
          const isKnown = from !== null && to !== null;
          return {
            label: one.strategy,
            value: `${Format.percent(from)} → ${Format.percent(to)}`,
            marks: [...(isKnown ? [{ bar: [from, to], color: 1, thin: true, faint: true }] : []), { dot: from, color: 7, hollow: true }, { dot: to, color: 1 }],
            details: [{ name: comparison.before_label, value: Format.percent(from) }, { name: comparison.after_label, value: Format.percent(to) }],
          };
        }),
      });
    const low = Math.min(0, before, middle, after);
    const waterfall = Charts.rows({
      key: "waterfall",
      title: "From one pass@1 to the other",
      note: "Share effect: change in a strategy's share times its mean accuracy. Accuracy effect: change in its accuracy times its mean share. Their sum is the whole difference, and neither side is favoured.",
      rowHeight: 46,
      x: { domain: [low, Math.max(before, middle, after) * 1.04], format: Format.percent, tick: Format.percentTick, zero: true },
      rows: [
        { label: comparison.before_label, value: Format.percent(before), strong: true, marks: [{ bar: [0, before], color: 7 }], details: [{ name: "pass@1", value: Format.percent(before) }] },
        { label: "choice of strategy", value: `${Format.points(fromShare)} points`, marks: [{ bar: [before, middle], color: fromShare < 0 ? 2 : 5 }], details: comparison.contributions.map((one) => ({ name: one.strategy, value: `${Format.points(one.from_share)} points` })) },
        { label: "accuracy within", value: `${Format.points(fromAccuracy)} points`, marks: [{ bar: [middle, middle + fromAccuracy], color: fromAccuracy < 0 ? 2 : 3 }], details: comparison.contributions.map((one) => ({ name: one.strategy, value: `${Format.points(one.from_accuracy)} points` })) },
        { label: comparison.after_label, value: Format.percent(after), strong: true, marks: [{ bar: [0, after], color: 1 }], details: [{ name: "pass@1", value: Format.percent(after) }] },
      ],
    });
    const rows = [...comparison.contributions, { strategy: "all", share: [null, null], accuracy: comparison.accuracy, from_share: fromShare, from_accuracy: fromAccuracy }];
    return section(
      "climb",
      "What climbed",
      data.headline.explanation,
      h("div", { class: "tiles two" }, waterfall, h("div", { class: "stack" }, dumbbell("How often each strategy is chosen", (one) => one.share, "shares"), dumbbell("How often it is right when chosen", (one) => one.accuracy, "accuracies"))),
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
    const grades = [...new Set(shown.flatMap((evaluation) => evaluation.by_difficulty.map((row) => row[0])))].sort((a, b) => a - b);
    const palette = (index, total) => (total === 1 ? 1 : index === total - 1 ? 1 : index === total - 2 ? 2 : 7);
    if (shown.length) {
      nodes.push(
        Charts.lines({
          key: "difficulty",
          title: "pass@1 by difficulty",
          note: "Difficulty as the environment grades its tasks; each point is the mean over the tasks of that grade.",
          height: 230,
          x: { label: "difficulty", name: "difficulty", format: (value) => Format.number(value), ticks: grades.length <= 12 ? grades : undefined },
          y: unit,
          quietLegend: true,
          showLegend: true,
          series: shown.map((evaluation, index) => ({ name: evaluation.label, x: evaluation.by_difficulty.map((row) => row[0]), y: evaluation.by_difficulty.map((row) => row[2]), color: palette(index, shown.length), points: true, hollow: index !== shown.length - 1 })),
        }),
      );
    }
    if (passes.length > 2) {
      nodes.push(
        Charts.lines({
          key: "passk",
          title: "What more samples would find",
          note: "pass@k: the chance that at least one of k samples is right, by the unbiased estimator.",
          height: 230,
          x: { label: "k", name: "k =", format: Format.integer, ticks: passes.map((name) => Number(name.slice(5))) },
          y: unit,
          quietLegend: true,
          showLegend: true,
          series: data.evaluations.map((evaluation, index) => {
            const known = passes.filter((name) => evaluation.measures[name]);
            return { name: evaluation.label, x: known.map((name) => Number(name.slice(5))), y: known.map((name) => evaluation.measures[name][0]), low: known.map((name) => evaluation.measures[name][1]), high: known.map((name) => evaluation.measures[name][2]), color: palette(index, data.evaluations.length), points: true, hollow: index !== data.evaluations.length - 1 };
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
          title: "Tasks by how often they are solved",
          note: "Each task's share of right samples. Tasks near 0% or 100% mostly make dead groups: when every sample earns the same, comparing them teaches nothing.",
          height: 230,
          mode: "grouped",
          x: { centers: rates.values, width: rates.width, ticks: rates.values.length <= 21 ? rates.values : undefined, label: "share of samples that are right", format: Format.percent, tick: (value) => `${Math.round(100 * value)}%`, name: "solved in" },
          y: { format: Format.integer },
          series: rates.evaluations.map((one, index) => ({ name: one.label, values: one.counts, color: palette(index, total) })),
        }),
      );
    }
    if (data.objective) {
      const { objective } = data;
      nodes.push(
        Charts.lines({
          key: "objective",
          title: `What ${objective.label} pays attention to`,
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
        x: { centers: data.lengths.centers, width: data.lengths.width, label: "tokens", format: (value) => binLabel(value, data.lengths.width), tick: (value) => Format.integer(value) },
        y: { format: Format.integer, domain: data.lengths.domain },
        series: [
          { name: "right", values: one.right, color: 1 },
          { name: "wrong", values: one.wrong, color: 2 },
        ],
      }),
    );
    if (!nodes.length && !lengths.length) return null;
    return section(
      "tasks",
      "Tasks and answers",
      "Where the gain lies: which tasks moved, which the learning rule looks at, and how long right and wrong answers are.",
      h("div", { class: "tiles two" }, nodes),
      lengths.length ? [part("Length of right and wrong answers", "Right answers upwards, wrong ones downwards, on one scale. Long wrong answers that end at the right edge were cut off by the token limit."), h("div", { class: "tiles" }, lengths)] : null,
    );
  }

  function binLabel(center, width) {
    if (width <= 1) return `${Format.integer(center)} tokens`;
    return `${Math.ceil(center - width / 2)} to ${Math.ceil(center + width / 2) - 1} tokens`;
  }

  // -------------------------------------------------------------------------------------- curves
  const x = { label: "step", name: "step", integer: true };

  function curvesOf(training) {
    const group = `training-${training.stage}`;
    const pick = Episodes.has(training.stage) ? (step) => Episodes.open(training.stage, step) : undefined;
    const charts = [];
    const steady = [];
    const add = (key, title, note, names, y = {}, more = {}) => {
      const series = seriesOf(training, names).filter((one) => one.y.some((value) => value !== null));
      if (!series.length) return;
      if (training.steps_total > 1 && series.every((one) => one.y.every((value) => value === one.y[0]))) {
        const format = y.format || Format.number;
        steady.push(h("figure", { class: "chart steady", "data-chart": `${training.stage}-${key}` }, h("h4", {}, title), series.map((one) => h("p", {}, format(one.y[0]), h("small", {}, series.length > 1 ? `${one.name}, at every step` : "at every step"))), h("figcaption", {}, note)));
        return;
      }
      charts.push(Charts.lines({ key: `${training.stage}-${key}`, title, note, x, y, series, group, smooth: true, pick, showLegend: true, ...more }));
    };
    if (training.task !== "rl") {
      add("loss", "Loss", "Mean cross-entropy of the trace's tokens, in nats. 0 would be certainty.", [["loss", "loss", 1]], { log: true });
    }
    const isSameCurve = training.columns.reward && training.columns.pass_rate && training.columns.reward.every((value, index) => value === training.columns.pass_rate[index]);
    add(
      "reward",
      "Reward and pass rate",
      isSameCurve ? "Mean over the step's samples. Reward and pass rate are the same number here: the reward is 1 for a right answer and 0 otherwise." : "Mean reward of the step's samples, and the share that passed.",
      [["reward", "reward", 1], ...(isSameCurve ? [] : [["pass_rate", "pass rate", 3]])],
      isSameCurve ? unit : percent,
    );
    const strategies = Object.keys(training.columns).filter((key) => key.startsWith("strategy/"));
    const names = strategies.map((key) => key.slice("strategy/".length));
    const hues = [1, 2, 3, 4, 5, 6];
    add("shares", "Share of each strategy", "How the policy attacks its tasks, as the environment recognises it.", names.map((name, index) => [`strategy/${name}`, name, hues[index % 6]]), unit);
    add("accuracies", "Accuracy within each strategy", "How often a strategy is right when it is chosen. Gaps: not chosen at that step.", names.map((name, index) => [`accuracy/${name}`, name, hues[index % 6]]), unit);
    add("entropy", "Entropy", "Mean entropy of the next-token distribution, in nats. A fall to zero means no more variety to learn from.", [["entropy", "entropy", 4]], { log: true });
    add("dead", "Dead groups", "Share of groups in which every sample earned the same; they give no gradient.", [["dead_groups", "dead groups", 2]], unit);
    add("length", "Length", "Mean tokens in an answer, end-of-sequence included.", [["length", "length", 1]], { format: (value) => Format.number(value, 4) });
    add("truncated", "Truncated answers", "Share cut off by the token limit.", [["truncated", "truncated", 2]], percent);
    add("kl", "KL divergence", "Behaviour: between the policy that sampled and the one that learns, estimated on the samples. Reference: from the checkpoint where RL began.", [["kl_behaviour", "behaviour", 1], ["kl_reference", "reference", 3]], { log: true });
    add("clip", "Clipped tokens", "Share of tokens whose probability ratio left the trust region and gave no gradient.", [["clip_fraction", "clip fraction", 5]], percent);
    add("gap", "Engine–learner log-prob gap", "Largest and mean |log p| difference between sampling and learning code on the same tokens and weights. Zero means the two agree bit for bit.", [["logprob_gap_max", "largest", 2], ["logprob_gap_mean", "mean", 1]], { log: true });
    add("staleness", "Staleness", "How many weight updates lie between sampling a token and learning from it.", [["staleness", "staleness", 7]]);
    add("grad", "Gradient norm", "Before clipping.", [["grad_norm", "gradient norm", 4]], { log: true });
    add("lr", "Learning rate", "As scheduled.", [["lr", "learning rate", 7]], { format: (value) => Format.number(value, 4) });
    add("reward_std", "Spread of rewards", "Mean standard deviation of rewards within a group.", [["reward_std", "std", 6]]);
    add("failures", "Verifier failures", "Samples whose verifier failed; they leave their group and are never counted as zero.", [["failures", "failures", 2]], { format: Format.integer, integer: true });
    return charts.length || steady.length ? [charts, steady] : null;
  }

  function curves() {
    const groups = data.training.map((training) => [training, curvesOf(training)]).filter(([, found]) => found);
    if (!groups.length) return null;
    const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "Smoothing" });
    const shown = h("output", {}, "off");
    slider.addEventListener("input", () => {
      shown.textContent = Number(slider.value) ? Number(slider.value).toFixed(2) : "off";
      Charts.smooth(Number(slider.value));
    });
    return section(
      "curves",
      "Training curves",
      "Every step of every training stage. Move over a chart to read all charts at the same step; arrow keys do the same.",
      h("div", { class: "toolbar" }, h("label", { class: "control" }, "Smoothing", slider, shown), h("span", { class: "muted" }, h("small", {}, "Smoothing draws a moving average over the faint exact line; tooltips always give exact figures."))),
      groups.map(([training, [charts, steady]]) => [
        part(`${training.stage}`, [training.description, training.steps_kept < training.steps_total ? ` Shown: every ${Math.round(training.steps_total / training.steps_kept)}th of ${training.steps_total} steps.` : "", Episodes.has(training.stage) ? " Click a chart to read that step's episodes." : ""].join("")),
        h("div", { class: charts.length === 4 ? "tiles two" : "tiles" }, charts),
        steady.length ? h("div", { class: "tiles small" }, steady) : null,
      ]),
    );
  }

  // ------------------------------------------------------------------------------ time, hardware
  const PARTS = [["sampling", 1], ["scoring", 5], ["learning", 2], ["other", 7]];

  function time() {
    const nodes = [];
    const timed = data.stages.filter((stage) => stage.seconds !== null);
    if (timed.length) {
      const total = timed.reduce((sum, stage) => sum + stage.seconds, 0);
      let from = 0;
      nodes.push(
        Charts.rows({
          key: "timeline",
          title: `Stages, ${Format.seconds(total)} in all`,
                    rowHeight: 28,
          x: { domain: [0, total || 1], format: Format.seconds, tick: (value) => (value ? Format.seconds(value) : "0"), label: "time in stages, end to end" },
          rows: timed.map((stage) => {
            const start = from;
            from += stage.seconds;
            return { label: stage.name, value: Format.seconds(stage.seconds), marks: [{ bar: [start, from], color: stage.task === "rl" ? 2 : stage.task === "evaluate" ? 3 : stage.task === "sft" ? 1 : 7 }], details: [{ name: "task", value: stage.task }, { name: "time", value: Format.seconds(stage.seconds) }, { name: "share", value: Format.percent(stage.seconds / total) }] };
          }),
        }),
      );
    }
        const order = data.stages.map((stage) => stage.name);
    const split = [...data.training, ...data.timed_evaluations].filter((one) => one.totals).sort((a, b) => order.indexOf(a.stage) - order.indexOf(b.stage));
    if (split.length) {
      const longest = Math.max(...split.map((one) => PARTS.reduce((sum, [name]) => sum + (one.totals[name] || 0), 0)));
      nodes.push(
        Charts.rows({
          key: "split",
          title: "Where the seconds went",
          legend: PARTS.map(([name, index]) => ({ name, color: index })),
          rowHeight: 30,
          x: { domain: [0, longest * 1.02 || 1], format: Format.seconds, tick: (value) => (value ? Format.seconds(value) : "0") },
          rows: split.map((one) => {
            let from = 0;
            const total = PARTS.reduce((sum, [name]) => sum + (one.totals[name] || 0), 0);
            return {
              label: one.stage,
              value: Format.seconds(total),
              marks: PARTS.map(([name, index]) => ({ bar: [from, (from += one.totals[name] || 0)], color: index })),
              details: PARTS.map(([name, index]) => ({ name, color: index, value: `${Format.seconds(one.totals[name] || 0)} · ${Format.percent((one.totals[name] || 0) / total)}` })),
            };
          }),
        }),
      );
    }
    const perStep = data.training.filter((training) => training.timings.step).flatMap((training) => {
      const { step } = training.timings;
      const width = step.length > 1 ? Math.min(...step.slice(1).map((value, index) => value - step[index])) : 1;
      const parts = PARTS.filter(([name]) => training.timings[name] && training.timings[name].some((value) => value > 0));
      return [
        parts.length
          ? Charts.bars({ key: `${training.stage}-steptime`, title: `Time of a step: ${training.stage}`, mode: "stacked", total: true, x: { centers: step, width, label: "step", name: "step", integer: true, format: Format.integer }, y: { format: Format.seconds, tick: (value) => (value ? Format.seconds(value) : "0") }, series: parts.map(([name, index]) => ({ name, values: training.timings[name], color: index })) })
          : null,
        training.timings.tokens_per_second && training.timings.tokens_per_second.some((value) => value > 0)
          ? Charts.lines({ key: `${training.stage}-throughput`, title: `Tokens per second: ${training.stage}`, x, y: { format: Format.integer }, showLegend: true, smooth: true, group: `training-${training.stage}`, series: [{ name: training.task === "rl" ? "sampled tokens/s" : "tokens/s", x: step, y: training.timings.tokens_per_second, color: 3 }] })
          : null,
      ];
    });
    const hardware = data.hardware ? hardwareCharts(data.hardware) : [];
    if (!nodes.length && !perStep.some(Boolean) && !hardware.some(Boolean)) return null;
    return section(
      "time",
      "Time and machine",
      data.machine_sentence,
      h("div", { class: "tiles two" }, nodes),
      perStep.some(Boolean) ? [part("Step by step"), h("div", { class: "tiles two" }, perStep)] : null,
      hardware.some(Boolean) ? [part("Hardware", data.hardware.note), h("div", { class: "tiles two" }, hardware)] : null,
    );
  }

  function hardwareCharts({ columns, bands }) {
    const axis = { label: "time in stages, end to end", name: "at", format: Format.seconds, tick: (value) => (value ? Format.seconds(value) : "0") };
    const percentOf = { format: (value) => `${Format.number(value, 3)}%`, domain: [0, 112] };
    const gpus = Object.keys(columns).filter((name) => name.endsWith("_utilisation")).map((name) => name.replace("_utilisation", ""));
    const chart = (key, title, note, y, names) => {
      const series = names.filter(([column]) => columns[column]).map(([column, name, index]) => ({ name, x: columns.seconds, y: columns[column], color: index }));
      return series.length ? Charts.lines({ key, title, note, x: axis, y, series, bands, group: "hardware", showLegend: true, height: 200 }) : null;
    };
    return [
      chart("cpu", "Processor", "Percent of all cores. The machine may have had other work to do.", percentOf, [["process_cpu", "this run", 1], ["cpu", "whole machine", 7]]),
      chart("memory", "Memory", "Resident memory of the run's processes, and what the machine used in all.", { format: bytes }, [["rss", "this run", 1], ["memory", "whole machine", 7]]),
      chart("gpu", "GPU use", null, percentOf, gpus.map((name, index) => [`${name}_utilisation`, name, (index % 8) + 1])),
      chart("gpu-memory", "GPU memory", null, { format: bytes }, gpus.map((name, index) => [`${name}_memory`, name, (index % 8) + 1])),
    ];
  }

  // ---------------------------------------------------------------------------------- provenance
  function provenance() {
    const columns = [
      { name: "Stage", header: true, value: (row) => [row.name, h("small", {}, row.task)] },
      { name: "Run", text: true, value: (row) => h("span", { class: "mono" }, row.run_id || "–") },
      { name: "State", text: true, value: (row) => [h("span", { class: `state ${row.state}` }, row.state), row.cause ? h("small", {}, row.cause) : null] },
      { name: "Attempts", value: (row) => Format.integer(row.attempts) },
      { name: "Bundle digest", text: true, value: (row) => h("span", { class: "mono", title: row.digest || "" }, row.digest ? row.digest.slice(0, 16) : "–") },
      { name: "Time", value: (row) => Format.seconds(row.seconds) },
    ];
    const block = (title, hint, ...nodes) => h("details", {}, h("summary", {}, title, hint ? h("span", { class: "muted" }, hint) : null), h("div", {}, nodes));
    const { provenance: source } = data;
    return section(
      "provenance",
      "Provenance",
      "What was run, with what, and how to run it again. Facts are as observed by the run itself, not as declared.",
      table(columns, data.stages, "Runs"),
      h(
        "div",
        {},
        block("Verify and reproduce", "commands", h("p", { class: "lead" }, "Verification recomputes every digest; reproduction runs the frozen bundle again and compares metrics, episodes and the final checkpoint."), copyable(source.commands)),
        source.recipe ? block("Recipe", "as resolved, every default filled in", copyable(source.recipe)) : null,
        source.machine.length ? block("Machine", source.machine_name, definitions(source.machine)) : null,
        source.software.length ? block("Software", source.software_name, definitions(source.software), source.packages.length ? [h("h3", { class: "part" }, `Packages (${source.packages.length})`), h("div", { class: "columns" }, source.packages.map(([name, version]) => h("div", {}, h("span", {}, name), h("span", { class: "mono muted" }, version))))] : null) : null,
        data.stages.map((stage) => block(`Run of ${stage.name}`, stage.task, definitions(stage.facts), stage.summary ? [h("h3", { class: "part" }, "summary.json"), copyable(stage.summary)] : null, stage.spec ? [h("h3", { class: "part" }, "job.json"), copyable(stage.spec)] : null, stage.log ? [h("h3", { class: "part" }, "End of the log"), h("pre", { tabindex: 0 }, stage.log)] : null)),
      ),
    );
  }

  // --------------------------------------------------------------------------------- page chrome
  function theme() {
    const button = document.getElementById("theme");
    const order = ["auto", "light", "dark"];
    let current = "auto";
    try {
      current = localStorage.getItem("perilune-theme") || "auto";
    } catch {
      // a file opened in a strict browser has no storage; the choice then lasts as long as the page
    }
    const apply = () => {
      if (current === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = current;
      button.textContent = current;
      button.ariaLabel = `Colour scheme: ${current}`;
    };
    button.addEventListener("click", () => {
      current = order[(order.indexOf(current) + 1) % order.length];
      try {
        localStorage.setItem("perilune-theme", current);
      } catch {
        // as above
      }
      apply();
    });
    apply();
  }

  function navigation() {
    const nav = document.getElementById("nav");
    const links = new Map();
    for (const element of document.querySelectorAll("main > section")) {
      const link = h("a", { href: `#${element.id}` }, element.querySelector("h2").textContent);
      links.set(element, link);
      nav.append(link);
    }
    const mark = () => {
      let current = null;
      for (const element of links.keys()) if (element.getBoundingClientRect().top < 130) current = element;
      for (const [element, link] of links) {
        if (element === current) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    };
    addEventListener("scroll", () => requestAnimationFrame(mark), { passive: true });
    mark();
  }

  function build() {
    theme();
    document.getElementById("main").append(...[hero(), facts(), notices(), evaluations(), climb(), tasksSection(), curves(), time(), Episodes.section(section), provenance()].flat().filter(Boolean));
    document.getElementById("footer").append(data.footer);
    navigation();
  }

  return { data, build };
})();

Report.build();
