// An answer token by token, colored by a value of each token.
const VISIBLE = { "\n": "⏎\n", "\t": "⇥\t", "": "·" };

const isMasked = (episode, place) => Boolean(episode.masked?.[place]);

function versionAt({ versions }, place) {
  if (!Array.isArray(versions)) return versions;
  let end = 0;
  for (const [version, count] of versions) if (place < (end += count)) return version;
  return null;
}

// The process reward of the segment that a token belongs to; undefined without process rewards.
const stepAt = (episode, place) => episode.steps?.find(([end]) => place <= end)?.[1];

// Entropy in nats of the recorded alternatives, with all other tokens counted as one.
function entropyAt(episode, place) {
  const shares = episode.top[place].map(([, logprob]) => Math.exp(logprob / 1000));
  return sum([...shares, 1 - sum(shares)].map(one => (one > 0 ? -one * Math.log(one) : 0)));
}

// The log-prob of a token minus its log-prob under the reference, a sample of the KL, in nats.
const klAt = (episode, place) => (episode.logprobs[place] - episode.reference[place]) / 1000;

// Depth of a token's color: none at probability 1, full at a probability of at most 1/1000.
const heat = logprob => clamp(0, -logprob / 6.9, 1) ** 0.7 * 0.72;
const uncertain = nats => Math.min(0.72, nats / 3);
const signed = (value, most) => [value < 0 ? "var(--c2)" : "var(--c3)", (0.6 * Math.abs(value)) / (most || 1)];
const versioned = version => [`var(--c${(Math.max(0, version) % 8) + 1})`, 0.35];
const largest = values => Math.max(...values.map(value => Math.abs(value || 0)));

// The ways to color tokens. has(episode): whether it has the values; of(episode, place): [color, depth from 0 to 1] of
// a token; key(episode): entries [text, color, depth] of the legend.
const MODES = {
  probability: {
    has: () => true,
    of: (episode, place) => [null, heat(episode.logprobs[place] / 1000)],
    key: () => [1, 0.5, 0.1, 0.01, 0.001].map(one => [one === 1 ? "certain" : Format.percentTick(one), null, heat(Math.log(one))]),
  },
  entropy: {
    has: episode => episode.top,
    of: (episode, place) => [null, uncertain(entropyAt(episode, place))],
    key: () => [0, 0.5, 1, 2].map(one => [`${one} nats`, null, uncertain(one)]),
  },
  "KL to the reference": {
    has: episode => episode.reference,
    of: (episode, place) => signed(clamp(-2, klAt(episode, place), 2), 2),
  },
  advantage: {
    has: episode => episode.advantage,
    of: episode => signed(episode.advantage, largest(episode.group.members.map(one => one.advantage))),
  },
  "step reward": {
    has: episode => episode.steps?.length,
    of: (episode, place) => signed(stepAt(episode, place) || 0, largest(episode.steps.map(([, value]) => value))),
  },
  "policy version": {
    has: ({ versions }) => Array.isArray(versions) && versions.length > 1,
    of: (episode, place) => versioned(versionAt(episode, place)),
    key: episode =>
      [...new Set(episode.versions.map(([version]) => version))]
        .filter(version => version >= 0)
        .map(version => [`version ${version}`, ...versioned(version)]),
  },
};
const SIGNS = [["made likelier", "var(--c3)", 0.5], ["made less likely", "var(--c2)", 0.5]];

function paint(element, color, depth) {
  element.style.setProperty("--tint", color || "");
  element.style.setProperty("--depth", `${(100 * depth).toFixed(1)}%`);
  return element;
}

function details(episode, text, place) {
  const rows = [["token", JSON.stringify(text)]];
  if (isMasked(episode, place)) rows.push(["written by", "environment, not the policy"]);
  else {
    const logprob = episode.logprobs[place] / 1000;
    const probability = Math.exp(logprob);
    const rare = probability < 1e-4 ? Format.number(probability, 3) : Format.percent(probability);
    const step = stepAt(episode, place);
    rows.push(["log-prob", Format.number(logprob, 4)]);
    rows.push(["probability", probability > 0.9995 ? "> 99.9%" : rare]);
    if (episode.top) rows.push(["entropy, at least", `${Format.number(entropyAt(episode, place), 3)} nats`]);
    if (episode.reference) rows.push(["KL to the reference", `${Format.number(klAt(episode, place), 3)} nats`]);
    if (episode.advantage !== null) rows.push(["advantage", Format.number(episode.advantage, 3)]);
    if (step !== undefined) rows.push(["step reward", Format.number(step, 3)]);
  }
  for (const [token, logprob] of episode.top?.[place] || [])
    rows.push([JSON.stringify(episode.vocabulary[token][0]), Format.percent(Math.exp(logprob / 1000))]);
  const version = versionAt(episode, place);
  if (!isNothing(version)) rows.push(["sampled by", `weights version ${version}`]);
  return rows.map(([name, value]) => ({ name, value }));
}

function asText(episode) {
  const why = episode.vocabulary ? "The tokens of this group were too large to include" : "The tokenizer of this run was not found";
  const turns = episode.turns?.map(turn => [h("span.role", turn.role), h("span", turn.text), "\n"]);
  return [
    h("div.prose", { tabindex: 0 }, turns || episode.text || "(empty)"),
    episode.length > 0 && h("p.heat-key", `${why}, so only the text is shown.`),
  ];
}

function tokenOf([text, special], masked) {
  const isShown = VISIBLE[text] !== undefined && !special;
  const content = isShown ? [h("span.invisible", VISIBLE[text][0]), VISIBLE[text].slice(1)] : text;
  return h(`span.token${special ? ".special" : ""}${masked ? ".masked" : ""}`, content);
}

// The answer as elements, with the legend of its colors.
function view(episode) {
  if (!episode.tokens) return asText(episode);
  const pieces = episode.tokens.map(token => (typeof token === "string" ? [token, 0] : episode.vocabulary[token]));
  const elements = pieces.map((piece, place) => tokenOf(piece, isMasked(episode, place)));
  const starts = new Map(episode.turns?.map(turn => [turn.start, turn.role]));
  const meaning = { tabindex: 0, role: "group", "aria-label": "Answer, token by token; arrow keys move" };
  const content = elements.map((element, place) => [starts.has(place) && h("span.role", starts.get(place)), element]);
  const holder = h("div.tokens", meaning, content);
  const key = h("p.heat-key");
  const modes = Object.keys(MODES).filter(mode => MODES[mode].has(episode));
  const choose = () => draw(Address.set("colour", select.value));
  const asked = Address.get("colour");
  const select = Page.select("Color of tokens", modes, choose, modes.includes(asked) ? asked : modes[0]);
  function draw() {
    const mode = select.value;
    for (const [place, element] of elements.entries())
      if (!isMasked(episode, place)) paint(element, ...MODES[mode].of(episode, place));
    const samples = MODES[mode].key?.(episode) || SIGNS;
    const painted = samples.map(([text, ...tint]) => paint(h("span.token", text), ...tint));
    key.replaceChildren("Color: ", modes.length > 1 ? select : "probability under the policy", ...painted);
  }
  draw();
  readable(holder, elements, place => [`token ${place + 1} of ${pieces.length}`, details(episode, pieces[place][0], place)]);
  return [holder, key];
}

// Let the pointer and the arrow keys read single tokens.
function readable(holder, elements, tell) {
  let current = null;
  const show = place => {
    elements[current]?.classList.remove("current");
    current = place;
    if (place === null) return Charts.hideTooltip();
    const element = elements[place];
    element.classList.add("current");
    const box = element.getClientRects()[0] || element.getBoundingClientRect();
    return Charts.showTooltip(box.left + box.width / 2, box.top, ...tell(place));
  };
  holder.onpointerover = event => {
    const place = elements.indexOf(event.target.closest(".token"));
    show(place < 0 ? null : place);
  };
  holder.onpointerleave = holder.onblur = () => show(null);
  holder.onkeydown = event => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!by) return;
    event.preventDefault();
    show(clamp(0, current === null ? 0 : current + by, elements.length - 1));
  };
}

globalThis.Tokens = { view };
