// The gallery of architectures: a drawing and the numbers of each model, two side by side, and the concepts.
const COLORS = { full: "var(--c1)", window: "var(--c3)", linear: "var(--c5)", experts: "var(--c2)", dense: "var(--zero)" };
const KINDS = { full: "attention to all tokens", window: "sliding window", linear: "linear attention", dense: "one feed-forward network", experts: "mixture of experts" };
const WIDTH = 320;
const box = (y, inset, color, text) => html`
  <rect x=${inset} y=${y} width=${WIDTH - 2 * inset} height="22" rx="5" fill=${color} fill-opacity="0.16" stroke=${color} />
  <text class="tick" x=${WIDTH / 2} y=${y + 15} text-anchor="middle">${text}</text>`;

// The layers as a strip, first to last, and below it one block for each different layer, input at the bottom.
function Drawing({ model }) {
  const cells = model.layers.flatMap(run => Array(run.count).fill(run));
  const step = WIDTH / cells.length;
  const different = new Map();
  for (const run of model.layers) {
    const key = `${run.mixer}\n${run.feed_forward}`;
    if (!different.has(key)) different.set(key, { ...run, count: 0 });
    different.get(key).count += run.count;
  }
  const colorOf = run => COLORS[run.experts ? "experts" : "dense"];
  const cell = (run, place) => {
    const shape = { x: (step * place).toFixed(2), width: (step * 0.88).toFixed(2) };
    return html`
      <rect ...${shape} y="0" height="13" fill=${COLORS[run.kind]} />
      <rect ...${shape} y="15" height="7" fill=${colorOf(run)} />`;
  };
  const [top, height] = [59, 81]; // of the blocks of layers
  const block = (run, place) => {
    const y = top + height * place;
    return html`
      <rect x="0.5" y=${y} width=${WIDTH - 1} height=${height - 7} rx="7" fill="none" stroke="var(--rule)" />
      <text class="tick" x="8" y=${y + 13}>${run.count} layers, norms ${model.norms}</text>
      ${box(y + 18, 8, colorOf(run), run.feed_forward)}${box(y + 45, 8, COLORS[run.kind], run.mixer)}`;
  };
  const tied = model.tied ? ", tied to the embedding" : "";
  const bottom = top + height * different.size;
  return html`<svg class="plot" viewBox="0 0 ${WIDTH} ${bottom + 27}" role="img" aria-label="Layers of ${model.name}">
    ${cells.map(cell)}
    ${box(32, 0, "var(--zero)", `head: ${Format.integer(model.vocab_size)} tokens${tied}`)}
    ${[...different.values()].reverse().map(block)}
    ${box(bottom, 0, "var(--zero)", `embedding of ${Format.integer(model.hidden_size)}`)}
  </svg>`;
}

const legend = Object.entries(KINDS).map(([kind, text]) =>
  html`<span class="legend-item"><span class="swatch" style=${{ "--swatch": COLORS[kind] }} />${text}</span>`);

const card = model => html`<figure class="card" key=${model.id}>
  <h3>${model.name}</h3>
  <p class="muted">${model.id}</p>
  <${Drawing} model=${model} />
  <${Definitions} pairs=${model.figures.filter(([name]) => Data.main.includes(name))} />
  <details><summary>All figures</summary><${Definitions} pairs=${model.figures} /></details>
</figure>`;

function Models() {
  const [sought, seek] = useState("");
  const isFound = wordFilter(sought);
  const textOf = model => [model.name, model.id, model.model_type, model.runs.runs, ...model.concepts].join(" ");
  const shown = Data.models.filter(model => isFound(textOf(model)));
  const search = { type: "search", placeholder: "Name, concept or support", "aria-label": "Search models" };
  return html`<${Section} id="models" title="Models">
    <div class="toolbar">
      <input ...${search} oninput=${event => seek(event.target.value)} />
      <span class="muted" role="status">${shown.length} of ${Data.models.length} models</span>
    </div>
    <div class="tiles">${shown.map(card)}</div>
  <//>`;
}

function Compared() {
  const [places, setPlaces] = useState(Data.compared);
  const choose = (side, place) => setPlaces(places.with(side, Number(place)));
  const names = Data.models.map((model, index) => [index, model.name]);
  const select = (place, side) => html`
    <${Select} label=${side ? "Second model" : "First model"} options=${names} value=${place} choose=${to => choose(side, to)} />`;
  const pair = places.map(place => Data.models[place]);
  const columns = [
    ["", place => pair[0].figures[place][0], "header"],
    ...pair.map(model => [model.name, place => html`<span class="wrapped">${model.figures[place][1]}</span>`, "text"]),
  ];
  return html`<${Section} id="compare" title="Side by side">
    <div class="toolbar">${places.map(select)}</div>
    <div>
      <div class="tiles two">
        ${pair.map(model => html`<figure class="card"><h3>${model.name}</h3><${Drawing} model=${model} /></figure>`)}
      </div>
      <${Table} columns=${columns} rows=${[...pair[0].figures.keys()]} caption="The two models side by side" />
    </div>
  <//>`;
}

function concept(one) {
  const users = Data.models.filter(model => model.concepts.includes(one.name)).length;
  const pairs = [
    ["in our decoder", one.code ? html`<code>${one.code}</code>` : "not implemented"],
    ["source", one.source],
    ["models here", `${users} of ${Data.models.length}`],
  ];
  const title = `${one.name}: ${one.title.toLowerCase()}`;
  return html`<div class="card"><h3>${title}</h3><p>${one.text}</p><${Definitions} pairs=${pairs} /></div>`;
}

drawPage(html`
  <h1 class="small" id="top">Architectures</h1>
  <p class="lead">All figures are computed from each model's configuration. Cache: bfloat16, one sequence. “–”: beyond the model's context. Active parameters count the embedding, which some publishers leave out.</p>
  <div class="legend">${legend}</div>
  <${Models} />
  <${Compared} />
  <${Section} id="concepts" title="Concepts" text="What tells these models apart, and the function of Perilune's decoder that does it.">
    <div class="tiles">${Data.concepts.map(concept)}</div>
  <//>`);
finishPage("Computed by perilune model gallery from configurations alone.");
