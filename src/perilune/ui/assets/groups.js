// The matrix of groups: one strip for each task, one cell for each sample, coloured by its reward.
"use strict";

const Groups = (() => {
  const MOST = 96; // strips before the reader asks for more
  let order = "as sampled"; // of the strips, for all steps

  const rewards = (group) => group.members.map((one) => one.reward).filter((one) => one !== null);
  const mean = (group) => {
    const known = rewards(group);
    return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : 0;
  };
  const spread = (group) => {
    const centre = mean(group);
    return rewards(group).reduce((sum, one) => sum + (one - centre) ** 2, 0) / group.members.length;
  };
  const ORDERS = {
    "as sampled": null,
    "most spread first": (a, b) => spread(b) - spread(a),
    "lowest reward first": (a, b) => mean(a) - mean(b),
    "highest reward first": (a, b) => mean(b) - mean(a),
  };

  const isDead = (group) => new Set(rewards(group)).size < 2;

  function cell(episode, low, high, pick) {
    const name = `sample ${episode.id.split("/").pop()}`;
    const said = episode.reward === null ? "no score" : `reward ${Format.number(episode.reward, 3)}`;
    const element = h("button", {
      type: "button",
      class: `cell${episode.reward === null ? " none" : ""}`,
      title: `${name}, ${said}`,
      "aria-label": `${name}, ${said}`,
      tabindex: -1,
      on: { click: () => pick(episode) },
    });
    const share = episode.reward === null ? 0 : (episode.reward - low) / (high - low || 1);
    element.style.setProperty("--depth", `${(100 * (0.06 + 0.86 * share)).toFixed(0)}%`);
    element.episode = episode;
    return element;
  }

  function strip(group, low, high, pick) {
    return h(
      "div",
      { class: `strip${isDead(group) ? " dead" : ""}`, role: "group", "aria-label": `group ${group.id}`, title: `task ${group.task}` },
      h("span", { class: "name" }, group.id.split("/").pop()),
      group.members.map((episode) => cell(episode, low, high, pick)),
      h("span", { class: "mean" }, rewards(group).length ? Format.number(mean(group), 2) : "–"),
    );
  }

  // The matrix of the groups of these episodes; nothing for episodes that have no siblings.
  function matrix(episodes, pick) {
    const groups = [...new Set(episodes.map((one) => one.group))].filter((group) => group.members.length > 1);
    if (groups.length < 2) return [];
    const scores = groups.flatMap(rewards);
    const [low, high] = [Math.min(0, ...scores), Math.max(1, ...scores)];
    const dead = groups.filter(isDead).length;
    const body = h("div", { class: "strips", tabindex: 0, role: "group", "aria-label": "Groups; arrow keys move, Enter reads" });
    const more = h("button", { type: "button", class: "plain" }, "");
    const select = h(
      "select",
      { "aria-label": "Order of groups", on: { change: () => draw(MOST, (order = select.value)) } },
      Object.keys(ORDERS).map((name) => h("option", { value: name }, name)),
    );
    select.value = order;
    function draw(most) {
      const sorted = ORDERS[order] ? [...groups].sort(ORDERS[order]) : groups;
      body.replaceChildren(...sorted.slice(0, most).map((group) => strip(group, low, high, pick)));
      body.querySelector(".cell").tabIndex = 0;
      more.hidden = sorted.length <= most;
      more.textContent = `Show all ${Format.integer(sorted.length)} groups`;
    }
    more.addEventListener("click", () => draw(Infinity));
    body.addEventListener("keydown", move);
    draw(MOST);
    return [
      h(
        "div",
        { class: "chart-head" },
        h("h4", {}, `${Format.integer(groups.length)} groups by reward`),
        h("span", { class: "muted" }, `${Format.integer(dead)} dead: equal rewards, no gradient`),
        select,
      ),
      body,
      more,
    ];
  }

  function move(event) {
    const cells = [...event.currentTarget.querySelectorAll(".cell")];
    const place = cells.indexOf(document.activeElement);
    const row = document.activeElement.parentElement.querySelectorAll(".cell").length;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = cells[place < 0 ? 0 : place + by];
    if (next) next.focus();
  }

  // Mark the cell of the episode that is read.
  function mark(holder, episode) {
    for (const cell of holder.querySelectorAll(".cell"))
      if (cell.episode === episode) cell.setAttribute("aria-current", "true");
      else cell.removeAttribute("aria-current");
  }

  return { matrix, mark };
})();
