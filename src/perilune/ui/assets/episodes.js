// The browser of episodes: choose a stage and a step, search, filter, sort, and read one episode token by
// token beside the other samples of its group. Each step's episodes are a JSON block parsed when first read.
// Text of models is shown in text nodes only (`h` in page.js), never as markup.
"use strict";

const Episodes = (() => {
  const index = JSON.parse(document.getElementById("episodes-index").textContent);
  const live = Data.live; // where the page finds episodes that it does not contain, or null
  const PAGE = 60; // rows added to the list at a time
  const MOST_FETCHED = 40; // steps to search together in a live page
  const ofStep = (step) => ({ label: `step ${step}`, step, name: `step-${String(step).padStart(6, "0")}` });
  for (const stage of index.stages) stage.sets.push(...stage.steps.map(ofStep));
  const parsed = new WeakMap(); // set -> a promise of its episodes, each with its group, set and tokens
  const state = { stage: null, set: 0, all: false, shown: PAGE, current: null, found: [], drawn: "", beside: null };
  const view = {};

  const has = (stage) => index.stages.some((one) => one.stage === stage && one.sets.length);

  function load(set, stage) {
    if (!parsed.has(set)) parsed.set(set, set.script ? embedded(set, stage) : fetched(set, stage));
    return parsed.get(set);
  }

  async function embedded(set, stage) {
    const groups = JSON.parse(document.getElementById(set.script).textContent);
    return prepared(set, groups, index.vocabularies[stage.vocabulary] || null);
  }

  async function fetched(set, stage) {
    const answer = await fetch(`${live.base}/episodes/${encodeURIComponent(stage.stage)}/${encodeURIComponent(set.name)}`);
    if (!answer.ok) throw new Error(`the episodes of ${set.label} could not be read`);
    const found = await answer.json();
    Object.assign(set, { total: found.total, embedded: found.embedded });
    const episodes = prepared(set, found.groups, found.vocabulary.length ? found.vocabulary : null);
    const names = new Set([...stage.strategies, ...episodes.flatMap((episode) => episode.strategies)]);
    if (names.size > stage.strategies.length) {
      stage.strategies = [...names].sort();
      if (stage === state.stage) drawStrategies();
    }
    return episodes;
  }

  const prepared = (set, groups, vocabulary) =>
      groups.flatMap((group) => {
        const members = group.episodes.map((episode) => Object.assign(episode, { group, set, vocabulary }));
        for (const episode of members) {
          episode.length = episode.logprobs.length;
          episode.prompt = group.prompt.map((message) => message.content).join("\n");
          episode.strategies = Object.keys(episode.metrics)
            .filter((name) => name.startsWith("strategy/") && episode.metrics[name] > 0)
            .map((name) => name.slice(9));
          const own = episode.logprobs.filter((_, place) => !(episode.masked && episode.masked[place]));
          episode.sampled = own.length;
          episode.meanLogprob = own.length ? own.reduce((sum, value) => sum + value, 0) / own.length / 1000 : 0;
        }
        group.members = members;
        return members;
      });

  // ------------------------------------------------------------------------------------- filters
  const REWARDS = {
    any: () => true,
    right: (episode) => episode.reward !== null && episode.reward >= index.right,
    partial: (episode) => episode.reward !== null && episode.reward > 0 && episode.reward < index.right,
    wrong: (episode) => episode.reward !== null && episode.reward <= 0,
    failed: (episode) => episode.failure !== "",
  };
  const SORTS = {
    "as sampled": null,
    "reward, high first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    "reward, low first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
    "advantage, high first": (a, b) => (b.advantage ?? -Infinity) - (a.advantage ?? -Infinity),
    "longest first": (a, b) => b.length - a.length,
    "shortest first": (a, b) => a.length - b.length,
    "least likely first": (a, b) => a.meanLogprob - b.meanLogprob,
  };

  function select(label, options, onChange) {
    return h(
      "select",
      { "aria-label": label, on: { change: onChange } },
      options.map(([value, text]) => h("option", { value }, text)),
    );
  }

  function matches(loaded) {
    const words = view.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const least = Number(view.least.value) || 0;
    const most = Number(view.most.value) || Infinity;
    const found = loaded.filter((episode) => {
      if (!REWARDS[view.reward.value](episode)) return false;
      if (
        view.strategy.value === "none"
          ? episode.strategies.length
          : view.strategy.value && !episode.strategies.includes(view.strategy.value.slice(2))
      )
        return false;
      if (view.finish.value && episode.finish !== view.finish.value) return false;
      if (episode.length < least || episode.length > most) return false;
      if (view.group.value && episode.group.id !== view.group.value.trim()) return false;
      if (!words.length) return true;
      const text =
        `${episode.text}\n${episode.prompt}\n${episode.group.task}\n${episode.id}\n${episode.failure}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const order = SORTS[view.sort.value];
    return order ? found.toSorted(order) : found;
  }

  function clear() {
    for (const field of [view.search, view.least, view.most, view.group, view.strategy, view.finish]) field.value = "";
    view.reward.value = "any";
    refresh(true);
  }

  // ---------------------------------------------------------------------------------------- list
  function rewardBadge(episode) {
    if (episode.failure) return h("span", { class: "reward failure", title: episode.failure }, "failed");
    if (episode.reward === null) return h("span", { class: "reward failure" }, "none");
    const kind = REWARDS.right(episode) ? "right" : episode.reward <= 0 ? "wrong" : "";
    return h("span", { class: `reward ${kind}` }, Format.number(episode.reward, 3));
  }

  const oneLine = (text) => text.replace(/\s+/g, " ").trim().slice(0, 160) || "(empty)";
  // The beginning of an answer and its end, where the result stands.
  const gist = (line) => (line.length > 90 ? `${line.slice(0, 40)} … ${line.slice(-45)}` : line || "(empty)");

  let turn = 0; // of the latest refresh: an older one that waits for its episodes draws nothing
  async function refresh(keepSelection = false, wanted = null) {
    const mine = (turn += 1);
    const stage = state.stage;
    const sets = state.all ? stage.sets : [stage.sets[state.set]];
    let loaded = [];
    try {
      loaded = (await Promise.all(sets.map((set) => load(set, stage)))).flat();
    } catch (error) {
      for (const set of sets) parsed.delete(set);
      if (mine === turn) view.count.textContent = error.message;
      return;
    }
    if (mine !== turn) return;
    state.found = matches(loaded);
    state.shown = PAGE;
    const embedded = sets.reduce((sum, set) => sum + set.embedded, 0);
    const total = sets.reduce((sum, set) => sum + set.total, 0);
    const coverage =
      embedded < total
        ? `${Format.integer(embedded)} of ${Format.integer(total)} are ${live ? "shown" : "in this file"}`
        : `all ${Format.integer(total)} are ${live ? "shown" : "in this file"}`;
    view.count.textContent = `${Format.integer(state.found.length)} ${state.found.length === 1 ? "episode" : "episodes"} · ${coverage}`;
    const place = `${stage.stage}/${state.all ? "" : state.set}`;
    if (place !== state.drawn) view.matrix.replaceChildren(...Groups.matrix(state.all ? [] : loaded, pick));
    state.drawn = place;
    drawList();
    const asked = wanted && state.found.find((episode) => episode.id === wanted);
    if (asked || !keepSelection || !state.found.includes(state.current))
      choose(asked || state.found.find((episode) => !episode.group.dead) || state.found[0] || null);
  }

  function drawList() {
    const rows = state.found.slice(0, state.shown).map((episode) => {
      const button = h(
        "button",
        { type: "button", class: "episode", on: { click: () => pick(episode) } },
        rewardBadge(episode),
        h(
          "span",
          { class: "text" },
          lastLine(episode.prompt).length > 24
            ? null
            : h("span", { class: "asked" }, `${oneLine(lastLine(episode.prompt))} `),
          gist(episode.text.replace(/\s+/g, " ").trim()),
        ),
        h("span", { class: "meta" }, episode.length ? `${episode.length} tokens` : ""),
        h(
          "span",
          { class: "meta" },
          [
            state.all ? `${episode.set.label} · ` : "",
            `group ${last(episode.group.id)}`,
            ...episode.strategies.map((name) => ` · ${name}`),
            episode.finish === "length" ? " · truncated" : "",
          ].join(""),
        ),
        h("span", { class: "meta" }, episode.advantage === null ? "" : `adv. ${Format.signed(episode.advantage)}`),
      );
      if (episode === state.current) button.setAttribute("aria-current", "true");
      return h("li", {}, button);
    });
    view.list.replaceChildren(
      ...(rows.length
        ? rows
        : [
            h(
              "li",
              { class: "list-more muted" },
              "No episode matches these filters. ",
              plain("Clear them", clear),
            ),
          ]),
    );
    if (state.found.length > state.shown) {
      view.list.append(
        h(
          "li",
          { class: "list-more" },
          plain(`Show more (${Format.integer(state.found.length - state.shown)} left)`, () => {
            state.shown += PAGE * 4;
            drawList();
          }),
        ),
      );
    }
  }

  const last = (id) => id.split("/").pop();
  const plain = (text, click, disabled) => h("button", { type: "button", class: "plain", disabled, on: { click } }, text);
  const fields = (pairs) =>
    h(
      "dl",
      { class: "fields" },
      pairs
        .filter(([, value]) => value !== null && value !== "")
        .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    );
  const lastLine = (text) => text.trim().split("\n").pop() || "";

  function moveFocus(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...view.list.querySelectorAll("button.episode")];
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  }

  // -------------------------------------------------------------------------------------- detail
  function pick(episode) {
    touched = true;
    choose(episode);
  }

  function choose(episode) {
    state.current = episode;
    Charts.hideTooltip();
    for (const [place, button] of [...view.list.querySelectorAll("button.episode")].entries()) {
      if (state.found[place] === episode) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    requestAnimationFrame(reveal);
    if (episode && touched) remember(episode);
    Groups.mark(view.matrix, episode);
    const beside = state.beside && state.beside.episode !== episode ? state.beside.episode : null;
    const shown = episode ? detail(episode) : [h("div", { class: "card muted" }, "No episode is selected.")];
    view.detail.parentElement.classList.toggle("paired", beside !== null);
    view.detail.replaceChildren(...(beside ? [h("div", {}, detail(beside)[0]), h("div", {}, shown)] : shown));
  }

  // Keep an episode beside those that are chosen next, or put it away.
  function keep(episode) {
    touched = true;
    state.beside = state.beside && state.beside.episode === episode ? null : { episode, stage: state.stage.stage };
    choose(state.current);
  }

  // ----------------------------------------------------------------------------------------- link
  let touched = false; // whether the reader has chosen something: the address of an untouched page stays short
  function remember(episode) {
    const { beside } = state;
    const other = beside && beside.episode !== episode ? [beside.stage, beside.episode.set.label, beside.episode.id] : [];
    const place = [state.stage.stage, episode.set.label, episode.id, ...other].map(encodeURIComponent).join("/");
    history.replaceState(null, "", `#episodes/${place}`);
  }

  // Show what the address names: #episodes/STAGE/STEP/EPISODE, and the same of an episode beside it.
  function follow() {
    const [name, ...parts] = location.hash.slice(1).split("/").map(decodeURIComponent);
    const stage = index.stages.find((one) => one.stage === parts[0]);
    if (name !== "episodes" || !stage) return false;
    const place = stage.sets.findIndex((set) => set.label === parts[1]);
    if (place < 0) return false;
    touched = true;
    setStage(stage.stage, undefined, place, parts[2] || null);
    const besides = index.stages.find((one) => one.stage === parts[3]);
    const set = besides && besides.sets.find((one) => one.label === parts[4]);
    if (set)
      load(set, besides).then((episodes) => {
        const episode = episodes.find((one) => one.id === parts[5]);
        state.beside = episode ? { episode, stage: besides.stage } : null;
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
    const stage = index.stages.find((one) => one.stage === name);
    if (!stage || !steps.length) return;
    const known = new Set(stage.sets.map((set) => set.step));
    const wasLast = stage === state.stage && state.set === stage.sets.length - 1;
    const added = steps.filter((step) => !known.has(step));
    stage.sets.push(...added.map(ofStep));
    if (stage !== state.stage || !added.length) return;
    if (wasLast && !touched) setPlace(stage.sets.length - 1);
    else {
      view.step.max = stage.sets.length - 1;
      drawPicker();
    }
  }

  // Scroll the list, and only the list, to the episode that is shown.
  function reveal() {
    const { list } = view;
    const button = list.querySelector("[aria-current]");
    if (!button) return;
    const top = button.offsetTop - list.offsetTop;
    if (top < list.scrollTop || top + button.offsetHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = top - 60;
  }

  function detail(episode) {
    const { group, set } = episode;
    const place = state.found.indexOf(episode);
    const step = (by) => () => state.found[place + by] && pick(state.found[place + by]);
    const turn = (text, by) => plain(text, step(by), !state.found[place + by]);
    const facts = [
      ["reward", rewardBadge(episode)],
      ["advantage", episode.advantage === null ? null : Format.signed(episode.advantage)],
      [
        "length",
        episode.length
          ? `${episode.sampled} tokens` +
            (episode.sampled < episode.length ? `, and ${episode.length - episode.sampled} by others` : "")
          : null,
      ],
      [
        "ended by",
        episode.finish === "stop" ? "end of sequence" : episode.finish === "length" ? "token limit" : episode.finish,
      ],
      ["weights", versionLabel(episode)],
      ["strategy", episode.strategies.join(", ")],
      ["task", group.task],
      ["mean log-prob", episode.length ? Format.number(episode.meanLogprob, 3) : null],
    ];
    const terms = Object.entries(episode.terms);
    const figures = Object.entries(episode.metrics).filter(([name]) => !name.startsWith("strategy/"));
    return [
      h(
        "div",
        { class: "card" },
        h(
          "div",
          { class: "chart-head" },
          h(
            "h3",
            {},
            group.members.length > 1
              ? `${set.label} · group ${last(group.id)} · sample ${last(episode.id)}`
              : `${set.label} · ${last(group.id)}`,
          ),
          h(
            "div",
            { class: "chart-tools" },
            plain(state.beside && state.beside.episode === episode ? "Put away" : "Compare", () => keep(episode)),
            place < 0 ? null : [turn("Previous", -1), turn("Next", 1)],
          ),
        ),
        fields(facts),
        episode.failure ? h("p", { class: "notice" }, h("b", {}, "No score. "), episode.failure) : null,
        group.prompt.length ? h("h4", {}, "Prompt") : null,
        group.prompt.length === 0
          ? null
          : h(
              "div",
              { class: "prose", tabindex: 0 },
              group.prompt.map((message) => [
                group.prompt.length > 1 || message.role !== "user" ? h("span", { class: "role" }, message.role) : null,
                h("span", {}, message.content),
                "\n",
              ]),
            ),
        group.rendered
          ? [h("h4", {}, "Prompt as the model saw it"), h("div", { class: "prose", tabindex: 0 }, group.rendered)]
          : null,
        h("h4", {}, episode.turns ? "Turns" : "Answer"),
        Tokens.view(episode),
        Spans.lanes(episode),
        terms.length || figures.length ? h("h4", {}, "What it got") : null,
        terms.length || figures.length
          ? fields([
              ...terms.map(([name, value]) => [`reward for ${name}`, Format.number(value)]),
              ...figures.map(([name, value]) => [name, Format.number(value)]),
            ])
          : null,
      ),
      ...(group.members.length > 1 ? [siblings(group, episode)] : []),
    ];
  }

  function versionLabel(episode) {
    const { versions } = episode;
    if (versions === null) return null;
    if (typeof versions === "number") return `version ${versions}`;
    return versions && versions.length ? `versions ${versions[0][0]} to ${versions[versions.length - 1][0]}` : null;
  }

  function advantageBar(value, largest) {
    const bar = h("i", {});
    const size = (50 * Math.abs(value)) / (largest || 1);
    bar.style.setProperty("--from", value < 0 ? `${50 - size}%` : "50%");
    bar.style.setProperty("--size", `${size}%`);
    bar.style.setProperty("--bar", value < 0 ? "var(--c2)" : "var(--c3)");
    return h("span", { class: "advantage", "aria-hidden": "true" }, value ? bar : null);
  }

  function siblings(group, current) {
    const members = group.members;
    const isTraining = members.some((episode) => episode.advantage !== null);
    const largest = Math.max(0, ...members.map((episode) => Math.abs(episode.advantage || 0)));
    const scored = members.filter((episode) => episode.reward !== null);
    const right = scored.filter(REWARDS.right).length;
    const summary = `${members.length} samples of one task, ${right} right${group.dead ? ". A dead group: all rewards are equal, so it gives no gradient." : "."}`;
    const rows = members.map((episode) => {
      const row = h(
        "tr",
        {},
        h(
          "td",
          {},
          h(
            "button",
            {
              type: "button",
              "aria-label": `Read sample ${last(episode.id)}`,
              on: { click: () => pick(episode) },
            },
            last(episode.id),
          ),
        ),
        h("td", {}, rewardBadge(episode)),
        isTraining
          ? h(
              "td",
              {},
              episode.advantage === null
                ? "–"
                : [advantageBar(episode.advantage, largest), h("span", { class: "figure" }, Format.signed(episode.advantage))],
            )
          : null,
        h("td", {}, String(episode.length)),
        h("td", { class: "words" }, oneLine(episode.text)),
      );
      if (episode === current) row.setAttribute("aria-current", "true");
      return row;
    });
    return h(
      "div",
      { class: "card" },
      h("h3", {}, "Its group"),
      h("p", { class: "muted" }, summary),
      h(
        "div",
        { class: "scroll", tabindex: 0 },
        h(
          "table",
          { class: "siblings" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "Sample"),
              h("th", {}, "Reward"),
              isTraining ? h("th", {}, "Advantage") : null,
              h("th", {}, "Tokens"),
              h("th", { class: "text" }, "Answer"),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    );
  }

  // -------------------------------------------------------------------------------------- picker
  function drawStrategies() {
    const { strategies } = state.stage;
    const chosen = view.strategy.value;
    view.strategy.replaceChildren(
      h("option", { value: "" }, "any strategy"),
      ...strategies.map((one) => h("option", { value: `s:${one}` }, one)),
      strategies.length ? h("option", { value: "none" }, "no strategy") : "",
    );
    view.strategy.value = chosen;
    view.strategy.hidden = !strategies.length;
  }

  function setStage(name, step, at = null, episode = null) {
    const stage = index.stages.find((one) => one.stage === name);
    const isNew = stage !== state.stage;
    state.stage = stage;
    view.stage.value = name;
    if (isNew) state.all = false;
    if (isNew) {
      view.strategy.value = "";
      drawStrategies();
      view.group.value = "";
    }
    const places = stage.sets.map((set) => set.step);
    const wanted =
      at !== null
        ? at
        : step === undefined
        ? stage.task === "rl"
          ? stage.sets.length - 1
          : 0
        : places.reduce(
            (best, value, place) => (Math.abs(value - step) < Math.abs(places[best] - step) ? place : best),
            0,
          );
    setPlace(wanted, episode);
  }

  function setPlace(place, episode = null) {
    state.set = place;
    const set = state.stage.sets[place];
    view.step.max = state.stage.sets.length - 1;
    view.step.value = place;
    view.stepLabel.textContent = set.label;
    view.step.ariaValueText = set.label;
    view.all.checked = state.all;
    drawPicker();
    const isSeries = state.stage.task !== "evaluate" && state.stage.task !== "collect";
    view.stepControl.hidden = !isSeries || state.stage.sets.length < 2;
    view.allControl.hidden = view.stepControl.hidden || (live !== null && state.stage.sets.length > MOST_FETCHED);
    view.parts.hidden = isSeries || state.stage.sets.length < 2;
    view.parts.replaceChildren(
      ...state.stage.sets.map((one, index) =>
        h(
          "button",
          { type: "button", class: "chip", ariaPressed: String(index === place), on: { click: () => setPlace(index) } },
          one.label,
        ),
      ),
    );
    refresh(false, episode);
  }

  // Sets with their mean rewards; the curves have those of steps that were not read yet.
  function ratedSets(stage) {
    const training = Data.training.find((one) => one.stage === stage.stage);
    if (!live || !training || !training.columns.reward) return stage.sets.filter((set) => typeof set.mean_reward === "number");
    const rewards = new Map(training.columns.step.map((step, place) => [step, training.columns.reward[place]]));
    return stage.sets
      .map((set) => ({ ...set, mean_reward: rewards.get(set.step) }))
      .filter((set) => typeof set.mean_reward === "number");
  }

  function drawPicker() {
    const { stage } = state;
    const rated = ratedSets(stage);
    if (stage.sets.length < 4 || rated.length < 4) return view.picker.replaceChildren();
    return view.picker.replaceChildren(
      Charts.lines({
        key: "picker",
        title: `Mean reward of the ${live ? "" : "included "}steps of ${stage.stage}; click a step to read its episodes`,
        height: 104,
        x: { name: "step", integer: true },
        marker: state.all ? undefined : stage.sets[state.set].step,
        y: { format: (value) => Format.number(value, 3), ticks: 2 },
        series: [
          { name: "mean reward", x: rated.map((set) => set.step), y: rated.map((set) => set.mean_reward), color: 1 },
        ],
        pick: (step) => setStage(stage.stage, step),
      }),
    );
  }

  function open(stage, step) {
    state.all = false;
    touched = true;
    setStage(stage, step);
    document.getElementById("episodes").scrollIntoView();
  }

  function section(make) {
    if (!index.stages.length) return null;
    const again = () => refresh(true);
    view.stage = select(
      "Stage",
      index.stages.map((one) => [one.stage, one.stage]),
      () => setStage(view.stage.value),
    );
    view.step = h("input", {
      type: "range",
      min: 0,
      max: 0,
      step: 1,
      value: 0,
      "aria-label": "Step",
      on: {
        input: () => {
          state.all = false;
          touched = true;
          setPlace(Number(view.step.value));
        },
      },
    });
    view.stepLabel = h("output", {}, "");
    view.stepControl = h("label", { class: "control" }, view.step, view.stepLabel);
    view.all = h("input", {
      type: "checkbox",
      on: {
        change: () => {
          state.all = view.all.checked;
          drawPicker();
          refresh();
        },
      },
    });
    view.parts = h("div", { class: "parts", role: "group", "aria-label": "Part" });
    view.allControl = h("label", { class: "control" }, view.all, "all steps");
    view.search = h("input", {
      type: "search",
      placeholder: "Search text, prompt, task",
      "aria-label": "Search",
      on: { input: again },
    });
    view.reward = select(
      "Reward",
      [
        ["any", "any reward"],
        ["right", "right"],
        ["partial", "partial"],
        ["wrong", "wrong"],
        ["failed", "verifier failed"],
      ],
      again,
    );
    view.strategy = select("Strategy", [["", "any strategy"]], again);
    view.finish = select(
      "How it ended",
      [
        ["", "any ending"],
        ["stop", "end of sequence"],
        ["length", "token limit"],
        ["aborted", "aborted"],
      ],
      again,
    );
    view.least = h("input", {
      type: "number",
      min: 0,
      placeholder: "min",
      "aria-label": "Shortest length",
      on: { input: again },
    });
    view.most = h("input", {
      type: "number",
      min: 0,
      placeholder: "max",
      "aria-label": "Longest length",
      on: { input: again },
    });
    view.group = h("input", {
      type: "search",
      placeholder: "group: 20/3",
      "aria-label": "Group",
      class: "narrow",
      on: { input: again },
    });
    view.sort = select(
      "Order",
      Object.keys(SORTS).map((name) => [name, name]),
      again,
    );
    view.count = h("span", { role: "status" });
    view.list = h("ol", { on: { keydown: moveFocus } });
    view.detail = h("div", { class: "detail" });
    view.picker = h("div", { class: "picker" });
    view.matrix = h("div", { class: "matrix" });
    const element = make(
      "episodes",
      "Episodes",
      index.lead,
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "control" }, "Stage", view.stage),
        view.parts,
        view.stepControl,
        view.allControl,
        h("label", { class: "control last" }, "Sort", view.sort),
      ),
      view.picker,
      view.matrix,
      h(
        "div",
        { class: "toolbar" },
        view.search,
        view.reward,
        view.strategy,
        view.finish,
        view.group,
        h("label", { class: "control" }, "tokens", view.least, view.most),
      ),
      h(
        "div",
        { class: "browser" },
        h("div", { class: "episode-list" }, h("div", { class: "list-head" }, view.count), view.list),
        view.detail,
      ),
    );
    const trained = index.stages.filter((one) => one.task === "rl");
    if (!follow()) setStage((trained[trained.length - 1] || index.stages[index.stages.length - 1]).stage);
    addEventListener("hashchange", follow);
    return element;
  }

  return { add, has, open, section };
})();
