// The browser of episodes: choose a stage and a step, search, filter, sort, and read one episode token by
// token beside the other samples of its group. Each step's episodes are parsed when first read.
const index = JSON.parse(document.getElementById("episodes-index").textContent);
const live = Data.live; // URL of the episodes that the page does not contain, or null
const PAGE = 60; // rows of the list to show before the reader asks for more
const ofStep = step => ({ label: `step ${step}`, step, name: `step-${String(step).padStart(6, "0")}` });
for (const stage of index.stages) stage.sets.push(...stage.steps.map(ofStep));
const parsed = new WeakMap(); // set -> a promise of its episodes, each with its group, set and tokens
// What is shown. found: the episodes that match the filters, `count` with those that the server keeps; shown: how many to
// list; status: the line above the list; matrix: the episodes of the matrix; current: the open episode; beside: the one next
// to it; touched: whether the reader has selected something, otherwise the address stays short.
const state = { stage: null, set: 0, found: [], count: 0, shown: PAGE, status: "", matrix: [], current: null, beside: null };
state.touched = false;
function change(values) {
  Object.assign(state, values);
  redraw("episodes");
}

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

// The episodes of a set from the server, or only those of the group with this episode or task.
async function fetched(set, stage, episode, base = live.base) {
  const place = ["episodes", stage.stage, set.name].map(encodeURIComponent).join("/");
  const answer = await fetch(`${base}/${place}${episode ? `?episode=${encodeURIComponent(episode)}` : ""}`);
  if (!answer.ok) throw new Error(`the episodes of ${set.label} could not be read`);
  const found = await answer.json();
  if (!episode) Object.assign(set, { total: found.total, embedded: found.embedded });
  const episodes = prepared(set, found.groups, found.vocabulary.length ? found.vocabulary : null);
  const names = new Set([...stage.strategies, ...episodes.flatMap(one => one.strategies)]);
  if (names.size > stage.strategies.length) stage.strategies = [...names].sort();
  return episodes;
}

// One episode by its id, or the first at a task. The set may leave it out.
async function find(set, stage, id) {
  const among = episodes => episodes.find(one => one.id === id) || episodes.find(one => one.group.task === id);
  return among(await load(set, stage)) || (live && among(await fetched(set, stage, id)));
}

// Read events from the server until the last one. A new stream of a kind ends the previous one.
const streams = new Map();
function listen(kind, path, query, act, base = live.base) {
  streams.get(kind)?.close();
  const source = new EventSource(`${base}/${path}?${new URLSearchParams(query)}`);
  streams.set(kind, source);
  source.onmessage = event => {
    const found = JSON.parse(event.data);
    if (found.searched === found.of) source.close();
    act(found);
  };
  return source;
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
const SORTS = [
  ["", "as sampled"],
  ["-reward", "reward, high first"],
  ["reward", "reward, low first"],
  ["-advantage", "advantage, high first"],
  ["-length", "longest first"],
  ["length", "shortest first"],
  ["logprob", "least likely first"],
];
const ENDINGS = { stop: "end of sequence", length: "token limit", aborted: "aborted" };
const isSeries = ({ task, sets }) => task !== "evaluate" && task !== "collect" && sets.length > 1;

// The filters in the URL, by their names there and in the server's search.
const FILTERS = ["q", "reward", "strategy", "finish", "group", "least", "most", "sort"];
const options = () => ({
  reward: [["any", "any reward"], "right", "partial", "wrong", ["failed", "verifier failed"]],
  strategy: [["", "any strategy"], ...state.stage.strategies.map(one => [`s:${one}`, one]), ["none", "no strategy"]],
  finish: [["", "any ending"], ...Object.entries(ENDINGS)],
  sort: SORTS,
});
function filters() {
  const all = options();
  return Object.fromEntries(FILTERS.map(name => [name, setting(name, all[name]).trim()]));
}
const isWhole = () => isSeries(state.stage) && setting("all") === "true";

function again() {
  state.shown = PAGE;
  if (state.stage) refresh(true);
}
for (const name of [...FILTERS, "all"]) updates.addEventListener(`?${name}`, again);

function matches(loaded) {
  const { q, reward, strategy, finish, group, least, most, sort } = filters();
  const isFound = wordFilter(q);
  const found = loaded.filter(episode => {
    if (!REWARDS[reward](episode)) return false;
    if (strategy === "none" ? episode.strategies.length : strategy && !episode.strategies.includes(strategy.slice(2))) return false;
    if (finish && episode.finish !== finish) return false;
    if (episode.length < Number(least) || episode.length > (Number(most) || Infinity)) return false;
    if (group && episode.group.id !== group) return false;
    return isFound([episode.text, episode.prompt, episode.group.task, episode.id, episode.failure].join("\n"));
  });
  const key = sort.replace("-", "");
  const sign = key === sort ? 1 : -1;
  const place = episode => sign * (episode[key] ?? sign * Infinity); // unknown values come last
  return key ? found.sort((a, b) => place(a) - place(b)) : found;
}

const clear = () => FILTERS.filter(name => name !== "sort").forEach(name => Address.set(name, ""));

let turn = 0; // number of the latest refresh; an older refresh that still waits draws nothing
async function refresh(keepSelection = false, wanted = null) {
  const mine = (turn += 1);
  const { stage, current: before } = state;
  const [here, whole] = [stage.sets[state.set], isWhole()];
  const sets = whole && !live ? stage.sets : [here];
  try {
    const loaded = whole && live ? null : await Promise.all(sets.map(set => load(set, stage)));
    const asked = wanted && (await find(here, stage, wanted));
    if (mine !== turn) return;
    if (loaded) showFound(matches(loaded.flat()), sets, asked);
    else searchRun(stage);
    state.matrix = whole ? [] : loaded[0];
    // What the reader opened in the meantime stays open.
    const isKept = state.current !== before || (keepSelection && (!loaded || state.found.some(isCurrent)));
    if (asked || !isKept) choose(asked || state.found.find(episode => !episode.group.dead) || state.found[0] || null);
    change();
  } catch (error) {
    for (const set of sets) parsed.delete(set);
    if (mine === turn) change({ status: error.message });
  }
}

const counted = (count, coverage) => `${Format.integer(count)} ${count === 1 ? "episode" : "episodes"} · ${coverage}`;

function showFound(found, sets, asked) {
  if (asked) state.shown = Math.max(state.shown, PAGE + 1 + found.findIndex(one => isSame(one, asked)));
  const [included, total] = [sum(sets.map(set => set.embedded)), sum(sets.map(set => set.total))];
  const coverage = included < total ? `${Format.integer(included)} of ${Format.integer(total)}` : `all ${Format.integer(total)}`;
  const status = counted(found.length, `${coverage} are ${live ? "shown" : "in this file"}`);
  Object.assign(state, { found, count: found.length, status });
}

// Search all steps of a stage on the server, and show its reports while it searches.
function searchRun(stage) {
  const query = Object.fromEntries(Object.entries({ ...filters(), rows: state.shown }).filter(([, value]) => value));
  change({ status: "searching all steps" });
  listen("search", `episodes/${encodeURIComponent(stage.stage)}`, query, ({ rows, found, searched, of, unreadable }) => {
    if (stage !== state.stage || !isWhole()) return;
    const known = new Map(stage.sets.map(set => [set.step, set]));
    const part = searched < of ? `${Format.integer(searched)} of` : "all";
    const coverage = `searched ${part} ${Format.integer(of)} steps${unreadable ? `, ${unreadable} unreadable` : ""}`;
    const all = rows.map(({ step, ...row }) => ({ ...row, set: known.get(step) || ofStep(step) }));
    change({ found: all, count: found, status: counted(found, coverage) });
  });
}

// --- list
function rewardBadge({ failure, reward }) {
  if (failure) return html`<span class="reward failure" title=${failure}>failed</span>`;
  if (reward === null) return html`<span class="reward failure">none</span>`;
  const kind = isRight({ reward }) ? "right" : reward <= 0 ? "wrong" : "";
  return html`<span class="reward ${kind}">${Format.number(reward, 3)}</span>`;
}

const shortId = id => last(id.split("/"));
const lastLine = text => last(text.trim().split("\n"));
const oneLine = text => text.replace(/\s+/g, " ").trim();
const begin = text => oneLine(text).slice(0, 160) || "(empty)";
// The beginning of an answer, and its end, which has the result.
const gist = line => (line.length > 90 ? `${line.slice(0, 40)} … ${line.slice(-45)}` : line || "(empty)");

const isSame = (a, b) => Boolean(a && b) && a.id === b.id && a.set === b.set;
const isCurrent = episode => isSame(episode, state.current);

function row(episode) {
  const asked = lastLine(episode.prompt);
  const facts = [
    isWhole() && episode.set.label,
    `group ${shortId(episode.group.id)}`,
    ...episode.strategies,
    episode.finish === "length" && "truncated",
  ];
  return html`<li key=${`${episode.set.label}/${episode.id}`}>
    <button class="episode" type="button" aria-current=${isCurrent(episode) || null} onclick=${() => pick(episode)}>
      ${rewardBadge(episode)}
      <span class="text">
        ${asked.length <= 24 && html`<span class="asked">${`${begin(asked)} `}</span>`}${gist(oneLine(episode.text))}
      </span>
      <span class="meta">${episode.length > 0 && `${episode.length} tokens`}</span>
      <span class="meta">${facts.filter(Boolean).join(" · ")}</span>
      <span class="meta">${episode.advantage !== null && `adv. ${Format.signed(episode.advantage)}`}</span>
    </button>
  </li>`;
}

function List() {
  const { found, count, shown, status, current } = state;
  const list = useRef();
  // Scroll the list, and only the list, to the episode that is shown.
  useEffect(() => {
    const button = list.current.querySelector("[aria-current]");
    if (!button) return;
    const top = button.offsetTop - list.current.offsetTop;
    const { scrollTop, clientHeight } = list.current;
    const isShown = top >= scrollTop && top + button.offsetHeight <= scrollTop + clientHeight;
    if (!isShown) list.current.scrollTop = top - 60;
  }, [current]);
  const more = () => {
    state.shown += PAGE * 4;
    refresh(true);
  };
  const move = event => moveFocus(event, "button.episode", { ArrowDown: 1, ArrowUp: -1 })?.click();
  return html`<div class="episode-list">
    <div class="list-head"><span role="status">${status}</span></div>
    <ol onkeydown=${move} ref=${list}>
      ${found.slice(0, shown).map(row)}
      ${!found.length && html`<li class="list-more muted">
        No episode matches these filters. <${Plain} onclick=${clear}>Clear them<//>
      </li>`}
      ${count > shown && html`<li class="list-more">
        <${Plain} onclick=${more}>Show more (${Format.integer(count - shown)} left)<//>
      </li>`}
    </ol>
  </div>`;
}

// --- detail
async function pick(episode) {
  state.touched = true;
  if (episode.group.members) return choose(episode);
  const mine = (turn += 1);
  const found = await find(episode.set, state.stage, episode.id);
  return mine === turn && found ? choose(found) : undefined;
}

function choose(episode) {
  Charts.hideTooltip();
  change({ current: episode });
  if (episode && state.touched) remember(episode);
}

// Keep an episode beside the episodes that are opened next, or remove it.
function keep(episode) {
  state.touched = true;
  state.beside = state.beside?.episode === episode ? null : { episode, stage: state.stage.stage };
  choose(state.current);
}

// --- link
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
  Address.setFragment(addressOf(stage.stage, episode.set.label, episode.id) + other);
}

// Show the episode in the address (#episodes/STAGE/STEP/EPISODE), and the one beside it.
function showAddress() {
  const [name, ...parts] = location.hash.slice(1).split("/").map(decoded);
  const place = name === "episodes" ? (stageOf(parts[0])?.sets.findIndex(set => set.label === parts[1]) ?? -1) : -1;
  if (place < 0) return false;
  state.touched = true;
  show(parts[0], place, parts[2]);
  const stage = stageOf(parts[3]);
  const set = stage?.sets.find(one => one.label === parts[4]);
  if (set)
    find(set, stage, parts[5]).then(episode => {
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

// New episode files of a stage, by step. The list follows the newest step, at most once in `FOLLOW_PAUSE`.
const FOLLOW_PAUSE = 5000; // milliseconds
let [following, followed] = [0, 0]; // the timer of the next step to show, and the time of the last
function follow() {
  [following, followed] = [0, performance.now()];
  if (!state.touched) show(state.stage.stage, state.stage.sets.length - 1);
}
function add(name, steps) {
  const stage = stageOf(name);
  if (!stage) return;
  const known = new Set(stage.sets.map(set => set.step));
  const isLast = stage === state.stage && state.set === stage.sets.length - 1;
  const added = steps.filter(step => !known.has(step));
  stage.sets.push(...added.map(ofStep));
  if (stage !== state.stage || !added.length) return;
  if (isLast && !following) following = setTimeout(follow, followed + FOLLOW_PAUSE - performance.now());
  change();
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

function prompt({ prompt: said, rendered }) {
  const isNamed = said.length > 1 || said[0]?.role !== "user";
  return html`
    ${said.length > 0 && html`<h4>Prompt</h4><${Messages} said=${said} isNamed=${isNamed} />`}
    ${rendered && html`<h4>Prompt as the model saw it</h4><div class="prose" tabindex="0">${rendered}</div>`}`;
}

// One episode as a card; `run` is the experiment that it comes from, if that is another one.
function detail(episode, run) {
  const { group, set, failure, turns } = episode;
  const place = state.found.findIndex(one => isSame(one, episode));
  const step = (text, by) => {
    const other = state.found[place + by];
    return html`<${Plain} disabled=${!other} onclick=${() => pick(other)}>${text}<//>`;
  };
  const compare = state.beside?.episode === episode ? "Put away" : "Compare";
  const [own, sample] = [shortId(group.id), shortId(episode.id)];
  const names = group.members.length === 1 ? [own] : [`group ${own}`, `sample ${sample}`];
  const figures = [
    ...Object.entries(episode.terms).map(([name, value]) => [`reward for ${name}`, Format.number(value)]),
    ...Object.entries(episode.metrics).filter(([name]) => !isStrategy(name)).map(([name, value]) => [name, Format.number(value)]),
  ];
  return html`<div class="card" key=${`${set.label}/${episode.id}`}>
    <div class="chart-head">
      <h3>${[set.label, ...names].join(" · ")}</h3>
      <div class="chart-tools">
        ${run ? html`<a class="mono" href="/experiments/${encodeURIComponent(run)}">${run}</a>` : html`<${Plain} onclick=${() => keep(episode)}>${compare}<//>`}
        ${!run && place >= 0 && [step("Previous", -1), step("Next", 1)]}
      </div>
    </div>
    <${Definitions} pairs=${factsOf(episode)} kind="fields" />
    ${failure && html`<p class="notice"><b>No score. </b>${failure}</p>`}
    ${prompt(group)}
    <h4>${turns ? "Turns" : "Answer"}</h4>
    <${Answer} episode=${episode} />
    ${group.expected && html`<h4>Right answer</h4><div class="prose" tabindex="0">${group.expected}</div>`}
    <${Spans} spans=${episode.spans} />
    ${figures.length > 0 && html`<h4>Scores and metrics</h4><${Definitions} pairs=${figures} kind="fields" />`}
  </div>`;
}

// An attempt of another experiment at the task of an episode: in the same stage if possible, at the nearest step, and
// with the same number among its samples.
function Twin({ run, episode, stage }) {
  const [{ twin, status }, tell] = useState({});
  useEffect(() => {
    const base = `/experiments/${encodeURIComponent(run)}`;
    const distance = one => Math.abs(one.step - episode.set.step) + (one.stage === stage ? 0 : 1e12);
    let [best, isWanted] = [null, true];
    const say = told => isWanted && tell(told);
    const read = async ({ attempts, searched, of }) => {
      for (const one of attempts) if (!best || distance(one) < distance(best)) best = one;
      if (searched < of) return;
      if (!best) return say({ status: `${run} has no episode of this task.` });
      const { id } = best.members[episode.group.members.indexOf(episode)] || best.members[0];
      const all = await fetched({ ...best }, { stage: best.stage, strategies: [] }, id, base);
      say({ twin: all.find(one => one.id === id) });
    };
    const fail = () => say({ status: `The episodes of ${run} could not be read.` });
    say({ status: `Searching ${run}.` });
    const source = listen("twin", "attempts", { task: episode.group.task }, found => read(found).catch(fail), base);
    source.onerror = () => source.readyState === EventSource.CLOSED && fail();
    return () => (isWanted = source.close());
  }, [run, episode]);
  return twin ? detail(twin, run) : html`<div class="card muted" role="status">${status}</div>`;
}

const go = (...place) => (location.hash = addressOf(...place));

// An episode with its group and the same task in other steps.
function reading(episode) {
  if (!episode) return html`<div class="card muted">No episode is selected.</div>`;
  const { group } = episode;
  return html`
    ${detail(episode)}
    ${group.members.length > 1 && siblings(group, episode)}
    <${Attempts} key=${group.task} group=${group} gather=${attemptsAt} go=${go} />`;
}

function advantageBar(value, largest) {
  const size = (50 * Math.abs(value)) / (largest || 1);
  const style = { "--from": value < 0 ? `${50 - size}%` : "50%", "--size": `${size}%`, "--bar": value < 0 ? "var(--c2)" : "var(--c3)" };
  return html`
    <span class="advantage" aria-hidden="true">${value !== 0 && html`<i style=${style} />`}</span>
    <span class="figure">${Format.signed(value)}</span>`;
}

function siblings({ members, dead }, current) {
  const isTraining = members.some(episode => episode.advantage !== null);
  const largest = Math.max(0, ...members.map(episode => Math.abs(episode.advantage || 0)));
  const sample = episode => {
    const name = shortId(episode.id);
    const advantage = episode.advantage === null ? "–" : advantageBar(episode.advantage, largest);
    return html`<tr aria-current=${episode === current || null}>
      <td><button type="button" aria-label="Read sample ${name}" onclick=${() => pick(episode)}>${name}</button></td>
      <td>${rewardBadge(episode)}</td>
      ${isTraining && html`<td>${advantage}</td>`}
      <td>${episode.length}</td>
      <td class="words">${begin(episode.text)}</td>
    </tr>`;
  };
  const heads = ["Sample", "Reward", ...(isTraining ? ["Advantage"] : []), "Tokens"].map(name => html`<th>${name}</th>`);
  return html`<div class="card">
    <h3>Its group</h3>
    <p class="muted">
      ${`${members.length} samples of one task, ${members.filter(isRight).length} right.`}
      ${dead && " A dead group: all rewards are equal, so it gives no gradient."}
    </p>
    <div class="scroll" tabindex="0">
      <table class="siblings">
        <thead><tr>${heads}<th class="text">Answer</th></tr></thead>
        <tbody>${members.map(sample)}</tbody>
      </table>
    </div>
  </div>`;
}

// --- place
// Show a set of a stage, by default its usual one, and an episode in it.
function show(name, place, episode = null) {
  const [stage, before] = [stageOf(name), state.stage];
  change({ stage, set: place ?? (stage.task === "rl" ? stage.sets.length - 1 : 0), shown: PAGE });
  if (before && before !== stage) for (const filter of ["strategy", "group"]) Address.set(filter, "");
  refresh(false, episode);
}

// Show a place that the reader selected.
function browse(name, place) {
  state.touched = true;
  show(name, place);
  if (place !== undefined && setting("all")) Address.set("all", "");
}

// Show the nearest step, and make it possible to go back.
function open(name, step) {
  const { sets } = stageOf(name);
  const far = sets.map(set => Math.abs(set.step - step));
  location.hash = addressOf(name, sets[far.indexOf(Math.min(...far))].label);
}

// Pass the attempts at a task in all stages to a function, from this file or from the server.
async function attemptsAt(task, act) {
  if (live) {
    let [known, before] = [[], 0];
    return listen("tasks", "attempts", { task }, found => {
      if (found.searched <= before) known = []; // the connection was lost, and the server begins again
      before = found.searched;
      known.push(...found.attempts);
      act({ ...found, attempts: known });
    });
  }
  const pairs = index.stages.filter(stage => stage.task !== "collect").flatMap(stage => stage.sets.map(set => [stage, set]));
  const attempts = [];
  for (const [stage, set] of pairs) {
    const members = (await load(set, stage)).filter(one => one.group.task === task);
    if (members.length) attempts.push({ stage: stage.stage, label: set.label, step: set.step, members });
  }
  return act({ attempts, searched: pairs.length, of: pairs.length });
}

function placeBar({ stage, task, sets }) {
  const { label } = sets[state.set];
  const slider = { min: 0, max: sets.length - 1, step: 1, value: state.set, "aria-valuetext": label };
  const part = (one, place) =>
    html`<${Chip} aria-pressed=${place === state.set} onclick=${() => browse(stage, place)}>${one.label}<//>`;
  const names = index.stages.map(one => one.stage);
  const isOne = !isSeries({ task, sets });
  const hasParts = isOne && sets.length > 1;
  const checkAll = event => Address.set("all", event.target.checked ? "true" : "");
  return html`<div class="toolbar">
    <label class="control">
      Stage<${Select} label="Stage" options=${names} value=${stage} choose=${name => browse(name)} />
    </label>
    <div class="parts" role="group" aria-label="Part" hidden=${!hasParts}>${hasParts && sets.map(part)}</div>
    <label class="control" hidden=${isOne}>
      <input type="range" aria-label="Step" ...${slider} oninput=${event => browse(stage, Number(event.target.value))} />
      <output>${label}</output>
    </label>
    <label class="control" hidden=${isOne}>
      <input type="checkbox" checked=${setting("all") === "true"} onchange=${checkAll} />all steps
    </label>
    ${live && html`<${Field} name="with" type="search" label="Other experiment" placeholder="beside: ID" class="narrow" />`}
    <label class="control last">Sort<${Choice} name="sort" label="Order" options=${SORTS} /></label>
  </div>`;
}

function filterBar() {
  const { reward, strategy, finish } = options();
  return html`<div class="toolbar">
    <${Field} name="q" type="search" label="Search" placeholder="Search text, prompt, task" />
    <${Choice} name="reward" label="Reward" options=${reward} />
    <${Choice} name="strategy" label="Strategy" options=${strategy} hidden=${strategy.length < 3} />
    <${Choice} name="finish" label="How it ended" options=${finish} />
    <${Field} name="group" type="search" label="Group" placeholder="group: 20/3" class="narrow" />
    <label class="control">
      tokens
      <${Field} name="least" type="number" label="Shortest length" min="0" placeholder="min" />
      <${Field} name="most" type="number" label="Longest length" min="0" placeholder="max" />
    </label>
  </div>`;
}

function Browser() {
  useUpdates("episodes");
  const [run] = useSetting("with"); // an experiment whose attempt at the same task stands beside
  const { stage, set, matrix, current, beside } = state;
  if (!stage) return null;
  const twin = live && run && current && html`<${Twin} run=${run} episode=${current} stage=${stage.stage} />`;
  const kept = beside && beside.episode !== current && detail(beside.episode);
  const columns = [kept, reading(current), !kept && twin].filter(Boolean);
  return html`<${Section} id="episodes" title="Episodes" text=${index.lead}>
    ${placeBar(stage)}
    <div class="matrix">
      <${Groups.Matrix} key=${`${stage.stage}/${set}`} episodes=${matrix} current=${current} pick=${pick} />
    </div>
    ${filterBar()}
    <div class=${columns.length > 1 ? "browser paired" : "browser"}>
      <${List} />
      <div class="detail">
        ${columns.map(column => html`<div>${column}</div>`)}
      </div>
    </div>
  <//>`;
}

// Choose what to show at first: the episode in the address, or those of the last stage that learned from episodes.
function start() {
  if (!index.stages.length) return;
  addEventListener("hashchange", showAddress);
  const first = index.stages.findLast(one => one.task === "rl") || last(index.stages);
  if (!showAddress()) show(first.stage);
}

globalThis.Episodes = { add, start, has, isRight, open, Browser };
