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
const select = Page.select("Order of groups", Object.keys(ORDERS), () => redraw());
let redraw = () => {}; // draws the current matrix again
Address.keep("groups", select);

const isDead = group => new Set(rewards(group)).size < 2;

function cell(episode, low, high, pick) {
  const { reward } = episode;
  const share = (reward - low) / (high - low || 1);
  const title = `sample ${episode.id.split("/").pop()}, ${reward === null ? "no score" : `reward ${Format.number(reward, 3)}`}`;
  const depth = `${(100 * (0.06 + 0.86 * share)).toFixed(0)}%`;
  const kind = reward === null ? "button.cell.none" : "button.cell";
  const meaning = { type: "button", title, "aria-label": title, tabindex: -1, "--depth": depth, onclick: () => pick(episode) };
  return Object.assign(h(kind, meaning), { episode });
}

const strip = (group, ...given) =>
  h(
    `div.strip${isDead(group) ? ".dead" : ""}`,
    { role: "group", "aria-label": `group ${group.id}`, title: `task ${group.task}` },
    h("span.name", group.id.split("/").pop()),
    group.members.map(episode => cell(episode, ...given)),
    h("span.mean", rewards(group).length ? Format.number(mean(group), 2) : "–"),
  );

// The matrix of the groups of episodes, as elements; none for fewer than two groups of several episodes.
function matrix(episodes, pick) {
  const groups = [...new Set(episodes.map(one => one.group))].filter(group => group.members.length > 1);
  if (groups.length < 2) return [];
  const scores = groups.flatMap(rewards);
  const [low, high] = [Math.min(0, ...scores), Math.max(1, ...scores)];
  const body = h("div.strips", { tabindex: 0, role: "group", "aria-label": "Groups; arrow keys move, Enter reads" });
  const more = Page.plain(`Show all ${Format.integer(groups.length)} groups`, () => draw(Infinity));
  function draw(most) {
    const order = ORDERS[select.value];
    const sorted = order ? groups.toSorted(order) : groups;
    body.replaceChildren(...sorted.slice(0, most).map(group => strip(group, low, high, pick)));
    body.querySelector(".cell").tabIndex = 0;
    more.hidden = sorted.length <= most;
  }
  body.addEventListener("keydown", event => {
    const row = document.activeElement.parentElement.querySelectorAll(".cell").length;
    Page.moveFocus(event, ".cell", { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row });
  });
  redraw = () => draw(MOST);
  redraw();
  const dead = `${Format.integer(groups.filter(isDead).length)} dead: equal rewards, no gradient`;
  const title = h("h4", `${Format.integer(groups.length)} groups by reward`);
  return [h("div.chart-head", title, h("span.muted", dead), h("label.control.last", "Order", select)), body, more];
}

// Mark the cell of the open episode.
function mark(holder, episode) {
  for (const cell of holder.querySelectorAll(".cell")) cell.ariaCurrent = cell.episode === episode ? "true" : null;
}

globalThis.Groups = { matrix, mark, strip };
