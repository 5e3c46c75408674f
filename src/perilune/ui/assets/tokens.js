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

const paint = (color, depth) => ({ "--tint": color || "", "--depth": `${(100 * depth).toFixed(1)}%` });

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

// A process reward, and the head of a turn: who wrote it, and what it earned.
const earned = reward => html`<span class="reward ${["wrong", "", "right"][1 + Math.sign(reward)]}" title="step reward">${Format.signed(reward)}</span>`;
const turnHead = ({ role, reward }) => html`<span class="role">${role}${!isNothing(reward) && [" earned ", earned(reward)]}</span>`;

function TextOnly({ episode }) {
  const why = episode.vocabulary ? "The tokens of this group were too large to include" : "The tokenizer of this run was not found";
  const turns = episode.turns?.map(turn => html`${turnHead(turn)}<span>${turn.text}</span>${"\n"}`);
  return html`
    <div class="prose" tabindex="0">${turns || episode.text || "(empty)"}</div>
    ${episode.length > 0 && html`<p class="heat-key">${why}, so only the text is shown.</p>`}`;
}

const shownAs = text => [html`<span class="invisible">${VISIBLE[text][0]}</span>`, VISIBLE[text].slice(1)];

// The answer, with the legend of its colors. The pointer and the arrow keys read single tokens.
function Tokens({ episode }) {
  const modes = Object.keys(MODES).filter(one => MODES[one].has(episode));
  const [mode] = useSetting("colour", modes);
  const [current, setCurrent] = useState(null);
  const holder = useRef();
  const pieces = useMemo(
    () => episode.tokens.map(token => (typeof token === "string" ? [token, 0] : episode.vocabulary[token])),
    [episode],
  );
  const tokens = useMemo(() => {
    const starts = new Map(episode.turns?.map(turn => [turn.start, turnHead(turn)]));
    const ends = new Map(episode.turns ? [] : episode.steps); // in a single answer, a segment shows its reward at its end
    return pieces.flatMap(([text, special], place) => {
      const masked = isMasked(episode, place);
      const kind = `token${special ? " special" : ""}${masked ? " masked" : ""}`;
      const tint = masked ? null : paint(...MODES[mode].of(episode, place));
      const content = VISIBLE[text] !== undefined && !special ? shownAs(text) : text;
      const token = html`<span class=${kind} style=${tint}>${content}</span>`;
      return [starts.get(place), token, ends.has(place) && earned(ends.get(place))];
    });
  }, [episode, mode]);
  useLayoutEffect(() => {
    const element = holder.current.querySelectorAll(".token")[current];
    if (!element) return Charts.hideTooltip();
    element.classList.add("current");
    const box = element.getClientRects()[0] || element.getBoundingClientRect();
    const title = `token ${current + 1} of ${pieces.length}`;
    Charts.showTooltip(box.left + box.width / 2, box.top, title, details(episode, pieces[current][0], current));
    return () => element.classList.remove("current");
  }, [current]);
  const point = event => {
    const place = [...holder.current.querySelectorAll(".token")].indexOf(event.target.closest(".token"));
    setCurrent(place < 0 ? null : place);
  };
  const leave = () => setCurrent(null);
  const press = event => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!by) return;
    event.preventDefault();
    setCurrent(clamp(0, current === null ? 0 : current + by, pieces.length - 1));
  };
  const sample = ([text, ...tint]) => html`<span class="token" style=${paint(...tint)}>${text}</span>`;
  return html`
    <div class="tokens" tabindex="0" role="group" aria-label="Answer, token by token; arrow keys move" ref=${holder}
      onpointerover=${point} onpointerleave=${leave} onblur=${leave} onkeydown=${press}>${tokens}</div>
    <p class="heat-key">
      ${"Color: "}
      ${modes.length > 1 ? html`<${Choice} name="colour" label="Color of tokens" options=${modes} />` : "probability under the policy"}
      ${(MODES[mode].key?.(episode) || SIGNS).map(sample)}
    </p>`;
}

globalThis.Answer = ({ episode }) => html`<${episode.tokens ? Tokens : TextOnly} episode=${episode} />`;
