// Shared functions of the scripts: creating elements, formatting numbers, building sections.
// Data becomes text nodes and numbers only: no function here parses HTML.
"use strict";

// Create an element: h("p.lead", { title: "…" }, "text", child, …). Properties that begin with -- go to its style.
// Strings become text nodes; null, undefined and false are skipped.
const h = (name, ...rest) => fill(tag => document.createElement(tag), name, rest);
const s = (name, ...rest) => fill(tag => document.createElementNS("http://www.w3.org/2000/svg", tag), name, rest);
const isNothing = value => value === null || value === undefined || value === false;

function fill(create, name, rest) {
  const [tag, ...classes] = name.split(".");
  const element = create(tag);
  const properties = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if (isNothing(value)) continue;
    if (key.startsWith("--")) element.style.setProperty(key, value);
    else if (key in element && element instanceof HTMLElement && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  for (const one of classes) element.classList.add(one);
  element.append(...rest.flat(Infinity).filter(child => !isNothing(child)));
  return element;
}

const minus = text => text.replaceAll("-", "−");
const isNumber = value => typeof value === "number" && Number.isFinite(value);
const sum = values => values.reduce((total, value) => total + (value || 0), 0);
const last = values => values[values.length - 1];
const clamp = (low, value, high) => Math.max(low, Math.min(high, value));
const spaced = name => name.replaceAll("_", " ");
// A function that tells whether a text contains all words of a search field, ignoring case.
const wordFilter = input => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  return text => words.every(word => text.toLowerCase().includes(word));
};

// Return a format that prints "–" for an unknown value.
const known = format => (value, ...more) => (isNothing(value) || Number.isNaN(value) ? "–" : format(value, ...more));

const Format = {
  number: known((value, digits = 4) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) {
      const [mantissa, power] = value.toExponential(Math.max(0, digits - 2)).split("e");
      return minus(`${Number(mantissa)}e${Number(power)}`);
    }
    return size >= 1000 ? Format.integer(value) : minus(String(Number(value.toPrecision(digits))));
  }),
  integer: known(value => minus(Math.round(value).toLocaleString("en-US"))),
  // With its sign, except for 0.
  signed: value => (value === 0 ? "0" : `${value > 0 ? "+" : "−"}${Format.number(Math.abs(value), 3)}`),
  capital: text => text.charAt(0).toUpperCase() + text.slice(1),
  percent: known(value => minus(`${(100 * value).toFixed(1)}%`)),
  percentTick: value => minus(`${Number((100 * value).toFixed(4))}%`),
  points: known(value => {
    const size = Math.abs(100 * value).toFixed(1);
    return size === "0.0" ? size : `${value < 0 ? "−" : "+"}${size}`;
  }),
  seconds: known(value => {
    if (value < 1) return `${Format.number(1000 * value, 3)} ms`;
    if (value < 60) return `${Format.number(value, 3)} s`;
    const whole = Math.round(value);
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
    if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
    return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  }),
  bytes(value) {
    if (value === 0) return "0";
    if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
    return value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${Math.round(value / 1e3)} kB`;
  },
};
const PERCENT = { format: Format.percent, tick: Format.percentTick };
const SHARE = { domain: [0, 1], ...PERCENT };
// Formats of axes, by the names that the server gives them.
const AXES = {
  number: { format: Format.number },
  short: { format: value => Format.number(value, 3) },
  integer: { format: Format.integer, integer: true },
  percent: PERCENT,
  share: SHARE,
  rate: { format: Format.percent, tick: value => `${Math.round(100 * value)}%` },
  log: { log: true },
  points: { format: Format.points, tick: value => minus(String(Number((100 * value).toFixed(2)))) },
  load: { format: value => `${Format.number(value, 3)}%` },
  bytes: { format: Format.bytes },
};
const CLOCK = { time: true, format: Format.seconds, tick: value => (value ? Format.seconds(value) : "0") };
AXES.clock = CLOCK;

const Page = (() => {
  const lead = text => text && h("p.lead", text);
  const section = (id, title, text, ...nodes) =>
    h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), lead(text), nodes);

  // Heading and lead of a part of a section.
  const part = (title, text) => [h("h3.part", title), lead(text)];

  // A table of `rows`; a column is [name, row => content, kind]: kind "text" is aligned left, "header" names its row.
  function table(columns, rows, caption) {
    const heads = columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name));
    const cell = (row, [, value, kind]) =>
      kind === "header" ? h("th", { scope: "row" }, value(row)) : h("td", { class: kind }, value(row));
    const body = rows.map(row => h("tr", columns.map(column => cell(row, column))));
    const frame = { tabindex: 0, role: "region", "aria-label": caption };
    return h("div.scroll", frame, h("table", h("thead", h("tr", heads)), h("tbody", body)));
  }

  const button = (kind, text, onclick, more) => h(`button.${kind}`, { type: "button", onclick, ...more }, text);
  const chip = (...given) => button("chip", ...given);
  const plain = (...given) => button("plain", ...given);

  // A select element. An option is a text, or a pair of value and text.
  function select(label, options, onchange, value) {
    const pairs = options.map(one => (Array.isArray(one) ? one : [one, one]));
    const element = h("select", { "aria-label": label, onchange }, pairs.map(([key, text]) => h("option", { value: key }, text)));
    if (value !== undefined) element.value = value;
    return element;
  }

  // Move the focus among the elements that match a selector. `steps` has, by key, how many elements to move.
  function moveFocus(event, selector, steps) {
    const all = [...event.currentTarget.querySelectorAll(selector)];
    const next = steps[event.key] && all[Math.max(-1, all.indexOf(document.activeElement)) + steps[event.key]];
    if (!next) return null;
    event.preventDefault();
    next.focus();
    return next;
  }

  // The messages of a prompt or a conversation.
  const messages = (said, isNamed = true) =>
    h("div.prose", { tabindex: 0 }, said.map(({ role, content }) => [isNamed && h("span.role", role), h("span", content), "\n"]));

  function copyable(text) {
    const block = h("pre", { tabindex: 0 }, text);
    const copy = chip("Copy", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        getSelection().selectAllChildren(block);
        document.execCommand("copy");
      }
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    return h("div.copyable", block, copy);
  }

  const isGiven = ([, value]) => !isNothing(value) && value !== "";
  const definitions = (pairs, kind = "keyvalue") =>
    h(`dl.${kind}`, pairs.filter(isGiven).map(([key, value]) => h("div", h("dt", key), h("dd", value))));

  // --- page chrome
  function theme() {
    const element = document.getElementById("theme");
    const order = ["auto", "light", "dark"];
    // A file opened in a strict browser has no storage; the choice then lasts as long as the page.
    const stored = (verb, ...given) => {
      try {
        return localStorage[verb]("perilune-theme", ...given);
      } catch {
        return null;
      }
    };
    let place = Math.max(0, order.indexOf(stored("getItem")));
    const apply = () => {
      if (place) document.documentElement.dataset.theme = order[place];
      else delete document.documentElement.dataset.theme;
      element.textContent = `theme: ${order[place]}`;
      element.ariaLabel = `Color scheme: ${order[place]}`;
    };
    element.onclick = () => {
      place = (place + 1) % order.length;
      stored("setItem", order[place]);
      apply();
    };
    apply();
  }

  function navigation() {
    const sections = [...document.querySelectorAll("main > section")];
    const links = sections.map(one => h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent));
    document.getElementById("nav").append(...links);
    const mark = () => {
      const current = sections.findLastIndex(one => one.getBoundingClientRect().top < 130);
      for (const [place, link] of links.entries()) link.ariaCurrent = place === current ? "true" : null;
    };
    addEventListener("scroll", () => requestAnimationFrame(mark), { passive: true });
    mark();
  }

  // Footer, color scheme and navigation, once the sections are in the page.
  function finish(footer) {
    const brand = document.querySelector(".brand");
    if (location.protocol !== "file:" && Data.index) [brand.href, brand.ariaLabel] = [Data.index, "All experiments"];
    document.getElementById("footer").append(footer);
    theme();
    navigation();
  }

  return { section, part, table, chip, plain, select, moveFocus, messages, copyable, definitions, finish };
})();

// Keeps the reader's settings in the query of the URL, so that a copied URL and the back button show the same view.
// The name "#" stands for the fragment.
const Address = (() => {
  const PAUSE = 150; // milliseconds between two writes: browsers refuse more than 200 in 30 seconds
  const restorers = [];
  const changes = new Map(); // changes that are not in the address yet
  let [written, timer, place] = [-PAUSE, 0, ""];

  const get = name => changes.get(name) ?? new URLSearchParams(location.search).get(name) ?? "";

  function set(name, value) {
    changes.set(name, value);
    place = location.hash;
    clearTimeout(timer);
    const wait = written + PAUSE - performance.now();
    if (wait <= 0) write();
    else timer = setTimeout(write, wait);
  }

  function write() {
    if (!changes.size) return;
    const url = new URL(location.href);
    for (const [name, value] of changes)
      if (name === "#") url.hash = location.hash === place ? value : location.hash; // unless a link was followed
      else if (value) url.searchParams.set(name, value);
      else url.searchParams.delete(name);
    changes.clear();
    written = performance.now();
    history.replaceState(null, "", url);
  }

  // Keep the value of a field in the URL under a name, unless the field has its initial value.
  function keep(name, field) {
    const key = field.type === "checkbox" ? "checked" : "value";
    const usual = field[key];
    field.addEventListener("input", () => set(name, field[key] === usual ? "" : String(field[key])));
    restore(() => {
      const [shown, wanted] = [field[key], get(name)];
      field[key] = wanted || usual;
      if (wanted && field[key] !== wanted && key === "value") field[key] = usual; // the field has no such option
      if (field[key] !== shown) (field.oninput || field.onchange)();
    });
    return field;
  }

  // Call a function now, and each time that the reader goes back or follows a link.
  function restore(show) {
    restorers.push(show);
    show();
  }

  addEventListener("click", write, true); // a link would drop changes
  addEventListener("popstate", () => {
    changes.clear();
    for (const show of restorers) show();
  });
  return { get, set, keep, restore };
})();

const Data = JSON.parse(document.getElementById("report-data").textContent);
