// An answer token by token, coloured by what is known of each token.
"use strict";

const Tokens = (() => {
  const VISIBLE = { "\n": "⏎\n", "\t": "⇥\t", "": "·" };
  let chosen = "probability"; // how the reader wants tokens coloured, for all episodes

  const isMasked = (episode, place) => Boolean(episode.masked && episode.masked[place]);

  function versionAt(episode, place) {
    if (typeof episode.versions === "number") return episode.versions;
    let end = 0;
    for (const [version, count] of episode.versions || []) if (place < (end += count)) return version;
    return null;
  }

  // The process reward of the segment that a token belongs to; null without process rewards.
  function stepAt(episode, place) {
    const step = (episode.steps || []).find(([end]) => place <= end);
    return step ? step[1] : null;
  }

  // Entropy in nats of the recorded alternatives, with all other tokens counted as one.
  function entropyAt(episode, place) {
    const shares = episode.top[place].map(([, logprob]) => Math.exp(logprob / 1000));
    shares.push(1 - shares.reduce((sum, one) => sum + one, 0));
    return shares.reduce((sum, one) => sum - (one > 0 ? one * Math.log(one) : 0), 0);
  }

  // The log-prob of a token minus its log-prob under the reference: its sample of the KL, in nats.
  const klAt = (episode, place) => (episode.logprobs[place] - episode.reference[place]) / 1000;

  // Depth of colour of a token: none when it was certain, full at a probability of one in a thousand.
  const heat = (logprob) => Math.min(1, Math.max(0, -logprob / 6.9)) ** 0.7 * 0.72;
  const signed = (value, most) => [value < 0 ? "var(--c2)" : "var(--c3)", (0.6 * Math.abs(value)) / (most || 1)];

  // Ways to colour: [colour, depth from 0 to 1] of a token, for the episodes that have what it shows.
  const MODES = {
    probability: { has: () => true, of: (episode, place) => [null, heat(episode.logprobs[place] / 1000)] },
    entropy: { has: (episode) => Boolean(episode.top), of: (episode, place) => [null, Math.min(0.72, entropyAt(episode, place) / 3)] },
    "KL to the reference": {
      has: (episode) => Boolean(episode.reference),
      of: (episode, place) => signed(Math.max(-2, Math.min(2, klAt(episode, place))), 2),
    },
    advantage: {
      has: (episode) => Boolean(episode.advantage),
      of: (episode) => signed(episode.advantage, Math.max(...episode.group.members.map((one) => Math.abs(one.advantage || 0)))),
    },
    "step reward": {
      has: (episode) => (episode.steps || []).length > 0,
      of: (episode, place) => signed(stepAt(episode, place) || 0, Math.max(...episode.steps.map(([, value]) => Math.abs(value)))),
    },
    "policy version": {
      has: (episode) => Array.isArray(episode.versions) && episode.versions.length > 1,
      of: (episode, place) => [`var(--c${(Math.max(0, versionAt(episode, place)) % 8) + 1})`, 0.35],
    },
  };

  function keyOf(mode, episode) {
    const sample = (label, color, depth) => {
      const element = h("span", { class: "token" }, label);
      paint(element, color, depth);
      return element;
    };
    if (mode === "probability")
      return [1, 0.5, 0.1, 0.01, 0.001].map((one) => sample(one === 1 ? "certain" : Format.percentTick(one), null, heat(Math.log(one))));
    if (mode === "policy version") {
      const versions = [...new Set(episode.versions.map(([version]) => version).filter((version) => version >= 0))];
      return versions.map((version) => sample(`version ${version}`, `var(--c${(version % 8) + 1})`, 0.35));
    }
    if (mode === "entropy") return [0, 0.5, 1, 2].map((one) => sample(`${one} nats`, null, Math.min(0.72, one / 3)));
    return [sample("made likelier", "var(--c3)", 0.5), sample("made less likely", "var(--c2)", 0.5)];
  }

  function paint(element, color, depth) {
    if (color) element.style.setProperty("--tint", color);
    else element.style.removeProperty("--tint");
    element.style.setProperty("--depth", `${(100 * depth).toFixed(1)}%`);
  }

  function details(episode, text, place) {
    const rows = [{ name: "token", value: JSON.stringify(text) }];
    if (isMasked(episode, place)) rows.push({ name: "written by", value: "environment, not the policy" });
    else {
      const logprob = episode.logprobs[place] / 1000;
      const probability = Math.exp(logprob);
      const rare = probability < 1e-4 ? Format.number(probability, 3) : Format.percent(probability);
      rows.push({ name: "log-prob", value: Format.number(logprob, 4) });
      rows.push({ name: "probability", value: probability > 0.9995 ? "> 99.9%" : rare });
      if (episode.top) rows.push({ name: "entropy, at least", value: `${Format.number(entropyAt(episode, place), 3)} nats` });
      if (episode.reference) rows.push({ name: "KL to the reference", value: `${Format.number(klAt(episode, place), 3)} nats` });
      if (episode.advantage !== null) rows.push({ name: "advantage", value: Format.number(episode.advantage, 3) });
      if (stepAt(episode, place) !== null) rows.push({ name: "step reward", value: Format.number(stepAt(episode, place), 3) });
    }
    for (const [token, logprob] of episode.top ? episode.top[place] : [])
      rows.push({ name: JSON.stringify(episode.vocabulary[token][0]), value: Format.percent(Math.exp(logprob / 1000)) });
    const version = versionAt(episode, place);
    if (version !== null) rows.push({ name: "sampled by", value: `weights version ${version}` });
    return rows;
  }

  function asText(episode) {
    const why = episode.vocabulary
      ? "The tokens of this group were too large to include, so only the text is shown."
      : "The tokenizer of this run was not found, so only the text is shown.";
    const turns = (episode.turns || []).map((turn) => [h("span", { class: "role" }, turn.role), h("span", {}, turn.text), "\n"]);
    return [
      h("div", { class: "prose", tabindex: 0 }, episode.turns ? turns : episode.text || "(empty)"),
      episode.length ? h("p", { class: "heat-key" }, why) : null,
    ].filter(Boolean);
  }

  // The answer as elements, with the key of its colours.
  function view(episode) {
    if (!episode.tokens) return asText(episode);
    const pieces = episode.tokens.map((token) => (typeof token === "string" ? [token, 0] : episode.vocabulary[token]));
    const holder = h("div", {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Answer, token by token; arrow keys move",
    });
    const starts = new Map((episode.turns || []).map((turn) => [turn.start, turn.role]));
    const elements = pieces.map(([text, special], place) => {
      const shown = VISIBLE[text] !== undefined && !special;
      const element = h(
        "span",
        { class: `token${special ? " special" : ""}${isMasked(episode, place) ? " masked" : ""}` },
        shown ? [h("span", { class: "invisible" }, VISIBLE[text][0]), VISIBLE[text].slice(1)] : text,
      );
      if (starts.has(place)) holder.append(h("span", { class: "role" }, starts.get(place)));
      holder.append(element);
      return element;
    });
    const key = h("p", { class: "heat-key" });
    const modes = Object.keys(MODES).filter((mode) => MODES[mode].has(episode));
    const select = h(
      "select",
      { "aria-label": "Colour of tokens", on: { change: () => draw((chosen = select.value)) } },
      modes.map((mode) => h("option", { value: mode }, mode)),
    );
    function draw(mode) {
      for (const [place, element] of elements.entries())
        if (!isMasked(episode, place)) paint(element, ...MODES[mode].of(episode, place));
      key.replaceChildren("Colour: ", modes.length > 1 ? select : "probability under the policy", ...keyOf(mode, episode));
    }
    select.value = modes.includes(chosen) ? chosen : "probability";
    draw(select.value);
    readable(holder, elements, (place) => [
      `token ${place + 1} of ${pieces.length}`,
      details(episode, pieces[place][0], place),
    ]);
    return [holder, key];
  }

  // Let the pointer and the arrow keys read single tokens.
  function readable(holder, elements, tell) {
    let current = null;
    const show = (place) => {
      if (current !== null) elements[current].classList.remove("current");
      current = place;
      if (place === null) return Charts.hideTooltip();
      const element = elements[place];
      element.classList.add("current");
      const box = element.getClientRects()[0] || element.getBoundingClientRect();
      return Charts.showTooltip(box.left + box.width / 2, box.top, ...tell(place));
    };
    holder.addEventListener("pointerover", (event) => {
      const place = elements.indexOf(event.target.closest(".token"));
      show(place < 0 ? null : place);
    });
    holder.addEventListener("pointerleave", () => show(null));
    holder.addEventListener("blur", () => show(null));
    holder.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") show(null);
      if (!by) return;
      event.preventDefault();
      show(Math.max(0, Math.min(elements.length - 1, current === null ? 0 : current + by)));
    });
  }

  return { view };
})();
