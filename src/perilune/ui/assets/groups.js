// The matrix of groups: one strip for each group, one cell for each sample, colored by its reward.
const MOST = 96; // strips to show before the reader asks for more

const rewards = group => group.members.map(one => one.reward).filter(one => one !== null);
const mean = group => sum(rewards(group)) / (rewards(group).length || 1);
const spread = group => sum(rewards(group).map(one => (one - mean(group)) ** 2)) / group.members.length;
const ORDERS = {
  "as sampled": null,
  "most spread first": (a, b) => spread(b) - spread(a),
  "lowest reward first": (a, b) => mean(a) - mean(b),
  "highest reward first": (a, b) => mean(b) - mean(a),
};
const isDead = group => new Set(rewards(group)).size < 2;

// One group as a strip. The rewards of all strips lie between `low` and `high`.
function strip(group, low, high, pick, { current, isFirst } = {}) {
  const cell = (episode, place) => {
    const { reward } = episode;
    const share = (reward - low) / (high - low || 1);
    const title = `sample ${episode.id.split("/").pop()}, ${reward === null ? "no score" : `reward ${Format.number(reward, 3)}`}`;
    return html`
      <button class=${reward === null ? "cell none" : "cell"} type="button" title=${title} aria-label=${title}
        tabindex=${isFirst && place === 0 ? 0 : -1} aria-current=${episode === current || null}
        style=${{ "--depth": `${(100 * (0.06 + 0.86 * share)).toFixed(0)}%` }} onclick=${() => pick(episode)} />`;
  };
  return html`<div class=${isDead(group) ? "strip dead" : "strip"} role="group" aria-label="group ${group.id}" title="task ${group.task}">
    <span class="name">${group.id.split("/").pop()}</span>
    ${group.members.map(cell)}
    <span class="mean">${rewards(group).length ? Format.number(mean(group), 2) : "–"}</span>
  </div>`;
}

// The matrix of the groups of episodes; nothing for fewer than two groups of several episodes.
function Matrix({ episodes, current, pick }) {
  const [order] = useSetting("groups", Object.keys(ORDERS));
  const [most, setMost] = useState(MOST);
  const groups = useMemo(() => [...new Set(episodes.map(one => one.group))].filter(one => one.members.length > 1), [episodes]);
  const strips = useMemo(() => {
    const scores = groups.flatMap(rewards);
    const [low, high] = [Math.min(0, ...scores), Math.max(1, ...scores)];
    const sorted = ORDERS[order] ? groups.toSorted(ORDERS[order]) : groups;
    return sorted.slice(0, most).map((group, place) => strip(group, low, high, pick, { current, isFirst: place === 0 }));
  }, [groups, order, most, current]);
  if (groups.length < 2) return null;
  const move = event => {
    const row = document.activeElement.parentElement.querySelectorAll(".cell").length;
    moveFocus(event, ".cell", { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row });
  };
  return html`
    <div class="chart-head">
      <h4>${Format.integer(groups.length)} groups by reward</h4>
      <span class="muted">${Format.integer(groups.filter(isDead).length)} dead: all answers have the same reward</span>
      <label class="control last">Order<${Choice} name="groups" label="Order of groups" options=${Object.keys(ORDERS)} /></label>
    </div>
    <div class="strips" tabindex="0" role="group" aria-label="Groups; arrow keys move, Enter reads" onkeydown=${move}>${strips}</div>
    <${More} all=${groups} most=${most} setMost=${setMost} what="groups" />`;
}

// A button that shows all strips, if there are more than `most`.
const More = ({ all, most, setMost, what }) => html`
  <${Plain} hidden=${all.length <= most} onclick=${() => setMost(Infinity)}>Show all ${Format.integer(all.length)} ${what}<//>`;

globalThis.Groups = { More, Matrix, strip };
