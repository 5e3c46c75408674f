// Small SVG charts without dependencies: lines (with intervals, linked crosshairs, log scales), bars
// (stacked, grouped or mirrored) and rows (dumbbells, forests, waterfalls, time lines).
const groups = new Map(); // name of a linked x axis -> the charts that share a crosshair
const smoothed = new Set(); // charts that follow the smoothing slider
let smoothing = 0;

const ruler = document.createElement("canvas").getContext("2d");
const family = getComputedStyle(document.body).fontFamily;
function textWidth(text, size, weight = 400) {
  ruler.font = `${weight} ${size}px ${family}`;
  return ruler.measureText(text).width;
}
const widest = (texts, ...font) => Math.max(0, ...texts.map(text => textWidth(text, ...font)));

const round = value => Math.round(value * 100) / 100;
const color = index => `var(--c${index})`;
const line = (name, x1, y1, x2, y2) => s(`line.${name}`, { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2) });
const dot = (x, y, r, fill, stroke) => s("circle.dot", { cx: round(x), cy: round(y), r, fill, stroke });
const label = (name, x, y, text, anchor, fill) => s(`text.${name}`, { x: round(x), y: round(y), "text-anchor": anchor, fill }, text);
function box(name, x, y, width, height, fill) {
  const size = { width: round(Math.max(0.5, width)), height: round(Math.max(0.5, height)) };
  return s(`rect.${name}`, { x: round(x), y: round(y), ...size, fill });
}
const hide = (element, isHidden) => element.setAttribute("visibility", isHidden ? "hidden" : "visible");

// --- scales
function niceTicks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find(multiple => multiple * power >= rough * 0.999) || 10);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1)
    ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function timeTicks(low, high, count) {
  const step = TIME_STEPS.find(one => (high - low) / one <= count);
  if (!step || high - low <= 4) return niceTicks(low, high, count);
  const whole = niceTicks(low / step, high / step, count).filter(Number.isInteger);
  return whole.map(tick => tick * step);
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const end = Math.ceil(Math.log10(high) - 1e-9);
  const stride = Math.max(1, Math.ceil((end - first) / Math.max(2, count)));
  const ticks = [];
  for (let power = first; power <= end; power += stride) ticks.push(10 ** power);
  const inside = ticks.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : niceTicks(low, high, count);
}

// About `count` ticks of an axis. axis.ticks is the list of ticks, or their number.
function ticksOf(axis, low, high, count, log) {
  if (Array.isArray(axis.ticks)) return axis.ticks;
  const ticks = (log ? logTicks : axis.time ? timeTicks : niceTicks)(low, high, axis.ticks || Math.max(2, Math.round(count)));
  return axis.integer ? ticks.filter(Number.isInteger) : ticks;
}

function scale(low, high, from, to, log = false) {
  const map = log ? Math.log10 : value => value;
  const start = map(low);
  const ratio = (to - from) / (map(high) - start || Infinity);
  const position = value => (ratio === 0 ? (from + to) / 2 : from + (map(value) - start) * ratio);
  position.invert = pixel => {
    const value = ratio === 0 ? start : start + (pixel - from) / ratio;
    return log ? 10 ** value : value;
  };
  return position;
}

// Domain of the y axis: padded, anchored at zero when `zero`, never empty.
function domainOf(values, axis, log) {
  if (axis.domain && !log) return axis.domain;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value) || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 3, high * 3] : [low / 1.3, high * 1.3];
  if (axis.zero !== false) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const pad = (high - low) * 0.06;
  return [low && low - pad, high && high + pad];
}

// --- tooltip
const tooltip = h("div.tooltip", { role: "status", hidden: true });
document.body.append(tooltip);

function showTooltip(x, y, title, rows) {
  const shown = rows.map(row => h("div.tooltip-row", swatch(row), h("span", row.name), h("b", row.value)));
  tooltip.replaceChildren(h("div.tooltip-title", title), ...shown);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const fits = x + 14 + width < document.documentElement.clientWidth;
  tooltip.style.left = `${Math.max(4, fits ? x + 14 : x - width - 14)}px`;
  tooltip.style.top = `${clamp(4, y - height - 10, window.innerHeight - height - 4)}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}
addEventListener("scroll", hideTooltip, { passive: true, capture: true });

const swatch = ({ color: index, hollow, dash }) =>
  index !== undefined && h(`i.swatch${hollow ? ".hollow" : dash ? ".dashed" : ""}`, { "--swatch": color(index) });

// --- chart figure
// Parts of every chart: title, tools, legend with current values, drawing, caption.
// `draw(width)` returns an svg element; it is called again whenever the width changes.
function framed(spec, draw) {
  const legend = spec.legend || [];
  const values = new Map(legend.map(one => [one.name, h("b")]));
  const tools = h("div.chart-tools");
  const stage = h("div.chart-stage");
  const element = h(
    "figure.chart",
    h("div.chart-head", spec.title && h("h4", spec.title), tools),
    legend.length > 0 && h("div.legend", legend.map(one => h("span.legend-item", swatch(one), one.name, values.get(one.name)))),
    stage,
    spec.note && h("figcaption", spec.note),
  );
  if (spec.key) element.dataset.chart = spec.key;
  const chart = { element, tools, legend: values, width: 0 };
  chart.redraw = () => chart.width >= 40 && stage.replaceChildren(draw(chart.width));
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width === chart.width) return;
    chart.width = width;
    chart.redraw();
  }).observe(stage);
  return chart;
}

const canvas = (width, height, name, more) =>
  s("svg.plot", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": name, ...more });

function emptyDrawing(width, height) {
  const root = canvas(width, height, "no data yet");
  root.append(label("empty", width / 2, height / 2, "no data yet", "middle"));
  return root;
}

// Axes with horizontal gridlines; returns the scales of the plotting area.
function frame(root, width, height, xAxis, xDomain, xTicks, yAxis, yDomain, log) {
  const ticks = ticksOf(yAxis, ...yDomain, height / 48, log);
  const labels = ticks.map(tick => (yAxis.tick || yAxis.format)(tick));
  const area = { left: Math.max(22, 10 + widest(labels, 11)), right: width - 8, top: 10, bottom: height - (xAxis.label ? 34 : 22) };
  const y = scale(...yDomain, area.bottom, area.top, log);
  const x = scale(...xDomain, area.left, area.right);
  ticks.forEach((tick, index) => {
    const at = y(tick);
    root.append(
      line(tick === 0 ? "gridline.zero" : "gridline", area.left, at, area.right, at),
      label("tick", area.left - 7, at + 3.5, labels[index], "end"),
    );
  });
  let end = -Infinity;
  for (const tick of xTicks) {
    const text = (xAxis.tick || xAxis.format)(tick);
    const [at, half] = [x(tick), textWidth(text, 11) / 2];
    if (at - half < end + 6) continue;
    const anchor = at + half > width ? "end" : at - half < 0 ? "start" : "middle";
    end = at + half;
    root.append(label("tick", anchor === "end" ? width : at, area.bottom + 15, text, anchor));
  }
  if (xAxis.label) root.append(label("axis-label", (area.left + area.right) / 2, height - 4, xAxis.label, "middle"));
  return { x, y, area };
}

// Let the pointer and the keyboard select the numbered places of a drawing. `place.index` is the selected place.
// at(x, y): the place at a pixel; anchor(index): its x; tip(index): title and rows of the tooltip; start: the place
// where arrow keys begin; keys(event): handles another key and returns whether it did.
function interact(root, width, { place, count, start = 0, at, show, anchor, tip, keys }) {
  const read = (index, ...pointer) => {
    place.index = index;
    show(index);
    if (index === null) hideTooltip();
    else showTooltip(...pointer, ...tip(index));
  };
  const under = event => {
    const { left, top, width: shown } = root.getBoundingClientRect();
    return at(((event.clientX - left) * width) / shown, ((event.clientY - top) * width) / shown);
  };
  root.addEventListener("pointermove", event => read(under(event), event.clientX, event.clientY));
  for (const leaving of ["pointerleave", "blur"]) root.addEventListener(leaving, () => read(null));
  root.addEventListener("keydown", event => {
    if (event.key === "Escape") return read(null);
    if (keys && keys(event)) return undefined;
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    const by = moves[event.key];
    if (!by) return undefined;
    event.preventDefault();
    const from = place.index === null && Math.abs(by) === 1 ? start : (place.index ?? start) + by;
    const index = clamp(0, from, count - 1);
    const { left, top, width: shown } = root.getBoundingClientRect();
    return read(index, left + (anchor(index) * shown) / width, top + 30);
  });
  return under;
}

const titleAt = ({ name }, text) => (name ? `${name} ${text}` : text);

// --- line chart
// Exponential moving average, corrected for the bias towards its start.
function ema(values, weight) {
  let [total, norm] = [0, 0];
  return values.map(value => {
    if (!isNumber(value)) return null;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

// Path through the points. Of thousands of points, it keeps the extremes of every pixel column.
function pathOf(xs, ys, x, y, width, log) {
  let path = "";
  let isOpen = false;
  let column = null;
  const draw = (px, py) => {
    path += `${isOpen ? "L" : "M"}${round(px)},${round(py)}`;
    isOpen = true;
  };
  const flush = () => {
    if (!column) return;
    draw(column.px, column.low);
    if (column.high !== column.low) draw(column.px, column.high);
    column = null;
  };
  const isDense = xs.length > 3 * width;
  for (const [index, value] of ys.entries()) {
    if (!isNumber(value) || (log && value <= 0)) {
      flush();
      isOpen = false;
      continue;
    }
    const [px, py] = [x(xs[index]), y(value)];
    if (!isDense) draw(px, py);
    else if (column && Math.floor(px) === Math.floor(column.px)) {
      column.low = Math.min(column.low, py);
      column.high = Math.max(column.high, py);
    } else {
      flush();
      column = { px, low: py, high: py };
    }
  }
  flush();
  return path;
}

// Straight lines between the places of each edge whose ends are known.
function joined(one, edges, x, y) {
  const at = place => `${round(x(place))},${round(y(one.y[place]))}`;
  const whole = edges.filter(edge => edge.every(place => isNumber(one.y[place])));
  return whole.map(([from, to]) => `M${at(from)}L${at(to)}`).join("");
}

// Filled area between `low` and `high`, over the points that have both.
function areaOf(one, x, y) {
  const places = one.x.map((_, index) => index).filter(index => isNumber(one.low[index]) && isNumber(one.high[index]));
  const edge = values => places.map(index => `${round(x(one.x[index]))},${round(y(values[index]))}`);
  return places.length ? `M${[...edge(one.high), ...edge(one.low).reverse()].join("L")}Z` : "";
}

function nearestIndex(xs, target) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < target) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - target) <= Math.abs(xs[high] - target) ? low : high;
}

// Whether a chart is not drawn yet, or still in the page.
const isOnPage = chart => !chart.width || chart.element.isConnected;

// The points of a series from range[0] to range[1].
function within(one, [from, to]) {
  const places = one.x.map((_, place) => place).filter(place => one.x[place] >= from && one.x[place] <= to);
  const cut = values => values && places.map(place => values[place]);
  return { ...one, x: cut(one.x), y: cut(one.y), low: cut(one.low), high: cut(one.high) };
}

const refresh = group => (groups.get(group) || []).forEach(chart => chart.refresh());
Address.restore(() => [...groups.keys()].forEach(refresh));

// The range of the x axis that the charts of a group show, in the unit of the axis; undefined for the whole axis.
function zoomOf({ group, x }) {
  const [unit, ...ends] = Address.get(`zoom.${group}`).split("~");
  const range = ends.map(Number);
  return unit === x.label && range.length === 2 && range.every(isNumber) ? range : undefined;
}

// Show a range in all charts of a group, or the whole axis.
function zoom({ group, x }, range) {
  Address.set(`zoom.${group}`, range ? [x.label, ...range.map(value => Number(value.toPrecision(6)))].join("~") : "");
  hideTooltip();
  refresh(group);
}

// Let the mouse select a range by dragging; the click at its end selects no point.
function brush(root, spec, area, valueAt) {
  let start = null;
  let selection = null;
  const pixel = event => {
    const { left, width } = root.getBoundingClientRect();
    return clamp(area.left, ((event.clientX - left) * root.viewBox.baseVal.width) / width, area.right);
  };
  root.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse" && event.button === 0) start = pixel(event);
  });
  root.addEventListener("pointermove", event => {
    if (start === null) return;
    const at = pixel(event);
    if (!selection && Math.abs(at - start) < 8) return;
    selection?.remove();
    selection = root.appendChild(box("selection", Math.min(start, at), area.top, Math.abs(at - start), area.bottom - area.top));
  });
  root.addEventListener("pointerleave", () => {
    selection?.remove();
    start = selection = null;
  });
  const choose = event => {
    const chosen = selection && [start, pixel(event)].sort((a, b) => a - b).map(valueAt);
    start = selection = null;
    if (!chosen) return;
    event.stopImmediatePropagation();
    zoom(spec, chosen);
  };
  root.addEventListener("click", choose, true);
  root.addEventListener("dblclick", () => zoom(spec));
}

// Values beside the points of each x, moved apart so that none overlap.
function placeLabels(root, labels, area) {
  for (const column of Map.groupBy(labels, one => one.at).values()) {
    column.sort((a, b) => a.y - b.y);
    column.forEach((one, index) => {
      one.top = Math.max(area.top + 4, one.y, index ? column[index - 1].top + 13 : 0);
    });
    const excess = Math.max(0, last(column).top - (area.bottom - 5));
    const right = Math.max(...column.map(one => one.x)) + 10;
    for (const one of column)
      root.append(label(`value-label${one.strong ? ".strong" : ""}`, right, one.top - excess + 4, one.text, undefined, one.stroke));
  }
}

/* lines(spec): series {name, x, y, low?, high?, color, dash?, points?, area?}, or a function that returns them.
   low and high are whiskers, or with `area` the edges of a filled area.
   edges: with categories, the pairs of places that a line joins; by default each and the next.
   x: {label, categories?, format?}; y: {format, tick, zero, domain, log: offer a log scale?}.
   group: charts of one group share the crosshair; smooth: follow the slider; pick(x): on click. */
function lines(spec) {
  const y = { format: Format.number, ...spec.y };
  const height = spec.height || 168;
  const read = typeof spec.series === "function" ? spec.series : () => spec.series;
  const { categories } = spec.x;
  const place = { index: null };
  let [series, xs, log, state] = [[], [], false, null];
  const measure = () => {
    const range = spec.group && zoomOf(spec);
    series = read().map(one => (range ? within(one, range) : one));
    series = series.filter(one => one.y.some(isNumber));
    xs = [...new Set(series.flatMap(one => one.x))].sort((a, b) => a - b);
    return range;
  };
  measure();
  const formatX = value => (categories ? categories[value] : (spec.x.format || Format.integer)(value));
  const chart = framed({ ...spec, legend: series.length > 1 || spec.showLegend ? series : [] }, draw);

  function draw(width) {
    if (!xs.length) return emptyDrawing(width, Math.min(height, 90));
    const root = canvas(width, height, describe(), { tabindex: 0 });
    const pad = categories ? 0.35 : 0;
    const ends = [xs[0] - pad, last(xs) + (spec.valueLabels ? 1.7 : 1) * pad];
    const ticks = categories ? xs : ticksOf({ ...spec.x }, xs[0], last(xs), width / 64);
    const values = series.flatMap(one => [...one.y, ...(one.low || []), ...(one.high || [])]);
    const axes = frame(root, width, height, { format: formatX, ...spec.x }, ends, ticks, y, domainOf(values, y, log), log);
    const { x, area } = axes;
    for (const [index, band] of (spec.bands || []).entries()) {
      const [from, to] = [x(band.begin), x(band.end)];
      if (index % 2 === 0) root.prepend(box("band", from, area.top, to - from, area.bottom - area.top));
      if (textWidth(band.name, 10.5) + 8 < to - from)
        root.append(label("band-label", (from + to) / 2, area.top + 9, band.name, "middle"));
    }
    const labels = series.flatMap((one, position) => drawSeries(root, one, position, axes, width));
    if (spec.valueLabels) placeLabels(root, labels, area);
    const crosshair = line("crosshair", 0, area.top, 0, area.bottom);
    const dots = s("g");
    root.append(crosshair, dots);
    if (log) noteHidden(root, area);
    state = { ...axes, crosshair, dots };
    if (spec.group) brush(root, spec, area, x.invert);
    listen(root, width);
    show(place.index);
    return root;
  }

  // One series; returns the labels of its values.
  function drawSeries(root, one, position, { x, y: toY }, width) {
    const stroke = color(one.color);
    const isSmooth = spec.smooth && smoothing > 0;
    const values = isSmooth ? ema(one.y, smoothing) : one.y;
    const dodge = categories && one.low ? (position - (series.length - 1) / 2) * 7 : 0;
    const xOf = value => x(value) + dodge;
    const path = ys => pathOf(one.x, ys, xOf, toY, width, log);
    if (one.area) root.append(s("path.area", { d: areaOf(one, xOf, toY), fill: stroke }));
    if (isSmooth) root.append(s("path.line.raw", { d: path(one.y), stroke }));
    const d = spec.edges ? joined(one, spec.edges, xOf, toY) : path(values);
    root.append(s(`path.line${one.dash ? ".dashed" : ""}${categories ? ".thin" : ""}`, { d, stroke }));
    const labels = [];
    for (const [index, value] of one.y.entries()) {
      if (!isNumber(value)) continue;
      const at = round(xOf(one.x[index]));
      const isAlone = !isNumber(one.y[index - 1]) && !isNumber(one.y[index + 1]);
      if (one.low && !one.area && isNumber(one.low[index])) {
        const [top, bottom] = [round(toY(one.high[index])), round(toY(one.low[index]))];
        root.append(s("path.whisker", { d: `M${at},${top}V${bottom}M${at - 3},${top}h6M${at - 3},${bottom}h6`, stroke }));
      }
      if (one.points || isAlone)
        root.append(dot(at, toY(values[index]), one.points ? 4 : 3, one.hollow ? "var(--surface)" : stroke, stroke));
      labels.push({ at: one.x[index], x: at, y: toY(value), text: y.format(value), stroke, strong: position === 0 });
    }
    return labels;
  }

  function noteHidden(root, area) {
    const hidden = series.flatMap(one => one.y).filter(value => isNumber(value) && value <= 0).length;
    const text = `${hidden} values at or below 0 are not on this scale`;
    if (hidden) root.append(label("axis-label", area.right, area.top + 2, text, "end"));
  }

  function describe() {
    const parts = series.map(one => {
      const values = one.y.filter(isNumber);
      return `${one.name} from ${y.format(values[0])} to ${y.format(last(values))}`;
    });
    return `${spec.title || ""}: ${parts.join("; ")}. Arrow keys read single points.`;
  }

  function rowsAt(index) {
    return series.flatMap(one => {
      const at = one.x.length === xs.length ? index : one.x.indexOf(xs[index]);
      if (!isNumber(one.y[at])) return [];
      const range = one.low && isNumber(one.low[at]) ? ` (${y.format(one.low[at])} to ${y.format(one.high[at])})` : "";
      const { name, color, dash, hollow } = one;
      return { name, color, dash, hollow, value: y.format(one.y[at]) + range, y: one.y[at] };
    });
  }

  // Show the crosshair at xs[index]; null goes back to the last point in the legend.
  function show(index) {
    place.index = index;
    if (!state) return;
    const { crosshair, dots, x, y: toY } = state;
    const rows = xs.length ? rowsAt(index ?? xs.length - 1) : [];
    for (const [name, element] of chart.legend) {
      const row = rows.find(one => one.name === name);
      element.textContent = row && !spec.quietLegend ? row.value.split(" (")[0] : "";
    }
    dots.replaceChildren();
    hide(crosshair, index === null);
    if (index === null) return;
    const at = round(x(xs[index]));
    for (const end of ["x1", "x2"]) crosshair.setAttribute(end, at);
    if (categories) return;
    for (const row of rows)
      if (!(log && row.y <= 0)) dots.append(dot(at, toY(row.y), 3.2, color(row.color), "var(--surface)"));
  }

  chart.showAt = value => show(value === null || !xs.length ? null : nearestIndex(xs, value));

  function keys(event) {
    const { index } = place;
    if (event.key === "0" && spec.group) zoom(spec);
    else if (index === null) return false;
    else if (event.key === "z" && spec.group) {
      const reach = Math.max(2, Math.round(xs.length / 6));
      zoom(spec, [xs[Math.max(0, index - reach)], xs[Math.min(xs.length - 1, index + reach)]]);
    } else if (event.key === "Enter" && spec.pick) spec.pick(xs[index]);
    else return false;
    return true;
  }

  function listen(root, width) {
    const under = interact(root, width, {
      place,
      count: xs.length,
      start: xs.length - 1,
      at: pixel => nearestIndex(xs, state.x.invert(pixel)),
      show: index => {
        for (const other of spec.group ? groups.get(spec.group) : [chart]) other.showAt(index === null ? null : xs[index]);
      },
      anchor: index => state.x(xs[index]),
      tip: index => [titleAt(spec.x, formatX(xs[index])), rowsAt(index)],
      keys,
    });
    if (!spec.pick) return;
    root.classList.add("pickable");
    root.addEventListener("click", event => spec.pick(xs[under(event)]));
  }

  const whole = Page.chip("whole range", () => zoom(spec), { hidden: true });
  chart.refresh = () => {
    whole.hidden = !measure();
    chart.redraw();
  };
  if (spec.group) {
    chart.tools.append(whole);
    groups.set(spec.group, [...(groups.get(spec.group) || []).filter(isOnPage), chart]);
  }
  if (y.log && series.some(one => one.y.some(value => value > 0))) {
    const toggle = () => {
      log = !log;
      button.ariaPressed = String(log);
      chart.redraw();
    };
    const button = Page.chip("log", toggle, { ariaPressed: "false", title: "Logarithmic scale" });
    chart.tools.append(button);
  }
  if (spec.smooth) smoothed.add(chart);
  return chart.element;
}

// --- bar chart
/* bars(spec): series {name, values, color} over x.centers, mode "stacked", "grouped" or "mirrored"
   (the second series hangs below zero). x: {label, centers, width, format}; y: {format}. */
function bars(spec) {
  const { centers, width: span } = spec.x;
  const height = spec.height || 180;
  const y = { tick: value => spec.y.format(Math.abs(value)), ...spec.y };
  const isMirrored = spec.mode === "mirrored";
  const isGrouped = spec.mode === "grouped";
  const isStacked = !isMirrored && !isGrouped;
  const sums = centers.map((_, index) => spec.series.map(one => one.values[index] || 0));

  function draw(width) {
    if (!centers.length) return emptyDrawing(width, Math.min(height, 90));
    const names = spec.series.map(one => one.name).join(", ");
    const root = canvas(width, height, `${spec.title || ""}: ${names} by ${spec.x.label || "group"}`, { tabindex: 0 });
    const tops = sums.map(row => (isStacked ? sum(row) : isMirrored ? row[0] : Math.max(...row)));
    const depth = isMirrored ? Math.max(...sums.map(row => row[1])) : 0;
    const domain = y.domain || [-depth * 1.05, Math.max(...tops, depth ? 0 : 1e-9) * 1.05];
    const ends = [centers[0] - span / 2, last(centers) + span / 2];
    const ticks = ticksOf({ ...spec.x, time: false }, centers[0], last(centers), width / 80);
    const axes = frame(root, width, height, spec.x, ends, ticks, y, domain);
    const { x, area } = axes;
    const slot = x(ends[0] + span) - x(ends[0]);
    if (isStacked && slot < 4) stackAreas(root, axes);
    else centers.forEach((center, index) => drawBars(root, axes, x(center - span / 2), slot, sums[index]));
    if (isMirrored) root.append(line("gridline.zero", area.left, axes.y(0), area.right, axes.y(0)));
    const highlight = box("highlight", 0, area.top, slot, area.bottom - area.top);
    hide(highlight, true);
    root.prepend(highlight);
    interact(root, width, {
      place: { index: null },
      count: centers.length,
      at: pixel => nearestIndex(centers, x.invert(pixel)),
      show: index => {
        hide(highlight, index === null);
        if (index !== null) highlight.setAttribute("x", round(x(centers[index] - span / 2)));
      },
      anchor: index => x(centers[index]),
      tip: index => [titleAt(spec.x, spec.x.names ? spec.x.names[index] : spec.x.format(centers[index])), rowsAt(index)],
    });
    return root;
  }

  const rowsAt = index => [
    ...spec.series.map(({ name, color }, position) => ({ name, color, value: y.format(sums[index][position]) })),
    ...(spec.total ? [{ name: "total", value: y.format(sum(sums[index])) }] : []),
  ];

  // The bars of one center, in a slot of this width.
  function drawBars(root, { y: toY }, left, slot, values) {
    const gap = slot > 6 ? Math.min(4, slot * 0.16) : 0;
    const share = Math.max(0.5, slot - gap) / (isGrouped ? values.length : 1);
    let base = 0;
    spec.series.forEach((one, position) => {
      if (!values[position]) return;
      const bottom = isStacked ? base : 0;
      const top = (base = bottom + (isMirrored && position === 1 ? -1 : 1) * values[position]);
      const [y1, y2] = [toY(Math.max(bottom, top)), toY(Math.min(bottom, top))];
      const from = left + gap / 2 + (isGrouped ? share * position : 0);
      root.append(box("mark", from, y1, share - (isGrouped && share > 4 ? 1 : 0), y2 - y1, color(one.color)));
    });
  }

  // Bars too narrow to distinguish, as one stepped outline per series.
  function stackAreas(root, { x, y: toY }) {
    let base = centers.map(() => 0);
    spec.series.forEach((one, position) => {
      const top = base.map((value, index) => value + sums[index][position]);
      const edge = (values, side) =>
        centers.map((center, at) => `${round(x(center - side))},${round(toY(values[at]))}H${round(x(center + side))}`);
      const outline = [...edge(top, span / 2), ...edge(base, -span / 2).reverse()].join("L");
      root.append(s("path.mark", { d: `M${outline}Z`, fill: color(one.color) }));
      base = top;
    });
  }
  return framed({ ...spec, legend: spec.series }, draw).element;
}

// --- row chart
/* rows(spec): one line per row {label, marks, value, details}; a mark is {bar: [from, to]},
   {dot: at} or {whisker: [low, high]} with a color. x: {domain, format, label, zero}. */
function rows(spec) {
  const rowHeight = spec.rowHeight || 30;
  const { domain } = spec.x;

  function draw(width) {
    if (!spec.rows.length) return emptyDrawing(width, 70);
    const height = spec.rows.length * rowHeight + (spec.x.label ? 40 : 28);
    const told = spec.rows.map(row => `${row.label} ${row.value || ""}`).join("; ");
    const root = canvas(width, height, `${spec.title || ""}: ${told}`, { tabindex: 0 });
    const left = Math.min(width * 0.42, 14 + widest(spec.rows.map(row => row.label), 12.5, 620));
    const right = width - 16 - widest(spec.rows.map(row => row.value || ""), 12.5, 560);
    const x = scale(...domain, left, right);
    const bottom = spec.rows.length * rowHeight + 4;
    const highlight = box("highlight", 0, 0, width, rowHeight);
    hide(highlight, true);
    root.append(highlight);
    for (const tick of ticksOf(spec.x, ...domain, (right - left) / 70))
      root.append(
        line(tick === 0 && spec.x.zero ? "gridline.zero" : "gridline", x(tick), 2, x(tick), bottom),
        label("tick", x(tick), bottom + 14, (spec.x.tick || spec.x.format)(tick), "middle"),
      );
    if (spec.x.label) root.append(label("axis-label", (left + right) / 2, height - 3, spec.x.label, "middle"));
    spec.rows.forEach((row, index) => {
      const middle = 2 + rowHeight * (index + 0.5);
      root.append(label(`row-label${row.strong ? ".strong" : ""}`, left - 10, middle + 4, clip(row.label, left - 10), "end"));
      if (row.value) root.append(label("row-value", width - 2, middle + 4, row.value, "end"));
      root.append(...row.marks.map(mark => drawMark(mark, middle, x)).filter(Boolean));
    });
    interact(root, width, {
      place: { index: null },
      count: spec.rows.length,
      at: (_, pixel) => clamp(0, Math.floor((pixel - 2) / rowHeight), spec.rows.length - 1),
      show: index => {
        hide(highlight, index === null);
        if (index !== null) highlight.setAttribute("y", 2 + index * rowHeight);
      },
      anchor: () => left,
      tip: index => [spec.rows[index].label, spec.rows[index].details],
    });
    return root;
  }

  function drawMark(mark, middle, x) {
    const paint = color(mark.color);
    if (isNumber(mark.dot)) return dot(x(mark.dot), middle, 5, mark.hollow ? "var(--surface)" : paint, paint);
    const range = mark.bar || mark.whisker;
    if (!range) return null;
    const [from, to] = [round(x(Math.min(...range))), round(x(Math.max(...range)))];
    if (mark.whisker)
      return s("path.whisker", { d: `M${from},${middle}H${to}M${from},${middle - 4}v8M${to},${middle - 4}v8`, stroke: paint });
    const thickness = mark.thin ? 3 : rowHeight * 0.6;
    return box(mark.thin ? "mark.thin" : "mark", from, middle - thickness / 2, Math.max(1, to - from), thickness, paint);
  }
  return framed(spec, draw).element;
}

function clip(text, pixels) {
  if (textWidth(text, 12.5, 620) <= pixels) return text;
  let end = text.length;
  while (end > 1 && textWidth(`${text.slice(0, end)}…`, 12.5, 620) > pixels) end -= 1;
  return `${text.slice(0, end)}…`;
}

// Draw a chart from its kind and the names of its axis formats.
const figure = ({ kind, x, y = {}, ...spec }) =>
  ({ lines, bars, rows })[kind]({ ...spec, x: { ...AXES[x.as], ...x }, y: { ...AXES[y.as], ...y } });

// Remove the charts of a group, because other charts replace them.
function forget(group) {
  for (const chart of groups.get(group) || []) smoothed.delete(chart);
  groups.delete(group);
}

function smooth(weight) {
  smoothing = weight;
  for (const chart of smoothed)
    if (isOnPage(chart)) chart.redraw();
    else smoothed.delete(chart);
}

globalThis.Charts = { figure, lines, bars, rows, showTooltip, hideTooltip, refresh, forget, smooth };
