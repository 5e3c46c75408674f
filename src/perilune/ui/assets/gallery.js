// The gallery of architectures: a drawing and the numbers of each model, two side by side, and the concepts.
const COLORS = { full: "var(--c1)", window: "var(--c3)", linear: "var(--c5)", experts: "var(--c2)", dense: "var(--zero)" };
const KINDS = { full: "attention to all tokens", window: "sliding window", linear: "linear attention", dense: "one feed-forward network", experts: "mixture of experts" };
// The layers as a strip, first to last, and below it one block for each different layer, input at the bottom.
function drawing(model) {
  const width = 320;
  const parts = [];
  const cells = model.layers.flatMap(run => Array(run.count).fill(run));
  const step = width / cells.length;
  cells.forEach((run, place) => {
    const shape = { x: (step * place).toFixed(2), width: (step * 0.88).toFixed(2) };
    parts.push(s("rect", { ...shape, y: 0, height: 13, fill: COLORS[run.kind] }));
    parts.push(s("rect", { ...shape, y: 15, height: 7, fill: COLORS[run.experts ? "experts" : "dense"] }));
  });
  const different = new Map();
  for (const run of model.layers) {
    const key = `${run.mixer}\n${run.feed_forward}`;
    if (!different.has(key)) different.set(key, { ...run, count: 0 });
    different.get(key).count += run.count;
  }
  let y = 32;
  const box = (text, color, inset) => {
    parts.push(
      s("rect", { x: inset, y, width: width - 2 * inset, height: 22, rx: 5, fill: color, "fill-opacity": 0.16, stroke: color }),
      s("text.tick", { x: width / 2, y: y + 15, "text-anchor": "middle" }, text),
    );
    y += 27;
  };
  box(`head: ${Format.integer(model.vocab_size)} tokens${model.tied ? ", tied to the embedding" : ""}`, "var(--zero)", 0);
  for (const run of [...different.values()].reverse()) {
    const top = y;
    y += 18;
    box(run.feed_forward, COLORS[run.experts ? "experts" : "dense"], 8);
    box(run.mixer, COLORS[run.kind], 8);
    parts.push(
      s("rect", { x: 0.5, y: top, width: width - 1, height: y - top + 2, rx: 7, fill: "none", stroke: "var(--rule)" }),
      s("text.tick", { x: 8, y: top + 13 }, `${run.count} layers, norms ${model.norms}`),
    );
    y += 9;
  }
  box(`embedding of ${Format.integer(model.hidden_size)}`, "var(--zero)", 0);
  return s("svg.plot", { viewBox: `0 0 ${width} ${y}`, role: "img", "aria-label": `Layers of ${model.name}` }, parts);
}

const swatch = ([kind, text]) => h("span.legend-item", h("span.swatch", { "--swatch": COLORS[kind] }), text);
const legend = h("div.legend", Object.entries(KINDS).map(swatch));

const card = model =>
  h(
    "figure.card",
    h("h3", model.name),
    h("p.muted", model.id),
    drawing(model),
    Page.definitions(model.figures.filter(([name]) => Data.main.includes(name))),
    h("details", h("summary", "All figures"), Page.definitions(model.figures)),
  );

const search = h("input", { type: "search", placeholder: "Name, concept or support", "aria-label": "Search models", oninput: show });
const count = h("span.muted", { role: "status" });
const tiles = h("div.tiles");
function show() {
  const isFound = wordFilter(search);
  const textOf = model => [model.name, model.id, model.model_type, model.runs.runs, ...model.concepts].join(" ");
  const shown = Data.models.filter(model => isFound(textOf(model)));
  tiles.replaceChildren(...shown.map(card));
  count.textContent = `${shown.length} of ${Data.models.length} models`;
}

const sides = Data.compared.map((place, side) =>
  Page.select(side ? "Second model" : "First model", Data.models.map((model, index) => [index, model.name]), compare, place),
);
const compared = h("div");
function compare() {
  const pair = sides.map(select => Data.models[Number(select.value)]);
  const columns = [
    ["", place => pair[0].figures[place][0], "header"],
    ...pair.map(model => [model.name, place => h("span.wrapped", model.figures[place][1]), "text"]),
  ];
  compared.replaceChildren(
    h("div.tiles.two", pair.map(model => h("figure.card", h("h3", model.name), drawing(model)))),
    Page.table(columns, [...pair[0].figures.keys()], "The two models side by side"),
  );
}

const concept = one =>
  h(
    "div.card",
    h("h3", `${one.name}: ${one.title.toLowerCase()}`),
    h("p", one.text),
    Page.definitions([
      ["in our decoder", one.code ? h("code", one.code) : "not implemented"],
      ["source", one.source],
      ["models here", `${Data.models.filter(model => model.concepts.includes(one.name)).length} of ${Data.models.length}`],
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
