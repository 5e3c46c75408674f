// The first page: the experiments of a home, newest first, each with its health, state and curve.
"use strict";

((data) => {
  const STATES = ["active", "failed", "cancelled", "succeeded", "queued", "waiting"];
  const chosen = new Set(); // ids of experiments to compare
  const view = {
    search: h("input", { type: "search", placeholder: "Search name, override, stage", "aria-label": "Search", on: { input: draw } }),
    state: h(
      "select",
      { "aria-label": "State", on: { change: draw } },
      [["", "any state"], ...STATES.map((one) => [one, one])].map(([value, text]) => h("option", { value }, text)),
    ),
    compare: h("a", { class: "plain", hidden: true }, ""),
    count: h("span", { class: "muted", role: "status" }),
    list: h("ol", { class: "experiments", on: { keydown: move } }),
  };

  function spark({ step, value }) {
    const [width, height] = [132, 30];
    const known = value.filter((one) => one !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const x = (one) => 2 + ((width - 4) * (one - step[0])) / (step[step.length - 1] - step[0] || 1);
    const y = (one) => height - 3 - ((height - 6) * (one - low)) / (high - low || 1);
    const points = step.map((one, place) => `${x(one).toFixed(1)},${y(value[place]).toFixed(1)}`);
    const element = (name, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, given] of Object.entries(attributes)) made.setAttribute(key, given);
      return made;
    };
    const root = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "spark", "aria-hidden": "true" });
    const [endX, endY] = points[points.length - 1].split(",");
    root.append(
      element("path", { d: `M${points.join("L")}`, class: "line", stroke: "var(--c1)" }),
      element("circle", { cx: endX, cy: endY, r: 2.6, fill: "var(--c1)" }),
    );
    return root;
  }

  const date = (seconds) =>
    new Date(1000 * seconds).toLocaleString(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

  function figure(one) {
    const judged = [...one.stages].reverse().find((stage) => stage["pass@1"]);
    if (judged) {
      const { mean, low, high } = judged["pass@1"];
      return [`pass@1 ${Format.percent(mean)}`, `${Format.percent(low)} to ${Format.percent(high)}, ${judged.stage}`];
    }
    const trained = [...one.stages].reverse().find((stage) => stage.curve);
    if (!trained) return ["", ""];
    const { name, value } = trained.curve;
    const last = value[value.length - 1];
    const isShare = /pass|accuracy/.test(name);
    return [`${name.replaceAll("_", " ")} ${(isShare ? Format.percent : Format.number)(last, 3)}`, `last step of ${trained.stage}`];
  }

  function row(one) {
    const drawn = [...one.stages].reverse().find((stage) => stage.curve && stage.task !== "evaluate");
    const running = one.stages.find((stage) => stage.state === "active");
    const done = one.stages.filter((stage) => stage.state === "succeeded").length;
    const place = running
      ? running.progress && running.progress.total
        ? `${running.stage} ${Format.integer(running.progress.done)}/${Format.integer(running.progress.total)}`
        : running.stage
      : `${done} of ${one.stages.length} stages`;
    const [value, more] = figure(one);
    const health = one.health;
    const first = health && health.findings[0];
    const box = h("input", {
      type: "checkbox",
      checked: chosen.has(one.id),
      "aria-label": `Compare ${one.name} of ${date(one.submitted)}`,
      on: {
        change: () => {
          if (box.checked) chosen.add(one.id);
          else chosen.delete(one.id);
          offer();
        },
      },
    });
    return h(
      "li",
      {},
      box,
      h(
        "a",
        { href: `/experiments/${one.id}`, class: "experiment" },
        h(
          "span",
          { class: "who" },
          h("b", {}, one.name),
          h("small", {}, [date(one.submitted), ...one.overrides].join(" · ")),
        ),
        h("span", { class: "when" }, h("span", { class: `state ${one.state}` }, one.state), h("small", {}, place)),
        h("span", { class: "curve" }, drawn ? spark(drawn.curve) : null),
        h("span", { class: "what" }, h("b", {}, value), h("small", {}, more)),
        h(
          "span",
          { class: "how" },
          health ? h("span", { class: `pill ${health.status}` }, health.status) : null,
          first
            ? h("small", {}, [first.name, first.since === null ? "" : ` since step ${first.since}`, ` in ${health.stage}`].join(""))
            : null,
        ),
      ),
    );
  }

  function offer() {
    view.compare.hidden = chosen.size < 2;
    view.compare.href = `/compare/${[...chosen].join(",")}`;
    view.compare.textContent = `Compare ${chosen.size}`;
  }

  function draw() {
    const words = view.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = data.experiments.filter((one) => {
      if (view.state.value && one.state !== view.state.value) return false;
      const text = [one.name, one.id, ...one.overrides, ...one.stages.map((stage) => stage.stage)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const focused = document.activeElement && document.activeElement.closest("a.experiment");
    view.list.replaceChildren(...shown.map(row));
    if (focused) view.list.querySelector(`a[href="${CSS.escape(focused.getAttribute("href"))}"]`)?.focus();
    view.count.textContent = `${Format.integer(shown.length)} of ${Format.integer(data.experiments.length + data.older)} experiments`;
    view.empty.hidden = data.experiments.length > 0;
    const url = new URL(location.href);
    for (const [name, value] of [["q", view.search.value], ["state", view.state.value]])
      if (value) url.searchParams.set(name, value);
      else url.searchParams.delete(name);
    history.replaceState(null, "", url);
  }

  function move(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!by) return;
    const links = [...view.list.querySelectorAll("a.experiment")];
    const next = links[links.indexOf(document.activeElement) + by];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  const given = new URLSearchParams(location.search);
  view.search.value = given.get("q") || "";
  view.state.value = STATES.includes(given.get("state")) ? given.get("state") : "";
  view.empty = h("p", { class: "notice" }, h("b", {}, "No experiments yet. "), "perilune quickstart makes one in a few minutes; it appears here.");
  document.getElementById("main").append(
    h("h1", { class: "small", id: "top" }, "Experiments"),
    h("div", { class: "toolbar" }, view.search, view.state, view.count, view.compare),
    view.empty,
    view.list,
  );
  draw();
  Page.finish(data.home);

  const source = new EventSource("/events");
  source.addEventListener("list", (event) => {
    Object.assign(data, JSON.parse(event.data));
    draw();
  });
})(Data);
