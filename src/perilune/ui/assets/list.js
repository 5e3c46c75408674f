// The first page: the experiments of a home, newest first, each with its health, state and curve.
const STATES = ["active", "failed", "cancelled", "succeeded", "queued", "waiting"];
const chosen = new Set(); // ids of experiments to compare
const search = h("input", { type: "search", placeholder: "Search name, override, stage", "aria-label": "Search", oninput: draw });
const state = Page.select("State", [["", "any state"], ...STATES], draw);
const compare = h("a.plain", { hidden: true });
const count = h("span.muted", { role: "status" });
const list = h("ol.experiments");
list.onkeydown = event => Page.moveFocus(event, "a.experiment", { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 });
const hint = "perilune quickstart makes one in a few minutes; it appears here.";
const empty = h("p.notice", h("b", "No experiments yet. "), hint);

function spark({ step, value }) {
  const [width, height] = [132, 30];
  const numbers = value.filter(one => one !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const x = one => (2 + ((width - 4) * (one - step[0])) / (last(step) - step[0] || 1)).toFixed(1);
  const y = one => (height - 3 - ((height - 6) * (one - low)) / (high - low || 1)).toFixed(1);
  const d = `M${step.map((one, place) => `${x(one)},${y(value[place])}`).join("L")}`;
  const end = s("circle", { cx: x(last(step)), cy: y(last(value)), r: 2.6, fill: "var(--c1)" });
  const size = { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" };
  return s("svg", size, s("path.line", { d, stroke: "var(--c1)" }), end);
}

const date = seconds =>
  new Date(1000 * seconds).toLocaleString(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

// The last figure of an experiment, and its source.
function figure({ stages }) {
  const judged = stages.findLast(stage => stage["pass@1"]);
  if (judged) {
    const { mean, low, high } = judged["pass@1"];
    return [`pass@1 ${Format.percent(mean)}`, `${Format.percent(low)} to ${Format.percent(high)}, ${judged.stage}`];
  }
  const trained = stages.findLast(stage => stage.curve);
  if (!trained) return ["", ""];
  const { name, value } = trained.curve;
  const format = /pass|accuracy/.test(name) ? Format.percent : Format.number;
  return [`${spaced(name)} ${format(last(value), 3)}`, `last step of ${trained.stage}`];
}

function progress({ stages }) {
  const running = stages.find(stage => stage.state === "active");
  if (!running) return `${stages.filter(stage => stage.state === "succeeded").length} of ${stages.length} stages`;
  const { done, total } = running.progress || {};
  return total ? `${running.stage} ${Format.integer(done)}/${Format.integer(total)}` : running.stage;
}

function row(one) {
  const drawn = one.stages.findLast(stage => stage.curve && stage.task !== "evaluate");
  const [value, more] = figure(one);
  const { health } = one;
  const first = health && health.findings[0];
  const since = first && first.since !== null ? ` since step ${first.since}` : "";
  const box = h("input", {
    type: "checkbox",
    checked: chosen.has(one.experiment_id),
    "aria-label": `Compare ${one.name} of ${date(one.submitted)}`,
    onchange() {
      chosen[box.checked ? "add" : "delete"](one.experiment_id);
      compare.hidden = chosen.size < 2;
      compare.href = `/compare/${[...chosen].join(",")}`;
      compare.textContent = `Compare ${chosen.size}`;
    },
  });
  const link = h(
    "a.experiment",
    { href: `/experiments/${one.experiment_id}` },
    h("span.who", h("b", one.name), h("small", [date(one.submitted), ...one.overrides].join(" · "))),
    h("span.when", h("span", { class: `state ${one.state}` }, one.state), h("small", progress(one))),
    h("span.curve", drawn && spark(drawn.curve)),
    h("span.what", h("b", value), h("small", more)),
    h(
      "span.how",
      health && h("span", { class: `pill ${health.status}` }, health.status),
      first && h("small", `${first.name}${since} in ${health.stage}`),
    ),
  );
  return h("li", box, link);
}

function draw() {
  const isFound = wordFilter(search);
  const textOf = one => [one.name, one.experiment_id, ...one.overrides, ...one.stages.map(stage => stage.stage)].join(" ");
  const shown = Data.experiments.filter(one => (!state.value || one.state === state.value) && isFound(textOf(one)));
  const at = document.activeElement;
  const focused = at?.closest(".experiments li")?.lastChild.getAttribute("href");
  list.replaceChildren(...shown.map(row));
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.parentNode.querySelector(at.localName).focus();
  count.textContent = `${Format.integer(shown.length)} of ${Format.integer(Data.experiments.length + Data.older)} experiments`;
  empty.hidden = Data.experiments.length > 0;
}

const toolbar = h("div.toolbar", search, state, count, compare);
document.getElementById("main").append(h("h1.small", { id: "top" }, "Experiments"), toolbar, empty, list);
draw();
Address.keep("q", search);
Address.keep("state", state);
Page.finish(Data.home);

new EventSource("/events").addEventListener("list", event => {
  Object.assign(Data, JSON.parse(event.data));
  draw();
});
