// The browser of episodes: choose a stage and a step, search, filter, sort, and read one episode token by
// token beside the other samples of its group. Each step's episodes are parsed when first read.
const index = JSON.parse(document.getElementById("episodes-index").textContent);
const live = Data.live; // URL of the episodes that the page does not contain, or null
const PAGE = 60; // rows of the list to show before the reader asks for more
const ofStep = step => ({ label: `step ${step}`, step, name: `step-${String(step).padStart(6, "0")}` });
for (const stage of index.stages) stage.sets.push(...stage.steps.map(ofStep));
const parsed = new WeakMap(); // set -> a promise of its episodes, each with its group, set and tokens
const state = { stage: null, set: 0, shown: PAGE, current: null, found: [], count: 0, drawn: "", beside: null };
const { plain, select } = Page;

const stageOf = name => index.stages.find(one => one.stage === name);
const has = name => Boolean(stageOf(name)?.sets.length);

function load(set, stage) {
  if (!parsed.has(set)) parsed.set(set, set.script ? embedded(set, stage) : fetched(set, stage));
  return parsed.get(set);
}

async function embedded(set, stage) {
  const groups = JSON.parse(document.getElementById(set.script).textContent);
  return prepared(set, groups, index.vocabularies[stage.vocabulary] || null);
}

// The episodes of a set from the server, or only those of the group with this episode.
async function fetched(set, stage, episode) {
  const place = ["episodes", stage.stage, set.name].map(encodeURIComponent).join("/");
  const answer = await fetch(`${live.base}/${place}${episode ? `?episode=${encodeURIComponent(episode)}` : ""}`);
  if (!answer.ok) throw new Error(`the episodes of ${set.label} could not be read`);
  const found = await answer.json();
  if (!episode) Object.assign(set, { total: found.total, embedded: found.embedded });
  const episodes = prepared(set, found.groups, found.vocabulary.length ? found.vocabulary : null);
  const names = new Set([...stage.strategies, ...episodes.flatMap(one => one.strategies)]);
  if (names.size > stage.strategies.length) {
    stage.strategies = [...names].sort();
    if (stage === state.stage) drawStrategies();
  }
  return episodes;
}

// One episode, which may be a row of a search result.
async function whole(set, stage, id) {
  const find = episodes => episodes.find(one => one.id === id);
  return find(await load(set, stage)) || (live && find(await fetched(set, stage, id)));
}

// Read events from the server until the last one. A new stream of a kind ends the previous one.
const streams = new Map();
function listen(kind, path, query, show) {
  streams.get(kind)?.close();
  const source = new EventSource(`${live.base}/${path}?${new URLSearchParams(query)}`);
  streams.set(kind, source);
  source.onmessage = event => {
    const news = JSON.parse(event.data);
    if (news.searched === news.of) source.close();
    show(news);
  };
}

const isStrategy = name => name.startsWith("strategy/");

function prepared(set, groups, vocabulary) {
  for (const group of groups) {
    group.members = group.episodes;
    for (const episode of group.episodes) {
      const { metrics, logprobs, masked } = episode;
      const own = logprobs.filter((_, place) => !masked?.[place]);
      const strategies = Object.keys(metrics).filter(name => isStrategy(name) && metrics[name] > 0);
      Object.assign(episode, {
        group,
        set,
        vocabulary,
        length: logprobs.length,
        prompt: group.prompt.map(message => message.content).join("\n"),
        strategies: strategies.map(name => name.slice(9)),
        sampled: own.length,
        logprob: sum(own) / (own.length || 1) / 1000,
      });
    }
  }
  return groups.flatMap(group => group.members);
}

// --- filters
const isRight = ({ reward }) => reward !== null && reward >= index.right;
const REWARDS = {
  any: () => true,
  right: isRight,
  partial: ({ reward }) => reward > 0 && reward < index.right,
  wrong: ({ reward }) => reward !== null && reward <= 0,
  failed: episode => episode.failure !== "",
};
// The field to sort by, with a minus for descending order.
const SORTS = {
  "": "as sampled",
  "-reward": "reward, high first",
  reward: "reward, low first",
  "-advantage": "advantage, high first",
  "-length": "longest first",
  length: "shortest first",
  logprob: "least likely first",
};
const ENDINGS = { stop: "end of sequence", length: "token limit", aborted: "aborted" };

function again() {
  state.shown = PAGE;
  if (state.stage) refresh(true);
}
const input = (type, label, more) => h("input", { type, "aria-label": label, oninput: again, ...more });
const view = {
  stage: select("Stage", index.stages.map(one => one.stage), () => browse(view.stage.value)),
  step: input("range", "Step", { min: 0, max: 0, step: 1, value: 0, oninput: () => browse(state.stage.stage, Number(view.step.value)) }),
  stepLabel: h("output"),
  all: h("input", { type: "checkbox", onchange: again }),
  parts: h("div.parts", { role: "group", "aria-label": "Part" }),
  search: input("search", "Search", { placeholder: "Search text, prompt, task" }),
  reward: select("Reward", [["any", "any reward"], "right", "partial", "wrong", ["failed", "verifier failed"]], again),
  strategy: select("Strategy", [["", "any strategy"]], again),
  finish: select("How it ended", [["", "any ending"], ...Object.entries(ENDINGS)], again),
  least: input("number", "Shortest length", { min: 0, placeholder: "min" }),
  most: input("number", "Longest length", { min: 0, placeholder: "max" }),
  group: input("search", "Group", { placeholder: "group: 20/3", class: "narrow" }),
  sort: select("Order", Object.entries(SORTS), again),
  count: h("span", { role: "status" }),
  list: h("ol", { onkeydown: event => Page.moveFocus(event, "button.episode", { ArrowDown: 1, ArrowUp: -1 })?.click() }),
  detail: h("div.detail"),
  matrix: h("div.matrix"),
};
// The fields that are kept in the URL and sent to the server's search, by their names there.
const fields = { q: view.search, reward: view.reward, strategy: view.strategy, finish: view.finish, group: view.group };
Object.assign(fields, { least: view.least, most: view.most, sort: view.sort });
view.stepControl = h("label.control", view.step, view.stepLabel);
view.allControl = h("label.control", view.all, "all steps");

function matches(loaded) {
  const isFound = wordFilter(view.search);
  const least = Number(view.least.value) || 0;
  const most = Number(view.most.value) || Infinity;
  const [strategy, finish, group] = [view.strategy.value, view.finish.value, view.group.value.trim()];
  const found = loaded.filter(episode => {
    if (!REWARDS[view.reward.value](episode)) return false;
    if (strategy === "none" ? episode.strategies.length : strategy && !episode.strategies.includes(strategy.slice(2))) return false;
    if (finish && episode.finish !== finish) return false;
    if (episode.length < least || episode.length > most) return false;
    if (group && episode.group.id !== group) return false;
    return isFound([episode.text, episode.prompt, episode.group.task, episode.id, episode.failure].join("\n"));
  });
  const key = view.sort.value.replace("-", "");
  const sign = key === view.sort.value ? 1 : -1;
  const place = episode => sign * (episode[key] ?? sign * Infinity); // unknown values come last
  return key ? found.sort((a, b) => place(a) - place(b)) : found;
}

function clear() {
  for (const [name, field] of Object.entries(fields)) {
    if (name !== "sort") field.value = name === "reward" ? "any" : "";
    field.dispatchEvent(new Event("input"));
  }
  again();
}

// --- list
function rewardBadge(episode) {
  if (episode.failure) return h("span.reward.failure", { title: episode.failure }, "failed");
  if (episode.reward === null) return h("span.reward.failure", "none");
  const kind = isRight(episode) ? ".right" : episode.reward <= 0 ? ".wrong" : "";
  return h(`span.reward${kind}`, Format.number(episode.reward, 3));
}

const shortId = id => last(id.split("/"));
const lastLine = text => last(text.trim().split("\n"));
const oneLine = text => text.replace(/\s+/g, " ").trim();
const begin = text => oneLine(text).slice(0, 160) || "(empty)";
// The beginning of an answer, and its end, which has the result.
const gist = line => (line.length > 90 ? `${line.slice(0, 40)} … ${line.slice(-45)}` : line || "(empty)");

let turn = 0; // number of the latest refresh; an older refresh that still waits draws nothing
async function refresh(keepSelection = false, wanted = null) {
  const mine = (turn += 1);
  const { stage } = state;
  const [here, isWhole] = [stage.sets[state.set], !view.allControl.hidden && view.all.checked];
  const sets = isWhole && !live ? stage.sets : [here];
  try {
    const loaded = isWhole && live ? null : (await Promise.all(sets.map(set => load(set, stage)))).flat();
    const asked = wanted && (await whole(here, stage, wanted));
    if (mine !== turn) return;
    if (loaded) showFound(matches(loaded), sets, asked);
    else searchRun(stage);
    drawMatrix(isWhole ? [] : loaded, isWhole);
    const isKept = keepSelection && (!loaded || state.found.some(isCurrent));
    if (asked || !isKept) choose(asked || state.found.find(episode => !episode.group.dead) || state.found[0] || null);
  } catch (error) {
    for (const set of sets) parsed.delete(set);
    if (mine === turn) view.count.textContent = error.message;
  }
}

function showFound(found, sets, asked) {
  Object.assign(state, { found, count: found.length });
  if (asked) state.shown = Math.max(state.shown, PAGE + 1 + found.findIndex(one => isSame(one, asked)));
  const [included, total] = [sum(sets.map(set => set.embedded)), sum(sets.map(set => set.total))];
  const coverage = included < total ? `${Format.integer(included)} of ${Format.integer(total)}` : `all ${Format.integer(total)}`;
  drawList(`${coverage} are ${live ? "shown" : "in this file"}`);
}

// Search all steps of a stage on the server, and show its reports while it searches.
function searchRun(stage) {
  const values = Object.entries(fields).map(([name, field]) => [name, field.value.trim()]);
  const query = Object.fromEntries([...values, ["rows", state.shown]].filter(([, value]) => value));
  view.count.textContent = "searching all steps";
  listen("search", `episodes/${encodeURIComponent(stage.stage)}`, query, ({ rows, found, searched, of, unreadable }) => {
    if (stage !== state.stage || !view.all.checked) return;
    const known = new Map(stage.sets.map(set => [set.step, set]));
    state.found = rows.map(({ step, ...row }) => ({ ...row, set: known.get(step) || ofStep(step) }));
    state.count = found;
    const part = searched < of ? `${Format.integer(searched)} of` : "all";
    drawList(`searched ${part} ${Format.integer(of)} steps${unreadable ? `, ${unreadable} unreadable` : ""}`);
  });
}

function drawMatrix(loaded, isWhole) {
  const place = `${state.stage.stage}/${isWhole ? "" : state.set}`;
  if (place !== state.drawn) view.matrix.replaceChildren(...Groups.matrix(loaded, pick));
  state.drawn = place;
}

const isSame = (a, b) => Boolean(a && b) && a.id === b.id && a.set === b.set;
const isCurrent = episode => isSame(episode, state.current);

function row(episode) {
  const asked = lastLine(episode.prompt).length <= 24 && h("span.asked", `${begin(lastLine(episode.prompt))} `);
  const facts = [
    view.all.checked && episode.set.label,
    `group ${shortId(episode.group.id)}`,
    ...episode.strategies,
    episode.finish === "length" && "truncated",
  ];
  return h(
    "button.episode",
    { type: "button", ariaCurrent: isCurrent(episode) && "true", onclick: () => pick(episode) },
    rewardBadge(episode),
    h("span.text", asked, gist(oneLine(episode.text))),
    h("span.meta", episode.length > 0 && `${episode.length} tokens`),
    h("span.meta", facts.filter(Boolean).join(" · ")),
    h("span.meta", episode.advantage !== null && `adv. ${Format.signed(episode.advantage)}`),
  );
}

function drawList(coverage) {
  const { found, shown, count } = state;
  const more = () => {
    state.shown += PAGE * 4;
    refresh(true);
  };
  view.count.textContent = `${Format.integer(count)} ${count === 1 ? "episode" : "episodes"} · ${coverage}`;
  view.list.replaceChildren(...found.slice(0, shown).map(episode => h("li", row(episode))));
  if (!found.length) view.list.append(h("li.list-more.muted", "No episode matches these filters. ", plain("Clear them", clear)));
  if (count > shown) view.list.append(h("li.list-more", plain(`Show more (${Format.integer(count - shown)} left)`, more)));
}

// --- detail
async function pick(episode) {
  touched = true;
  if (episode.group.members) return choose(episode);
  const mine = (turn += 1);
  const found = await whole(episode.set, state.stage, episode.id);
  return mine === turn && found ? choose(found) : undefined;
}

function choose(episode) {
  state.current = episode;
  Charts.hideTooltip();
  for (const [place, button] of view.list.querySelectorAll("button.episode").entries())
    button.ariaCurrent = isSame(state.found[place], episode) ? "true" : null;
  requestAnimationFrame(reveal);
  if (episode && touched) remember(episode);
  Groups.mark(view.matrix, episode);
  const beside = state.beside?.episode !== episode && state.beside?.episode;
  const shown = episode ? detail(episode) : [h("div.card.muted", "No episode is selected.")];
  view.detail.parentElement.classList.toggle("paired", Boolean(beside));
  view.detail.replaceChildren(...(beside ? [h("div", detail(beside)[0]), h("div", shown)] : shown));
}

// Keep an episode beside the episodes that are opened next, or remove it.
function keep(episode) {
  touched = true;
  state.beside = state.beside?.episode === episode ? null : { episode, stage: state.stage.stage };
  choose(state.current);
}

// --- link
let touched = false; // whether the reader has selected something; otherwise the address stays short
const placeOf = (stage, label, id) => [stage, label, id].map(encodeURIComponent).join("/");
const addressOf = (...place) => `#episodes/${placeOf(...place)}`;

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return ""; // a damaged link
  }
}

function remember(episode) {
  const { stage, beside } = state;
  const other = beside && beside.episode !== episode ? `/${placeOf(beside.stage, beside.episode.set.label, beside.episode.id)}` : "";
  Address.set("#", addressOf(stage.stage, episode.set.label, episode.id) + other);
}

// Show the episode in the address (#episodes/STAGE/STEP/EPISODE), and the one beside it.
function showAddress() {
  const [name, ...parts] = location.hash.slice(1).split("/").map(decoded);
  const place = name === "episodes" ? (stageOf(parts[0])?.sets.findIndex(set => set.label === parts[1]) ?? -1) : -1;
  if (place < 0) return false;
  touched = true;
  setStage(parts[0], place, parts[2]);
  const stage = stageOf(parts[3]);
  const set = stage?.sets.find(one => one.label === parts[4]);
  if (set)
    whole(set, stage, parts[5]).then(episode => {
      state.beside = episode ? { episode, stage: stage.stage } : null;
      choose(state.current);
    });
  requestAnimationFrame(arrive);
  return true;
}

// Scroll to the episodes, and stay there while the charts above are drawn.
function arrive() {
  const there = document.getElementById("episodes");
  const follows = new ResizeObserver(() => there.scrollIntoView({ behavior: "instant" }));
  follows.observe(document.body);
  setTimeout(() => follows.disconnect(), 1500);
}

// New episode files of a stage, by step.
function add(name, steps) {
  const stage = stageOf(name);
  if (!stage) return;
  const known = new Set(stage.sets.map(set => set.step));
  const isLast = stage === state.stage && state.set === stage.sets.length - 1;
  const added = steps.filter(step => !known.has(step));
  stage.sets.push(...added.map(ofStep));
  if (stage !== state.stage || !added.length) return;
  if (isLast && !touched) setPlace(stage.sets.length - 1);
  else view.step.max = stage.sets.length - 1;
}

// Scroll the list, and only the list, to the episode that is shown.
function reveal() {
  const { list } = view;
  const button = list.querySelector("[aria-current]");
  if (!button) return;
  const top = button.offsetTop - list.offsetTop;
  const isShown = top >= list.scrollTop && top + button.offsetHeight <= list.scrollTop + list.clientHeight;
  if (!isShown) list.scrollTop = top - 60;
}

function factsOf(episode) {
  const { length, sampled, advantage, finish, versions, strategies, group, logprob } = episode;
  const others = sampled < length ? `, and ${length - sampled} by others` : "";
  const ends = Array.isArray(versions) ? [versions[0], last(versions)] : [];
  const range = ends[0] ? `versions ${ends[0][0]} to ${ends[1][0]}` : null;
  return [
    ["reward", rewardBadge(episode)],
    ["advantage", advantage === null ? null : Format.signed(advantage)],
    ["length", length ? `${sampled} tokens${others}` : null],
    ["ended by", ENDINGS[finish] || finish],
    ["weights", typeof versions === "number" ? `version ${versions}` : range],
    ["strategy", strategies.join(", ")],
    ["task", group.task],
    ["mean log-prob", length ? Format.number(logprob, 3) : null],
  ];
}

function prompt({ prompt: messages, rendered }) {
  const isNamed = messages.length > 1 || messages[0]?.role !== "user";
  return [
    messages.length > 0 && [h("h4", "Prompt"), Page.messages(messages, isNamed)],
    rendered && [h("h4", "Prompt as the model saw it"), h("div.prose", { tabindex: 0 }, rendered)],
  ];
}

function detail(episode) {
  const { group, set } = episode;
  const place = state.found.findIndex(one => isSame(one, episode));
  const step = (text, by) => plain(text, () => pick(state.found[place + by]), { disabled: !state.found[place + by] });
  const steps = place >= 0 && [step("Previous", -1), step("Next", 1)];
  const compare = plain(state.beside?.episode === episode ? "Put away" : "Compare", () => keep(episode));
  const isAlone = group.members.length === 1;
  const names = isAlone ? [shortId(group.id)] : [`group ${shortId(group.id)}`, `sample ${shortId(episode.id)}`];
  const figures = [
    ...Object.entries(episode.terms).map(([name, value]) => [`reward for ${name}`, Format.number(value)]),
    ...Object.entries(episode.metrics).filter(([name]) => !isStrategy(name)).map(([name, value]) => [name, Format.number(value)]),
  ];
  const card = h(
    "div.card",
    h("div.chart-head", h("h3", [set.label, ...names].join(" · ")), h("div.chart-tools", compare, steps)),
    Page.definitions(factsOf(episode), "fields"),
    episode.failure && h("p.notice", h("b", "No score. "), episode.failure),
    prompt(group),
    h("h4", episode.turns ? "Turns" : "Answer"),
    Tokens.view(episode),
    group.expected && [h("h4", "Right answer"), h("div.prose", { tabindex: 0 }, group.expected)],
    Spans.lanes(episode),
    figures.length > 0 && [h("h4", "Scores and metrics"), Page.definitions(figures, "fields")],
  );
  const same = Attempts.card(show => attemptsAt(group.task, show), (...place) => (location.hash = addressOf(...place)));
  return [card, !isAlone && siblings(group, episode), same].filter(Boolean);
}

function advantageBar(value, largest) {
  const size = (50 * Math.abs(value)) / (largest || 1);
  const style = { "--from": value < 0 ? `${50 - size}%` : "50%", "--size": `${size}%`, "--bar": value < 0 ? "var(--c2)" : "var(--c3)" };
  return [
    h("span.advantage", { "aria-hidden": "true" }, value !== 0 && h("i", style)),
    h("span.figure", Format.signed(value)),
  ];
}

function siblings(group, current) {
  const { members } = group;
  const isTraining = members.some(episode => episode.advantage !== null);
  const largest = Math.max(0, ...members.map(episode => Math.abs(episode.advantage || 0)));
  const dead = group.dead ? " A dead group: all rewards are equal, so it gives no gradient." : "";
  const read = (episode, name) =>
    h("button", { type: "button", "aria-label": `Read sample ${name}`, onclick: () => pick(episode) }, name);
  const sample = episode =>
    h(
      "tr",
      { ariaCurrent: episode === current && "true" },
      h("td", read(episode, shortId(episode.id))),
      h("td", rewardBadge(episode)),
      isTraining && h("td", episode.advantage === null ? "–" : advantageBar(episode.advantage, largest)),
      h("td", String(episode.length)),
      h("td.words", begin(episode.text)),
    );
  const heads = ["Sample", "Reward", ...(isTraining ? ["Advantage"] : []), "Tokens"].map(name => h("th", name));
  return h(
    "div.card",
    h("h3", "Its group"),
    h("p.muted", `${members.length} samples of one task, ${members.filter(isRight).length} right.${dead}`),
    h(
      "div.scroll",
      { tabindex: 0 },
      h("table.siblings", h("thead", h("tr", heads, h("th.text", "Answer"))), h("tbody", members.map(sample))),
    ),
  );
}

// --- place
function drawStrategies() {
  const { strategies } = state.stage;
  const options = [["", "any strategy"], ...strategies.map(one => [`s:${one}`, one]), ["none", "no strategy"]];
  view.strategy.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
  view.strategy.value = Address.get("strategy");
  if (!view.strategy.value) view.strategy.value = "";
  view.strategy.hidden = !strategies.length;
}

function setStage(name, place, episode) {
  const stage = stageOf(name);
  if (stage !== state.stage) {
    if (state.stage) for (const field of ["strategy", "group"]) Address.set(field, (fields[field].value = ""));
    state.stage = stage;
    drawStrategies();
  }
  view.stage.value = name;
  setPlace(place ?? (stage.task === "rl" ? stage.sets.length - 1 : 0), episode);
}

function setPlace(place, episode = null) {
  const { sets, task } = state.stage;
  const isSeries = task !== "evaluate" && task !== "collect" && sets.length > 1;
  state.set = place;
  state.shown = PAGE;
  view.step.max = sets.length - 1;
  view.step.value = place;
  view.stepLabel.textContent = view.step.ariaValueText = sets[place].label;
  view.stepControl.hidden = view.allControl.hidden = !isSeries;
  view.parts.hidden = isSeries || sets.length < 2;
  const part = (one, at) => Page.chip(one.label, () => browse(state.stage.stage, at), { ariaPressed: String(at === place) });
  view.parts.replaceChildren(...(view.parts.hidden ? [] : sets.map(part)));
  refresh(false, episode);
}

// Show a place that the reader selected.
function browse(stage, place) {
  if (place !== undefined) view.all.checked = false;
  view.all.dispatchEvent(new Event("input"));
  touched = true;
  setStage(stage, place);
}

// Show the nearest step, and make it possible to go back.
function open(name, step) {
  const { sets } = stageOf(name);
  const far = sets.map(set => Math.abs(set.step - step));
  location.hash = addressOf(name, sets[far.indexOf(Math.min(...far))].label);
}

// Call show() with the attempts at a task in all stages, from this file or from the server.
async function attemptsAt(task, show) {
  if (live) {
    let [known, before] = [[], 0];
    return listen("tasks", "attempts", { task }, news => {
      if (news.searched <= before) known = []; // the connection was lost, and the server begins again
      before = news.searched;
      known.push(...news.attempts);
      show({ ...news, attempts: known });
    });
  }
  const pairs = index.stages.filter(stage => stage.task !== "collect").flatMap(stage => stage.sets.map(set => [stage, set]));
  const attempts = [];
  for (const [stage, set] of pairs) {
    const members = (await load(set, stage)).filter(one => one.group.task === task);
    if (members.length) attempts.push({ stage: stage.stage, label: set.label, step: set.step, members });
  }
  return show({ attempts, searched: pairs.length, of: pairs.length });
}

function section() {
  if (!index.stages.length) return null;
  const tokens = h("label.control", "tokens", view.least, view.most);
  const sort = h("label.control.last", "Sort", view.sort);
  const list = h("div.episode-list", h("div.list-head", view.count), view.list);
  const element = Page.section(
    "episodes",
    "Episodes",
    index.lead,
    h("div.toolbar", h("label.control", "Stage", view.stage), view.parts, view.stepControl, view.allControl, sort),
    view.matrix,
    h("div.toolbar", view.search, view.reward, view.strategy, view.finish, view.group, tokens),
    h("div.browser", list, view.detail),
  );
  const first = index.stages.findLast(one => one.task === "rl") || last(index.stages);
  for (const [name, field] of Object.entries({ ...fields, all: view.all })) Address.keep(name, field);
  if (!showAddress()) setStage(first.stage);
  addEventListener("hashchange", showAddress);
  return element;
}

globalThis.Episodes = { add, has, isRight, open, section };
