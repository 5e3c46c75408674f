// Lays out the report: head, facts, notices and provenance. The other files draw the other sections.
"use strict";

const Report = ((data) => {
  const { section, part, table, copyable, definitions } = Page;

  // ---------------------------------------------------------------------------------------- head
  function hero() {
    const { experiment, headline } = data;
    const chart = Outcome.climbChart(240, "climb") || Course.mainChart(200);
    return h(
      "div",
      { class: "hero", id: "top" },
      h(
        "div",
        {},
        h(
          "p",
          { class: "eyebrow" },
          h("b", {}, experiment.name),
          h("span", { class: `state ${experiment.state}` }, experiment.state),
        ),
        h("h1", {}, headline.title),
        headline.paragraphs.map((text) => h("p", { class: "lead" }, text)),
      ),
      chart ? h("div", {}, chart) : null,
    );
  }

  function facts() {
    return h(
      "dl",
      { class: "facts" },
      data.facts.map(([name, value, more]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null)),
      ),
    );
  }

  function notices() {
    const told = data.notices.filter((notice) => !(data.live && notice.kind === "active")); // the bars tell it
    return told.map((notice) =>
      h(
        "div",
        { class: `notice ${notice.kind}`, role: "note" },
        h("b", {}, notice.title),
        notice.text ? ` ${notice.text}` : "",
        notice.log ? h("pre", { tabindex: 0 }, notice.log) : null,
      ),
    );
  }

  // ---------------------------------------------------------------------------------- provenance
  function provenance() {
    const columns = [
      { name: "Stage", header: true, value: (row) => [row.name, h("small", {}, row.task)] },
      { name: "Run", text: true, value: (row) => h("span", { class: "mono" }, row.run_id || "–") },
      {
        name: "State",
        text: true,
        value: (row) => [
          h("span", { class: `state ${row.state}` }, row.state),
          row.cause ? h("small", {}, row.cause) : null,
        ],
      },
      { name: "Attempts", value: (row) => Format.integer(row.attempts) },
      {
        name: "Bundle digest",
        text: true,
        value: (row) =>
          h("span", { class: "mono", title: row.digest || "" }, row.digest ? row.digest.slice(0, 16) : "–"),
      },
      { name: "Time", value: (row) => Format.seconds(row.seconds) },
    ];
    const block = (title, hint, ...nodes) =>
      h("details", {}, h("summary", {}, title, hint ? h("span", { class: "muted" }, hint) : null), h("div", {}, nodes));
    const { provenance: source } = data;
    return section(
      "provenance",
      "Provenance",
      "What ran, with which code and machine, and how to reproduce it. The facts were recorded by the runs themselves.",
      table(columns, data.stages, "Runs"),
      h(
        "div",
        {},
        block(
          "Verify and reproduce",
          "commands",
          h(
            "p",
            { class: "lead" },
            "Verification recomputes every digest; reproduction runs the frozen bundle again and compares metrics, episodes and the final checkpoint.",
          ),
          copyable(source.commands),
        ),
        source.recipe ? block("Recipe", "resolved, with every default filled in", copyable(source.recipe)) : null,
        source.machine.length ? block("Machine", source.machine_name, definitions(source.machine)) : null,
        source.software.length
          ? block(
              "Software",
              source.software_name,
              definitions(source.software),
              source.packages.length
                ? [
                    h("h3", { class: "part" }, `Packages (${source.packages.length})`),
                    h(
                      "div",
                      { class: "columns" },
                      source.packages.map(([name, version]) =>
                        h("div", {}, h("span", {}, name), h("span", { class: "mono muted" }, version)),
                      ),
                    ),
                  ]
                : null,
            )
          : null,
        data.stages.map((stage) =>
          block(
            `Run of ${stage.name}`,
            stage.task,
            definitions(stage.facts),
            stage.summary ? [h("h3", { class: "part" }, "summary.json"), copyable(stage.summary)] : null,
            stage.spec ? [h("h3", { class: "part" }, "job.json"), copyable(stage.spec)] : null,
            stage.log ? [h("h3", { class: "part" }, "End of the log"), h("pre", { tabindex: 0 }, stage.log)] : null,
          ),
        ),
      ),
    );
  }

  const add = (...nodes) => document.getElementById("main").append(...nodes.flat().filter(Boolean));

  function details() {
    add(
      Outcome.evaluations(),
      Outcome.climb(),
      Outcome.forgetting(),
      Outcome.tasksSection(),
      Course.curves(),
      Course.time(),
      Episodes.section(section),
      provenance(),
    );
    Page.finish(data.footer);
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  }

  // The browser paints the head before the rest is drawn. A hidden page is not painted, so it does not wait.
  function build() {
    add(Verdict.panel(), Verdict.progress(), hero(), facts(), notices());
    const painted = document.hidden
      ? Promise.resolve()
      : new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    return painted.then(details);
  }

  // Draw the head and the times again, after the data have changed.
  function refresh() {
    for (const [selector, make] of [
      ["#top.hero", hero],
      [".facts", facts],
      ["#time", Course.time],
    ]) {
      const [old, fresh] = [document.querySelector(selector), make()];
      if (old && fresh) old.replaceWith(fresh);
    }
  }

  return { build, refresh };
})(Data);

const Built = Report.build();
