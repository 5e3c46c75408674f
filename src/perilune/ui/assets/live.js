// Keeps the page of an experiment up to date from server-sent events.
const { base, offsets } = Data.live;
const source = new EventSource(`${base}/events?offsets=${encodeURIComponent(JSON.stringify(offsets))}`);
const sign = document.createElement("span");
document.querySelector(".brand").after(sign);
sign.role = "status";
const say = (text, kind) => {
  sign.textContent = text;
  sign.className = `connection ${kind}`;
};
say("connecting", "");
source.onopen = () => say("connected", "on");
source.onerror = () => say("no connection", "off");

function reload() {
  source.close(); // another event would start the reload again
  location.reload();
}

const pending = new Set(); // stages with new lines to draw
function draw() {
  for (const stage of pending) redraw(`steps ${stage}`);
  pending.clear();
  readAgain().catch(() => say("no connection", "off"));
}

source.addEventListener("steps", event => {
  const added = JSON.parse(event.data);
  const training = Data.training.find(one => one.stage === added.stage);
  const isNew = added.episodes.length && !Episodes.has(added.stage);
  if (!training || isNew) return reload(); // the first step or episodes of a stage
  const columns = Object.keys(training.columns).length;
  append(training.columns, added.metrics);
  append(training.timings, added.timings);
  training.steps_total = Math.max(training.steps_total, training.columns.step.length);
  training.steps_kept = training.steps_total;
  if (Object.keys(training.columns).length > columns) next = 0; // load the charts of the new columns
  Episodes.add(added.stage, added.episodes);
  if (!pending.size) setTimeout(draw, document.hidden ? 2000 : 150);
  pending.add(added.stage);
  return undefined;
});
source.addEventListener("status", event => {
  Object.assign(Data, JSON.parse(event.data));
  redraw("status");
});
source.addEventListener("changed", reload);

// The rest of the page is loaded again after a pause, so that loading takes at most 1/250 of the time.
const MIN_PAUSE = 15_000; // milliseconds
const PAUSE_FACTOR = 250; // a pause is at least this many times as long as the loading before it
let next = performance.now() + MIN_PAUSE;
async function readAgain() {
  const began = performance.now();
  if (document.hidden || began < next) return;
  next = Infinity;
  try {
    const answer = await fetch(`${base}/document.json`);
    const { training, ...rest } = await answer.json();
    Object.assign(Data, rest);
    for (const one of Data.training) {
      const { charts, best } = training.find(fresh => fresh.stage === one.stage) || one;
      if (JSON.stringify(charts) === JSON.stringify(one.charts)) continue;
      Object.assign(one, { charts, best });
      redraw(`steps ${one.stage}`);
    }
    redraw("document");
  } finally {
    next = performance.now() + Math.max(MIN_PAUSE, PAUSE_FACTOR * (performance.now() - began));
  }
}

// Add rows to columns of equal length; a row of a known step replaces it.
function append(columns, rows) {
  columns.step ||= [];
  for (const row of rows) {
    if (!Number.isInteger(row.step)) continue;
    const end = columns.step.length - 1;
    if (end >= 0 && row.step < columns.step[end]) continue;
    const place = columns.step[end] === row.step ? end : end + 1;
    for (const name of Object.keys(row)) if (!Object.hasOwn(columns, name)) columns[name] = Array(place).fill(null);
    for (const name of Object.keys(columns)) columns[name][place] = isNumber(row[name]) ? row[name] : null;
  }
}
