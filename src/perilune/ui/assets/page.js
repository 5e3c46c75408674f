// Shared functions of the scripts: creating elements, formatting numbers, building sections.
// Data reaches the page as text nodes and numbers only: nothing here parses HTML.
"use strict";

// Create an element; strings among `children` become text nodes, null and false are skipped.
function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "on")
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (key in element && key !== "list" && key !== "form") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const minus = (text) => text.replaceAll("-", "−");

const Format = {
  number(value, digits = 4) {
    if (missing(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) {
      const [mantissa, power] = value.toExponential(Math.max(0, digits - 2)).split("e");
      return minus(`${mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa}e${Number(power)}`);
    }
    if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
    return minus(String(Number(value.toPrecision(digits))));
  },
  // With its sign, which 0 has not.
  signed: (value) => (value === 0 ? "0" : `${value > 0 ? "+" : "−"}${Format.number(Math.abs(value), 3)}`),
  capital: (text) => text.charAt(0).toUpperCase() + text.slice(1),
  percent: (value) => (missing(value) ? "–" : minus(`${(100 * value).toFixed(1)}%`)),
  percentTick: (value) => minus(`${Number((100 * value).toFixed(4))}%`),
  points(value) {
    if (missing(value)) return "–";
    const size = Math.abs(100 * value).toFixed(1);
    return size === "0.0" ? size : `${value < 0 ? "−" : "+"}${size}`;
  },
  seconds(value) {
    if (missing(value)) return "–";
    if (value < 1) return `${Format.number(1000 * value, 3)} ms`;
    if (value < 60) return `${Format.number(value, 3)} s`;
    const whole = Math.round(value);
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
    if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
    return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  },
  bytes(value) {
    if (value === 0) return "0";
    if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
    return value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${Math.round(value / 1e3)} kB`;
  },
  integer: (value) => (missing(value) ? "–" : minus(Math.round(value).toLocaleString("en-US"))),
};

const Page = (() => {
  function section(id, title, lead, ...nodes) {
    return h(
      "section",
      { id, "aria-labelledby": `${id}-title` },
      h("h2", { id: `${id}-title` }, title),
      lead ? h("p", { class: "lead" }, lead) : null,
      ...nodes,
    );
  }

  // Heading and lead of a part of a section.
  const part = (title, lead) => [h("h3", { class: "part" }, title), lead ? h("p", { class: "lead" }, lead) : null];

  function table(columns, rows, caption) {
    const cell = (column, row) =>
      h(
        column.header ? "th" : "td",
        { class: column.text ? "text" : "", scope: column.header ? "row" : null },
        column.value(row),
      );
    return h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            columns.map((column) => h("th", { scope: "col", class: column.text ? "text" : "" }, column.name)),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              {},
              columns.map((column) => cell(column, row)),
            ),
          ),
        ),
      ),
    );
  }

  function copyable(text) {
    const block = h("pre", { tabindex: 0 }, text);
    const button = h("button", { type: "button", class: "chip" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        getSelection().selectAllChildren(block);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    return h("div", { class: "copyable" }, block, button);
  }

  const definitions = (pairs, name = "keyvalue") =>
    h(
      "dl",
      { class: name },
      pairs
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]),
    );

  // --------------------------------------------------------------------------------- page chrome
  function theme() {
    const button = document.getElementById("theme");
    const order = ["auto", "light", "dark"];
    // A file opened in a strict browser has no storage; the choice then lasts as long as the page.
    const stored = (verb, ...given) => {
      try {
        return localStorage[verb]("perilune-theme", ...given);
      } catch {
        return null;
      }
    };
    let current = stored("getItem");
    if (!order.includes(current)) [current] = order;
    const apply = () => {
      if (current === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = current;
      button.textContent = `theme: ${current}`;
      button.ariaLabel = `Colour scheme: ${current}`;
    };
    button.addEventListener("click", () => {
      current = order[(order.indexOf(current) + 1) % order.length];
      stored("setItem", current);
      apply();
    });
    apply();
  }

  function navigation() {
    const nav = document.getElementById("nav");
    const links = new Map();
    for (const element of document.querySelectorAll("main > section")) {
      const link = h("a", { href: `#${element.id}` }, element.querySelector("h2").textContent);
      links.set(element, link);
      nav.append(link);
    }
    const mark = () => {
      let current = null;
      for (const element of links.keys()) if (element.getBoundingClientRect().top < 130) current = element;
      for (const [element, link] of links) {
        if (element === current) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    };
    addEventListener("scroll", () => requestAnimationFrame(mark), { passive: true });
    mark();
  }

  // Footer, colour scheme and navigation, once the sections are in the page.
  function finish(footer) {
    const brand = document.querySelector(".brand");
    if (location.protocol !== "file:" && Data.index) [brand.href, brand.ariaLabel] = [Data.index, "All experiments"];
    document.getElementById("footer").append(footer);
    theme();
    navigation();
  }

  return { section, part, table, copyable, definitions, finish };
})();

const Data = JSON.parse(document.getElementById("report-data").textContent);
