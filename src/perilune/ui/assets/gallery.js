// The gallery of architectures: a drawing and the numbers of each model, two side by side, and the concepts.
const COLOURS = { full: "var(--c1)", window: "var(--c3)", linear: "var(--c5)", experts: "var(--c2)", dense: "var(--zero)" };
const KINDS = { full: "attention to all tokens", window: "sliding window", linear: "linear attention", dense: "one feed-forward network", experts: "mixture of experts" };
const LENGTHS = Object.keys(Data.models[0].cache_bytes);
const tokens = (length) => `${length / 1024}k tokens`;
const short = (value) => {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]])
    if (value >= size) return `${Number((value / size).toPrecision(4))}${letter}`;
  return Format.integer(value);
};
const bytes = (value) => {
  if (value === null) return "–";
  for (const [power, unit] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]])
    if (value >= 2 ** power) return `${Number((value / 2 ** power).toPrecision(4))} ${unit}`;
  return `${value} B`;
};
const flops = (value) => (value === null ? "–" : `${Number((value / 1e9).toPrecision(4))} GFLOP`);

// The layers as a strip, first to last, and below it one block for each different layer, input at the bottom.
function drawing(model) {
  const width = 320;
  const parts = [];
  const cells = model.layers.flatMap((run) => Array(run.count).fill(run));
  const step = width / cells.length;
  cells.forEach((run, place) => {
    const shape = { x: (step * place).toFixed(2), width: (step * 0.88).toFixed(2) };
    parts.push(s("rect", { ...shape, y: 0, height: 13, fill: COLOURS[run.kind] }));
    parts.push(s("rect", { ...shape, y: 15, height: 7, fill: COLOURS[run.experts ? "experts" : "dense"] }));
  });
  const different = new Map();
  for (const run of model.layers) {
    const key = `${run.mixer}\n${run.feed_forward}`;
    if (!different.has(key)) different.set(key, { ...run, count: 0 });
    different.get(key).count += run.count;
  }
  let y = 32;
  const box = (text, colour, inset) => {
    parts.push(
      s("rect", { x: inset, y, width: width - 2 * inset, height: 22, rx: 5, fill: colour, "fill-opacity": 0.16, stroke: colour }),
      s("text.tick", { x: width / 2, y: y + 15, "text-anchor": "middle" }, text),
    );
    y += 27;
  };
  box(`head: ${Format.integer(model.vocab_size)} tokens${model.tied ? ", tied to the embedding" : ""}`, "var(--zero)", 0);
  for (const run of [...different.values()].reverse()) {
    const top = y;
    y += 18;
    box(run.feed_forward, COLOURS[run.experts ? "experts" : "dense"], 8);
    box(run.mixer, COLOURS[run.kind], 8);
    parts.push(
      s("rect", { x: 0.5, y: top, width: width - 1, height: y - top + 2, rx: 7, fill: "none", stroke: "var(--rule)" }),
      s("text.tick", { x: 8, y: top + 13 }, `${run.count} layers, norms ${model.norms}`),
    );
    y += 9;
  }
  box(`embedding of ${Format.integer(model.hidden_size)}`, "var(--zero)", 0);
  return s("svg.plot", { viewBox: `0 0 ${width} ${y}`, role: "img", "aria-label": `Layers of ${model.name}` }, parts);
}

const runs = (model) =>
  [`${model.runs.runs}${model.runs.quantised ? ", unquantised (the published weights are quantised)" : ""}`, model.runs.reason]
    .filter(Boolean)
    .join(": ");
const ROWS = [
  ["parameters", (model) => short(model.parameters)],
  ["active for a token", (model) => short(model.active_parameters)],
  ["published", (model) => [model.published.total, model.published.active && `${model.published.active} active`].filter(Boolean).join(", ") || "–"],
  ["layers", (model) => model.layers.reduce((sum, run) => sum + run.count, 0)],
  ["context", (model) => `${Format.integer(model.max_positions)} tokens`],
  ...LENGTHS.map((length) => [`cache, ${tokens(length)}`, (model) => bytes(model.cache_bytes[length])]),
  ...LENGTHS.map((length) => [`next token at ${tokens(length)}`, (model) => flops(model.token_flops[length])]),
  ...Object.keys(Data.models[0].weight_bytes).map((kind) => [`weights, ${kind}`, (model) => bytes(model.weight_bytes[kind])]),
  ["concepts", (model) => model.concepts.join(", ") || "–"],
  ["Perilune runs it", runs],
  ["source", (model) => model.source],
  ["notes", (model) => model.notes.join("; ")],
];
const figures = (model, rows) => Page.definitions(rows.map(([name, value]) => [name, String(value(model))]));

const swatch = ([kind, text]) => h("span.legend-item", h("span.swatch", { "--swatch": COLOURS[kind] }), text);
const legend = h("div.legend", Object.entries(KINDS).map(swatch));

function card(model) {
  const main = [...ROWS.slice(0, 5 + LENGTHS.length), ...ROWS.slice(-4, -2)].filter(([name]) => name !== "layers");
  return h(
    "figure.card",
    h("h3", model.name),
    h("p.muted", model.id),
    drawing(model),
    figures(model, main),
    h("details", h("summary", "All figures"), figures(model, ROWS)),
  );
}

const search = h("input", { type: "search", placeholder: "Name, concept or support", "aria-label": "Search models", oninput: show });
const count = h("span.muted", { role: "status" });
const tiles = h("div.tiles");
function show() {
  const asked = words(search);
  const shown = Data.models.filter((model) => {
    const text = [model.name, model.id, model.model_type, model.runs.runs, ...model.concepts].join(" ").toLowerCase();
    return asked.every((word) => text.includes(word));
  });
  tiles.replaceChildren(...shown.map(card));
  count.textContent = `${shown.length} of ${Data.models.length} models`;
}

const sides = Data.compared.map((place, side) =>
  Page.select(side ? "Second model" : "First model", Data.models.map((model, index) => [index, model.name]), compare, place),
);
const compared = h("div");
function compare() {
  const pair = sides.map((select) => Data.models[Number(select.value)]);
  const columns = [
    { name: "", header: true, text: true, value: (row) => row[0] },
    ...pair.map((model) => ({ name: model.name, text: true, value: (row) => h("span.wrapped", String(row[1](model))) })),
  ];
  compared.replaceChildren(
    h("div.tiles.two", pair.map((model) => h("figure.card", h("h3", model.name), drawing(model)))),
    Page.table(columns, ROWS, "The two models side by side"),
  );
}

const concept = (one) =>
  h(
    "div.card",
    h("h3", `${one.name}: ${one.title.toLowerCase()}`),
    h("p", one.text),
    Page.definitions([
      ["in our decoder", one.code ? h("code", one.code) : "not implemented"],
      ["source", one.source],
      ["models here", `${Data.models.filter((model) => model.concepts.includes(one.name)).length} of ${Data.models.length}`],
    ]),
  );

document.getElementById("main").append(
  h("h1.small", { id: "top" }, "Architectures"),
  h("p.lead", "All figures are computed from each model's configuration. Cache: bfloat16, one sequence. “–”: beyond the model's context. Active parameters count the embedding, which some publishers leave out."),
  legend,
  Page.section("models", "Models", null, h("div.toolbar", search, count), tiles),
  Page.section("compare", "Side by side", null, h("div.toolbar", sides), compared),
  Page.section("concepts", "Concepts", "What tells these models apart, and the function of Perilune's decoder that does it.", h("div.tiles", Data.concepts.map(concept))),
);
show();
compare();
Page.finish("Computed by perilune model gallery from configurations alone.");
