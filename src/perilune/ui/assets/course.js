// Training curves, time and hardware.
"use strict";

const Course = ((data) => {
  const { section, part, table } = Page;
  const percent = { format: Format.percent, tick: Format.percentTick };
  const unit = { domain: [0, 1], ...percent };

  // -------------------------------------------------------------------------------- horizontal axis
  const AXES = {
    step: { label: "step", name: "step", integer: true, time: false, format: Format.integer },
    tokens: { label: "tokens", name: "tokens", integer: true, time: false, format: Format.integer },
    seconds: { label: "time of the steps", name: "", integer: false, time: true, format: Format.seconds },
  };
  const x = { ...AXES.step };
  let axis = "step";

  // Where each step lies on the axis. The server counts; rows that arrived since are added here.
  function reached(training) {
    const { columns, timings } = training;
    const known = columns[`reached/${axis}`];
    if (axis === "step" || !known) return columns.step;
    const spent = (place) => {
      if (axis === "tokens") return columns.tokens?.[place] || 0;
      const row = timings.step ? timings.step.indexOf(columns.step[place]) : -1;
      return row < 0 ? 0 : PARTS.reduce((total, [part]) => total + (timings[part]?.[row] || 0), 0);
    };
    let last = 0;
    return columns.step.map((_, place) => (last = known[place] ?? last + spent(place)));
  }
  const stepAt = (training, value) => training.columns.step[reached(training).indexOf(value)];

  function axisControl() {
    const offered = Object.keys(AXES).filter(
      (name) => name === "step" || data.training.every((training) => training.columns[`reached/${name}`]),
    );
    if (offered.length === 1) return null;
    const choice = h("select", { "aria-label": "Horizontal axis" }, offered.map((name) => h("option", { value: name }, name)));
    choice.addEventListener("change", () => {
      axis = choice.value;
      Object.assign(x, AXES[axis]);
      for (const { stage } of data.training) for (const group of [`training-${stage}`, `main-${stage}`]) Charts.zoom(group, null);
    });
    return h("label", { class: "control" }, "Axis", choice);
  }

  const seriesOf = (training, names) =>
    names
      .filter(([key]) => training.columns[key])
      .map(([key, name, index, more]) => {
        const column = training.columns[key];
        if (!key.startsWith("eval/")) return { name, x: reached(training), y: column, color: index, ...more };
        // Evaluations are rare: their line joins them across the steps between.
        const places = column.map((value, place) => place).filter((place) => column[place] !== null);
        const at = (values) => values && places.map((place) => values[place]);
        const [low, high] = [at(training.columns[`${key}/low`]), at(training.columns[`${key}/high`])];
        return { name, x: at(reached(training)), y: at(column), low, high, color: index, points: true, ...more };
      });

  // -------------------------------------------------------------------------------------- curves
  // The charts of a stage, or with `only` "shape" a text that changes when other charts are needed.
  function curvesOf(training, only) {
    const shape = [];
    const group = `training-${training.stage}`;
    const pick = Episodes.has(training.stage) ? (value) => Episodes.open(training.stage, stepAt(training, value)) : undefined;
    const charts = [];
    const steady = [];
    const add = (key, title, note, names, y = {}, more = {}) => {
      const read = () => seriesOf(training, names).filter((one) => one.y.some((value) => value !== null));
      const series = read();
      if (!series.length) return;
      const isSteady = training.steps_total > 1 && series.every((one) => one.y.every((value) => value === one.y[0]));
      shape.push(`${key} ${isSteady} ${series.length}`);
      if (only === "shape") return;
      if (isSteady) {
        const format = y.format || Format.number;
        steady.push(
          h(
            "figure",
            { class: "chart steady", "data-chart": `${training.stage}-${key}` },
            h("h4", {}, title),
            series.map((one) =>
              h(
                "p",
                {},
                format(one.y[0]),
                h("small", {}, series.length > 1 ? `${one.name}, at every step` : "at every step"),
              ),
            ),
            h("figcaption", {}, note),
          ),
        );
        return;
      }
      charts.push(
        Charts.lines({
          key: `${training.stage}-${key}`,
          title,
          note,
          x,
          y,
          series: read,
          group,
          smooth: true,
          pick,
          showLegend: true,
          ...more,
        }),
      );
    };
    const losses = {
      sft: "Mean cross-entropy of the trace's tokens, in nats. 0 means certainty.",
      preference: "Mean over the pairs of the step, and over the held-out pairs.",
      reward_model: "Mean over the step's pairs, in nats. 0.69 means chance.",
      distill: "Mean over the tokens that the student sampled.",
    };
    const sets = Object.keys(training.columns).filter((key) => /^eval\/[^/]+\/pass@1$/.test(key));
    add(
      "held-out",
      "Held-out tasks and training",
      "Share of right answers on held-out tasks, with 95% intervals, beside that of the training steps.",
      sets.length
        ? [["pass_rate", "training", 7], ...sets.map((key, index) => [key, key.split("/")[1], [3, 4, 2, 5, 6][index % 5]])]
        : [],
      unit,
    );
    if (training.task !== "rl" && training.task !== "selfplay") {
      add(
        "loss",
        "Loss",
        losses[training.task] || "As defined by the task.",
        [
          ["loss", "loss", 1],
          ["validation_loss", "held out", 3],
          ["eval/data/loss", "held-out data", 3],
        ],
        training.task === "distill" ? {} : { log: true },
      );
    }
    add(
      "pairs",
      "Accuracy on pairs",
      "Share of pairs whose better answer is preferred.",
      [
        ["accuracy", "accuracy", 1],
        ["validation_accuracy", "held out", 3],
      ],
      unit,
    );
    add("margin", "Margin", "Difference of the implicit rewards of the two answers of a pair; 0 at the start.", [
      ["margin", "margin", 1],
      ["validation_margin", "held out", 3],
    ]);
    add(
      "chosen",
      "Chosen answers",
      "Change of the chosen answers' own log-prob, in nats per token. If it is below −0.05 while margins grow, chosen answers become less likely too.",
      [
        ["chosen_shift", "change", 1],
        ["validation_chosen_shift", "held out", 3],
      ],
    );
    add("rewards", "Implicit rewards", "β times the change of log-prob since the start.", [
      ["reward_chosen", "chosen", 1],
      ["reward_rejected", "rejected", 2],
    ]);
    add(
      "length_bias",
      "Length bias",
      "Correlation of the difference in length with the preference. Near 1, length alone predicts the preference.",
      [["length_correlation", "correlation", 6]],
    );
    add(
      "gold",
      "Gold score and reward",
      "The policy is not trained on the gold score. If its slope is no longer clearly above zero, the policy overoptimizes the reward.",
      training.columns.gold
        ? [
            ["gold", "gold", 3],
            ["reward", "reward", 1],
          ]
        : [],
    );
    add("gold_slope", "Slope of the gold score", "Change per step over the last 16 steps, with its 95% interval.", [
      ["gold_slope", "slope", 3],
      ["gold_slope_low", "low", 7],
      ["gold_slope_high", "high", 7],
    ]);
    add("distance", "Distance from the start", "Square root of the KL divergence from the starting policy, per answer.", [
      ["distance", "distance", 4],
      ["gold_peak", "fitted peak of gold", 2],
    ]);
    add(
      "teacher",
      "Disagreement with the teacher",
      "Mean of log p − log q over the student's own tokens, and the mean difference of the two entropies, in nats.",
      [
        ["reverse_kl", "reverse KL", 1],
        ["entropy_gap", "entropy gap", 4],
      ],
    );
    add(
      "overlap",
      "Overlap with the teacher",
      "Share of the student's k most likely tokens that are among the teacher's; and the probability that each gives to the shared tokens.",
      [
        ["overlap_ratio", "overlap", 1],
        ["overlap_mass_student", "student's mass", 3],
        ["overlap_mass_teacher", "teacher's mass", 4],
      ],
      unit,
    );
    add(
      "overlap_advantage",
      "Overlap-token advantage",
      "−KL of the two distributions on the shared tokens, over how many those are; it rises to 0 as the student follows.",
      [["overlap_advantage", "advantage", 1]],
    );
    const isSameCurve =
      training.columns.reward &&
      training.columns.pass_rate &&
      training.columns.reward.every((value, index) => value === training.columns.pass_rate[index]);
    add(
      "reward",
      "Reward and pass rate",
      isSameCurve
        ? "Mean over the step's samples. Reward and pass rate are equal here: the reward is 1 for a right answer and 0 otherwise."
        : "Mean reward of the step's samples, and the share that passed.",
      [["reward", "reward", 1], ...(isSameCurve ? [] : [["pass_rate", "pass rate", 3]])],
      isSameCurve ? unit : percent,
    );
    const hues = [1, 2, 3, 4, 5, 6];
    const named = (prefix) =>
      Object.keys(training.columns)
        .filter((key) => key.startsWith(prefix))
        .map((key) => key.slice(prefix.length));
    add("elo", "Elo", "Ratings of the frozen policies from all matches so far, with 95% intervals; a random player has 0.", [
      ["elo", "rating", 1],
      ["elo/low", "low", 7],
      ["elo/high", "high", 7],
    ]);
    add(
      "exploitability",
      "Exploitability",
      "Mean gain of a best response to the policy, over all seats. 0 is an equilibrium.",
      [["exploitability", "exploitability", 2]],
    );
    add(
      "against",
      "Matches",
      "Mean return of the frozen policies on held-out tasks.",
      named("against/")
        .filter((name) => !name.includes("/"))
        .map((name, index) => [`against/${name}`, name, hues[index % 6]]),
    );
    add(
      "games",
      "How games ended",
      "Share of games that were drawn, ended by an illegal move, or were truncated.",
      [
        ["drawn", "drawn", 1],
        ["illegal", "illegal move", 2],
        ["unfinished", "truncated", 5],
      ],
      unit,
    );
    add(
      "seats",
      "Won by each player",
      "Share of the games of the step, by seat.",
      named("seat/")
        .filter((name) => name.endsWith("/won"))
        .map((name, index) => [`seat/${name}`, `player ${name.split("/")[0]}`, hues[index % 6]]),
      unit,
    );
    add("openings", "Openings", "Effective number of first moves (exponential of their entropy).", [
      ["openings", "first moves", 4],
    ]);
    add(
      "terms",
      "Reward terms",
      "Scores of the verifier and the reward functions, before weighting.",
      named("term/")
        .filter((name) => name !== "learned")
        .map((name, index) => [`term/${name}`, name, hues[index % 6]]),
    );
    add("learned", "Learned reward", "Score of the reward model, before weighting.", [
      ["term/learned", "learned", 1],
    ]);
    const parts = Object.keys(training.columns)
      .map((key) => key.match(/(?:^|\/)environment\/([^/]+)\//))
      .filter(Boolean)
      .map((found) => found[1]);
    const sortedParts = [...new Set(parts)].sort(); // a part has the same colour in all charts
    const ofParts = (before, after) =>
      sortedParts.map((name, index) => [`${before}environment/${name}/${after}`, name, hues[index % 6]]);
    add(
      "environments",
      "Pass rate by environment",
      "Share of right answers in each environment of the mixture. Gaps: no task of it in that step.",
      ofParts("", "pass_rate"),
      unit,
    );
    add(
      "environments-held-out",
      "Held-out tasks by environment",
      "Share of right answers on the held-out tasks of each environment, with 95% intervals.",
      ofParts("eval/heldout/", "pass@1"),
      unit,
    );
    add(
      "environments-dead",
      "Dead groups by environment",
      "Share of each environment's groups with equal rewards, which give no gradient.",
      ofParts("", "dead_groups"),
      unit,
    );
    const names = named("strategy/");
    add(
      "shares",
      "Share of each strategy",
      "Strategies of the answers, as recognised by the environment.",
      names.map((name, index) => [`strategy/${name}`, name, hues[index % 6]]),
      unit,
    );
    add(
      "accuracies",
      "Accuracy within each strategy",
      "Share of right answers among those with the strategy. Gaps: no such answer at that step.",
      names.map((name, index) => [`accuracy/${name}`, name, hues[index % 6]]),
      unit,
    );
    add(
      "entropy",
      "Entropy",
      "Mean entropy of the next-token distribution, in nats. At zero, all samples of a prompt are equal and there is nothing to learn.",
      [["entropy", "entropy", 4]],
      { log: true },
    );
    add(
      "dead",
      "Dead groups",
      "Share of groups with equal rewards, which give no gradient.",
      [["dead_groups", "dead groups", 2]],
      unit,
    );
    add("length", "Length", "Mean tokens per answer, with the end-of-sequence token.", [["length", "length", 1]], {
      format: (value) => Format.number(value, 4),
    });
    add(
      "truncated",
      "Truncated answers",
      "Share of answers that the token limit truncated.",
      [["truncated", "truncated", 2]],
      percent,
    );
    add(
      "kl",
      "KL divergence",
      "Behaviour: between the sampling policy and the learner, estimated on the samples. Reference: from the checkpoint where RL started.",
      [
        ["kl_behaviour", "behaviour", 1],
        ["kl_reference", "reference", 3],
      ],
      { log: true },
    );
    add(
      "clip",
      "Clipped tokens",
      "Share of tokens whose importance ratio was clipped, so that they give no gradient.",
      [["clip_fraction", "clip fraction", 5]],
      percent,
    );
    add(
      "gap",
      "Engine–learner log-prob gap",
      "Largest and mean difference between the log-probs of the engine and the learner, for the same tokens and weights. Zero means bitwise agreement.",
      [
        ["logprob_gap_max", "largest", 2],
        ["logprob_gap_mean", "mean", 1],
      ],
      { log: true },
    );
    add("staleness", "Staleness", "Weight updates between sampling a token and training on it.", [
      ["staleness", "staleness", 7],
    ]);
    add("grad", "Gradient norm", "Before clipping.", [["grad_norm", "gradient norm", 4]], { log: true });
    add("lr", "Learning rate", "From the schedule.", [["lr", "learning rate", 7]], {
      format: (value) => Format.number(value, 4),
    });
    add("reward_std", "Spread of rewards", "Mean standard deviation of rewards within a group.", [
      ["reward_std", "std", 6],
    ]);
    add(
      "failures",
      "Failed episodes",
      "Episodes without a score, by cause. They are excluded from their group and never count as zero.",
      [
        ["failures", "all", 2],
        ["failures/verifier", "verifier", 6],
        ["failures/environment", "environment", 4],
        ["failures/model", "model", 3],
        ["failures/sandbox", "sandbox", 5],
      ],
      { format: Format.integer, integer: true },
    );
    if (only === "shape") return shape.join("\n");
    return charts.length || steady.length ? [charts, steady] : null;
  }

  const drawn = new Map(); // stage -> the shape of its charts
  const block = (training) => {
    const [charts, steady] = curvesOf(training);
    drawn.set(training.stage, curvesOf(training, "shape"));
    const thinned =
      training.steps_kept < training.steps_total
        ? ` Shown: every ${Math.round(training.steps_total / training.steps_kept)}th of ${training.steps_total} steps.`
        : "";
    const hint = Episodes.has(training.stage) ? " Click a chart to read that step's episodes." : "";
    return h(
      "div",
      { "data-stage": training.stage },
      part(training.stage, `${training.description}${thinned}${hint}`),
      h("div", { class: charts.length === 4 ? "tiles two" : "tiles" }, charts),
      steady.length ? h("div", { class: "tiles small" }, steady) : null,
    );
  };

  // The main curve of the last training, for a head without evaluations; null without training.
  function mainChart(height) {
    const training = [...data.training].reverse().sort((a, b) => (b.task === "rl") - (a.task === "rl"))[0];
    if (!training) return null;
    const sets = Object.keys(training.columns).filter((key) => /^eval\/[^/]+\/pass@1$/.test(key));
    const names = training.columns.reward
      ? [["reward", "reward", 1], ...sets.map((key) => [key, key.split("/")[1], 3])]
      : [["loss", "loss", 1], ["validation_loss", "held out", 3]];
    return Charts.lines({
      key: "main",
      title: `${training.columns.reward ? "Reward" : "Loss"} in stage ${training.stage}`,
      note: "All steps as they were recorded, without smoothing.",
      height,
      x,
      y: {},
      series: () => seriesOf(training, names).filter((one) => one.y.some((value) => value !== null)),
      group: `main-${training.stage}`,
      showLegend: true,
    });
  }

  // Draw the curves of a stage again after its columns have grown.
  function update(stage) {
    const training = data.training.find((one) => one.stage === stage);
    const group = `training-${stage}`;
    Charts.refresh(`main-${stage}`);
    if (drawn.get(stage) === curvesOf(training, "shape")) return Charts.refresh(group);
    const old = [...document.querySelectorAll("#curves [data-stage]")].find((one) => one.dataset.stage === stage);
    Charts.forget(group);
    return old && old.replaceWith(block(training));
  }

  function curves() {
    const trained = data.training.filter((training) => curvesOf(training, "shape"));
    if (!trained.length) return null;
    const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "Smoothing" });
    const shown = h("output", {}, "off");
    slider.addEventListener("input", () => {
      shown.textContent = Number(slider.value) ? Number(slider.value).toFixed(2) : "off";
      Charts.smooth(Number(slider.value));
    });
    return section(
      "curves",
      "Training curves",
      "All steps of all training stages. Point at a chart, or use the arrow keys, to read all charts at the same step. Drag over a range, or press z, to look closer; 0 shows the whole range.",
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "control" }, "Smoothing", slider, shown),
        axisControl(),
        h(
          "span",
          { class: "muted" },
          h(
            "small",
            {},
            "Smoothing draws a moving average over the exact values; tooltips always show exact values.",
          ),
        ),
      ),
      trained.map(block),
    );
  }

  // ------------------------------------------------------------------------------ time, hardware
  const PARTS = [
    ["sampling", 1],
    ["scoring", 5],
    ["learning", 2],
    ["other", 7],
  ];

  const clock = { time: true, format: Format.seconds, tick: (value) => (value ? Format.seconds(value) : "0") };
  const spent = ({ totals }) => PARTS.reduce((sum, [name]) => sum + (totals[name] || 0), 0);

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
          x: {
            domain: [0, total || 1],
            ...clock,
            label: "time in stages, end to end",
          },
          rows: timed.map((stage) => {
            const start = from;
            from += stage.seconds;
            return {
              label: stage.name,
              value: Format.seconds(stage.seconds),
              marks: [
                {
                  bar: [start, from],
                  color: stage.task === "rl" ? 2 : stage.task === "evaluate" ? 3 : stage.task === "sft" ? 1 : 7,
                },
              ],
              details: [
                { name: "task", value: stage.task },
                { name: "time", value: Format.seconds(stage.seconds) },
                { name: "share", value: Format.percent(stage.seconds / total) },
              ],
            };
          }),
        }),
      );
    }
    const order = data.stages.map((stage) => stage.name);
    const split = [...data.training, ...data.timed_evaluations]
      .filter((one) => one.totals)
      .sort((a, b) => order.indexOf(a.stage) - order.indexOf(b.stage));
    if (split.length) {
      const longest = Math.max(...split.map(spent));
      nodes.push(
        Charts.rows({
          key: "split",
          title: "Time by part",
          legend: PARTS.map(([name, index]) => ({ name, color: index })),
          rowHeight: 30,
          x: {
            domain: [0, longest * 1.02 || 1],
            ...clock,
          },
          rows: split.map((one) => {
            let from = 0;
            const total = spent(one);
            return {
              label: one.stage,
              value: Format.seconds(total),
              marks: PARTS.map(([name, index]) => ({ bar: [from, (from += one.totals[name] || 0)], color: index })),
              details: PARTS.map(([name, index]) => ({
                name,
                color: index,
                value: `${Format.seconds(one.totals[name] || 0)} · ${Format.percent((one.totals[name] || 0) / total)}`,
              })),
            };
          }),
        }),
      );
    }
    const perStep = data.training
      .filter((training) => training.timings.step)
      .flatMap((training) => {
        const { step } = training.timings;
        const width = step.length > 1 ? Math.min(...step.slice(1).map((value, index) => value - step[index])) : 1;
        const parts = PARTS.filter(
          ([name]) => training.timings[name] && training.timings[name].some((value) => value > 0),
        );
        return [
          parts.length
            ? Charts.bars({
                key: `${training.stage}-steptime`,
                title: `Time of a step: ${training.stage}`,
                mode: "stacked",
                total: true,
                x: { centers: step, width, label: "step", name: "step", integer: true, format: Format.integer },
                y: clock,
                series: parts.map(([name, index]) => ({ name, values: training.timings[name], color: index })),
              })
            : null,
          training.timings.tokens_per_second && training.timings.tokens_per_second.some((value) => value > 0)
            ? Charts.lines({
                key: `${training.stage}-throughput`,
                title: `Tokens per second: ${training.stage}`,
                x: AXES.step,
                y: { format: Format.integer },
                showLegend: true,
                smooth: true,
                group: `training-${training.stage}`,
                series: [
                  {
                    name: training.task === "rl" ? "sampled tokens/s" : "tokens/s",
                    x: step,
                    y: training.timings.tokens_per_second,
                    color: 3,
                  },
                ],
              })
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
      machines(),
      perStep.some(Boolean) ? [part("Step by step"), h("div", { class: "tiles two" }, perStep)] : null,
      hardware.some(Boolean)
        ? [part("Hardware", data.hardware.note), h("div", { class: "tiles two" }, hardware)]
        : null,
    );
  }

  // Where each attempt ran and what it has cost; null if all ran here at the first try.
  function machines() {
    if (!data.placements.length) return null;
    const columns = [
      { name: "Stage", header: true, value: (row) => [row.stage, h("small", {}, `attempt ${row.attempt}`)] },
      { name: "Where", text: true, value: (row) => [row.placement, row.machines > 1 && h("small", {}, `${row.machines} machines`)] },
      { name: "Outcome", text: true, value: (row) => [row.state, h("small", {}, row.cause)] },
      { name: "Time", value: (row) => Format.seconds(row.seconds) },
      { name: "Price per hour", value: (row) => Format.number(row.price || null) },
      { name: "Cost", value: (row) => Format.number(row.cost) },
    ];
    return [
      part("Machines and cost", "All attempts. Cost counts from the request of a machine to the proof that it is gone."),
      table(columns, data.placements, "Machines and cost"),
    ];
  }

  function hardwareCharts({ columns, bands }) {
    const axis = {
      label: "time in stages, end to end",
      name: "at",
      ...clock,
    };
    const percentOf = { format: (value) => `${Format.number(value, 3)}%`, domain: [0, 112] };
    const gpus = Object.keys(columns)
      .filter((name) => name.endsWith("_utilisation"))
      .map((name) => name.replace("_utilisation", ""));
    const chart = (key, title, note, y, names) => {
      const series = names
        .filter(([column]) => columns[column])
        .map(([column, name, index]) => ({ name, x: columns.seconds, y: columns[column], color: index }));
      return series.length
        ? Charts.lines({
            key,
            title,
            note,
            x: axis,
            y,
            series,
            bands,
            group: "hardware",
            showLegend: true,
            height: 200,
          })
        : null;
    };
    return [
      chart("cpu", "Processor", "Percent of all cores. Includes other work of the machine.", percentOf, [
        ["process_cpu", "this run", 1],
        ["cpu", "whole machine", 7],
      ]),
      chart(
        "memory",
        "Memory",
        "Resident memory of the processes of the run, and the memory that the machine used in total.",
        { format: Format.bytes },
        [
          ["rss", "this run", 1],
          ["memory", "whole machine", 7],
        ],
      ),
      chart(
        "gpu",
        "GPU use",
        null,
        percentOf,
        gpus.map((name, index) => [`${name}_utilisation`, name, (index % 8) + 1]),
      ),
      chart(
        "gpu-memory",
        "GPU memory",
        null,
        { format: Format.bytes },
        gpus.map((name, index) => [`${name}_memory`, name, (index % 8) + 1]),
      ),
    ];
  }

  return { curves, mainChart, time, update };
})(Data);
