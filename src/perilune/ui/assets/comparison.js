// The page of a comparison: arms, differences from the baseline, and curves.
"use strict";

((data) => {
  const { section, part, table } = Page;
  const shown = data.isShare ? Format.percent : Format.number;
  const change = data.isShare ? (value) => `${Format.points(value)} points` : Format.number;
  const COLORS = 8;
  const color = (place) => (place % COLORS) + 1;
  const mark = (place) => (place === data.baseline ? "baseline" : place === data.best ? "best" : "");

  const known = (interval) => interval && interval[1] !== null && interval[2] !== null;
  const within = (interval, format) => [
    format(interval[0]),
    known(interval) ? h("small", {}, `${format(interval[1])} to ${format(interval[2])}`) : null,
  ];

  function hero() {
    const experiments = data.arms.reduce((count, arm) => count + arm.seeds.length, 0);
    return h(
      "div",
      { class: "hero", id: "top" },
      h(
        "div",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, data.title), `${experiments} experiments`),
        h("h1", {}, `${data.arms.length} arms compared by ${data.metric}`),
        data.notes.map((text) => h("p", { class: "lead" }, text)),
      ),
      forest("final", `Final ${data.metric}`, shown, (arm) => arm.figure, {}),
    );
  }

  // One row for each arm that has this interval.
  function forest(key, title, format, intervalOf, more) {
    const rows = data.arms.map((arm, place) => [arm, place, intervalOf(arm)]).filter(([, , found]) => found);
    const ends = rows.flatMap(([, , found]) => found.filter((value) => value !== null));
    if (more.zero) ends.push(0);
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return Charts.rows({
      key,
      title,
      note: more.note,
      x: { domain: [low - pad, high + pad], format, tick: data.isShare ? Format.percentTick : format, zero: more.zero },
      rows: rows.map(([arm, place, found]) => ({
        label: arm.label,
        strong: place === data.best,
        value: format(found[0]),
        marks: [
          ...(known(found) ? [{ whisker: [found[1], found[2]], color: color(place) }] : []),
          { dot: found[0], color: color(place) },
        ],
        details: [
          { name: "mean", value: format(found[0]) },
          ...(known(found) ? [{ name: "95% interval", value: `${format(found[1])} to ${format(found[2])}` }] : []),
        ],
      })),
    });
  }

  function arms() {
    const columns = [
      { name: "Arm", header: true, value: ([arm, place]) => [arm.label, h("small", {}, mark(place))] },
      ...data.keys.map((key, index) => ({ name: key, value: ([arm]) => h("span", { class: "mono" }, arm.settings[index]) })),
      { name: data.metric, value: ([arm]) => (arm.figure ? within(arm.figure, shown) : "–") },
      {
        name: "By seed",
        text: true,
        value: ([arm]) =>
          arm.seeds.map((one) => h("small", {}, `${one.seed}: ${one.figure ? shown(one.figure[0]) : one.problem}`)),
      },
      { name: "Difference from the baseline", text: true, value: ([arm]) => (arm.difference ? arm.difference.text : "–") },
    ];
    return section(
      "arms",
      "Arms",
      "Only the settings that differ. Differences are paired by seed and corrected for the number of arms (Holm).",
      table(columns, data.arms.map((arm, place) => [arm, place]), "Arms"),
      data.arms.some((arm) => arm.difference)
        ? forest("differences", "Difference from the baseline", change, (arm) => arm.difference && arm.difference.interval, {
            zero: true,
            note: "95% intervals before correction. An interval over tasks, where seeds are few, supports no claim about settings.",
          })
        : null,
    );
  }

  function curves() {
    if (!data.charts.length) return null;
    const stages = [...new Set(data.charts.map((chart) => chart.stage))];
    return section(
      "curves",
      "Curves",
      `Means over the seeds of each arm; areas are ${data.area}. Stages that all arms share are left out.`,
      stages.map((stage) => [
        part(stage),
        h(
          "div",
          { class: "tiles" },
          data.charts
            .filter((chart) => chart.stage === stage)
            .map((chart) =>
              Charts.lines({
                key: `${stage}-${chart.metric}`,
                title: chart.title,
                group: stage,
                smooth: true,
                x: { label: "step", name: "step", integer: true },
                y: { zero: false },
                series: chart.curves.map((curve) => ({
                  name: data.arms[curve.arm].label,
                  x: curve.step,
                  y: curve.mean,
                  low: curve.low,
                  high: curve.high,
                  area: true,
                  color: color(curve.arm),
                  dash: curve.arm >= COLORS,
                })),
              }),
            ),
        ),
      ]),
    );
  }

  function experiments() {
    const rows = data.arms.flatMap((arm) => arm.seeds.map((one) => [arm, one]));
    const columns = [
      { name: "Arm", header: true, value: ([arm]) => arm.label },
      { name: "Seed", value: ([, one]) => Format.integer(one.seed) },
      { name: data.metric, value: ([, one]) => (one.figure ? within(one.figure, shown) : one.problem) },
      { name: "Experiment", text: true, value: ([, one]) => h("span", { class: "mono" }, one.experiment) },
    ];
    const lead = "The figure of each seed, with its interval over tasks. perilune report EXPERIMENT writes its own page.";
    return section("experiments", "Experiments", lead, table(columns, rows, "Experiments"));
  }

  const sections = [hero(), arms(), curves(), experiments()].filter(Boolean);
  document.getElementById("main").append(...sections);
  Page.finish(data.footer);
})(Data);
