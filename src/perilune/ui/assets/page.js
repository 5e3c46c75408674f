// Shared parts of the scripts: drawing with Preact, formats of numbers, settings in the URL, elements of all pages.
// What a model wrote becomes text nodes and numbers only: no script parses HTML.
"use strict";

const { render } = preact;
const { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } = preactHooks;
const html = htm.bind(preact.h);

// Events by the name of what changed. A component that uses a name is drawn again after redraw(name).
const updates = new EventTarget();
const redraw = name => updates.dispatchEvent(new Event(name));

// Listen to some names; returns how often the component was drawn for them.
function useUpdates(...names) {
  const [count, draw] = useReducer(drawn => drawn + 1, 0);
  useLayoutEffect(() => {
    for (const name of names) updates.addEventListener(name, draw);
    return () => names.forEach(name => updates.removeEventListener(name, draw));
  }, names);
  return count;
}

const isNothing = value => value === null || value === undefined || value === false;
const minus = text => text.replaceAll("-", "−");
const isNumber = value => typeof value === "number" && Number.isFinite(value);
const sum = values => values.reduce((total, value) => total + (value || 0), 0);
const last = values => values[values.length - 1];
const clamp = (low, value, high) => Math.max(low, Math.min(high, value));
const spaced = name => name.replaceAll("_", " ");
// A function that tells whether a text contains all the words that are sought, ignoring case.
const wordFilter = sought => {
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
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

// Keeps the reader's settings in the query of the URL, so that a copied URL and the back button show the same view.
// A changed setting redraws the components that use "?" and its name.
const Address = (() => {
  const PAUSE = 150; // milliseconds between two writes: browsers refuse more than 200 in 30 seconds
  let query = new URLSearchParams(location.search);
  let fragment = null; // a fragment that is not in the address yet, and the one that it replaces
  let [written, timer] = [-PAUSE, null];

  const get = name => query.get(name) ?? "";

  function set(name, value) {
    if (value) query.set(name, value);
    else query.delete(name);
    plan();
    redraw(`?${name}`);
  }

  function setFragment(text) {
    fragment = { text, instead: location.hash };
    plan();
  }

  function plan() {
    clearTimeout(timer);
    timer = setTimeout(write, Math.max(0, written + PAUSE - performance.now()));
  }

  function write() {
    if (timer === null) return;
    clearTimeout(timer);
    const url = new URL(location.href);
    url.search = query;
    if (fragment?.instead === location.hash) url.hash = fragment.text; // unless a link was followed
    [fragment, timer, written] = [null, null, performance.now()];
    history.replaceState(null, "", url);
  }

  addEventListener("click", write, true); // a link would drop changes
  addEventListener("popstate", () => {
    clearTimeout(timer);
    const before = query;
    [query, fragment, timer] = [new URLSearchParams(location.search), null, null];
    const names = new Set([...before.keys(), ...query.keys()]);
    for (const name of names) if (query.get(name) !== before.get(name)) redraw(`?${name}`);
  });
  return { get, set, setFragment };
})();

// An option is a text, or a pair of value and text. The first one is the usual one, which is not in the URL.
const valueOf = option => (Array.isArray(option) ? option[0] : option);

// The value of a setting: one of the options, or any text if there are none.
function setting(name, options) {
  const values = options?.map(valueOf);
  const value = Address.get(name);
  return !values || values.includes(value) ? value : values[0];
}

// The value of a setting, and a function that changes it.
function useSetting(name, options) {
  useUpdates(`?${name}`);
  return [setting(name, options), value => Address.set(name, options && value === valueOf(options[0]) ? "" : value)];
}

// --- fields
const Chip = given => html`<button class="chip" type="button" ...${given} />`;
const Plain = given => html`<button class="plain" type="button" ...${given} />`;

function Select({ label, options, choose, ...more }) {
  const option = one => html`<option key=${valueOf(one)} value=${valueOf(one)}>${Array.isArray(one) ? one[1] : one}</option>`;
  const onchange = event => choose(event.target.value);
  return html`<select aria-label=${label} onchange=${onchange} ...${more}>${options.map(option)}</select>`;
}

// A select element for a setting.
function Choice({ name, options, ...more }) {
  const [value, choose] = useSetting(name, options);
  return html`<${Select} options=${options} value=${value} choose=${choose} ...${more} />`;
}

// An input element for a setting.
function Field({ name, label, usual = "", ...more }) {
  const [value, set] = useSetting(name);
  const oninput = ({ target }) => set(target.value === usual ? "" : target.value);
  return html`<input aria-label=${label} value=${value || usual} oninput=${oninput} ...${more} />`;
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

// --- parts of pages
const small = text => html`<small>${text}</small>`;
const mono = (text, title) => html`<span class="mono" title=${title}>${text}</span>`;
const lead = text => text && html`<p class="lead">${text}</p>`;
const Section = ({ id, title, text, children }) => html`
  <section id=${id} aria-labelledby="${id}-title"><h2 id="${id}-title">${title}</h2>${lead(text)}${children}</section>`;

// Heading and lead of a part of a section.
const Part = ({ title, text }) => html`<h3 class="part">${title}</h3>${lead(text)}`;

// A table of `rows`; a column is [name, row => content, kind]: kind "text" is aligned left, "header" names its row.
function Table({ columns, rows, caption }) {
  const head = ([name, , kind]) => html`<th scope="col" class=${kind}>${name}</th>`;
  const cell = (row, [, value, kind]) =>
    kind === "header" ? html`<th scope="row">${value(row)}</th>` : html`<td class=${kind}>${value(row)}</td>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${rows.map(row => html`<tr>${columns.map(column => cell(row, column))}</tr>`)}</tbody>
    </table>
  </div>`;
}

// The messages of a prompt or a conversation.
const Messages = ({ said, isNamed = true }) => html`<div class="prose" tabindex="0">
  ${said.map(({ role, content }) => html`${isNamed && html`<span class="role">${role}</span>`}<span>${content}</span>${"\n"}`)}
</div>`;

function Copyable({ text }) {
  const block = useRef();
  const [label, say] = useState("Copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(block.current);
      document.execCommand("copy");
    }
    say("Copied");
    setTimeout(() => say("Copy"), 1500);
  };
  return html`<div class="copyable"><pre tabindex="0" ref=${block}>${text}</pre><${Chip} onclick=${copy}>${label}<//></div>`;
}

const isGiven = ([, value]) => !isNothing(value) && value !== "";
const Definitions = ({ pairs, kind = "keyvalue" }) => html`<dl class=${kind}>
  ${pairs.filter(isGiven).map(([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}
</dl>`;

// --- the page
const main = document.getElementById("main");
main.replaceChildren(); // without the notice for browsers that run no scripts
const drawPage = (...parts) => render(parts, main);

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
  const apply = scheme => {
    if (scheme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = scheme;
    Object.assign(element, { textContent: `theme: ${scheme}`, ariaLabel: `Color scheme: ${scheme}` });
  };
  let place = Math.max(0, order.indexOf(stored("getItem")));
  apply(order[place]);
  element.onclick = () => {
    place = (place + 1) % order.length;
    stored("setItem", order[place]);
    apply(order[place]);
  };
}

function Navigation() {
  const sections = [...document.querySelectorAll("main > section")];
  const [current, mark] = useState(-1);
  useEffect(() => {
    const find = () => mark(sections.findLastIndex(one => one.getBoundingClientRect().top < 130));
    addEventListener("scroll", () => requestAnimationFrame(find), { passive: true });
    find();
  }, []);
  const link = (one, place) =>
    html`<a href="#${one.id}" aria-current=${place === current || null}>${one.querySelector("h2").textContent}</a>`;
  return sections.map(link);
}

// Footer, color scheme and navigation, once the sections are in the page.
function finishPage(footer) {
  const brand = document.querySelector(".brand");
  if (location.protocol !== "file:" && Data.index) [brand.href, brand.ariaLabel] = [Data.index, "All experiments"];
  document.getElementById("footer").append(footer);
  theme();
  render(html`<${Navigation} />`, document.getElementById("nav"));
}

const Data = JSON.parse(document.getElementById("report-data").textContent);
