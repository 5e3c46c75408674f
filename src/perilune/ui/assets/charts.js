// Charts. uPlot draws lines and bars on a canvas; rows (dumbbells, forests, waterfalls, time lines) are elements.
const charts = new Set();
let smoothing = 0;

// --- colors
// The value of a color variable, which the canvas needs; `share` is the opacity in percent.
const probe = document.body.appendChild(h("i", { hidden: true }));
const inks = new Map();
function ink(name, share = 100) {
  const mixed = `color-mix(in srgb, var(--${name}) ${share}%, transparent)`;
  if (!inks.has(mixed)) {
    probe.style.color = mixed;
    inks.set(mixed, getComputedStyle(probe).color);
  }
  return inks.get(mixed);
}
const family = getComputedStyle(document.body).fontFamily;

function redraw(isMeant) {
  for (const chart of charts) if (isMeant(chart.spec)) chart.redraw();
}
function recolor() {
  inks.clear();
  redraw(() => true);
}
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", recolor);
new MutationObserver(recolor).observe(document.documentElement, { attributeFilter: ["data-theme"] });

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

const swatch = ({ color, hollow, dash }) =>
  color !== undefined && h(`i.swatch${hollow ? ".hollow" : dash ? ".dashed" : ""}`, { "--swatch": `var(--c${color})` });

// --- parts of every chart: title, tools, legend with current values, drawing, caption
function framed(spec, legend) {
  const values = new Map(legend.map(one => [one.name, h("b")]));
  const [tools, stage] = [h("div.chart-tools"), h("div.chart-stage", { role: "img", tabindex: 0 })];
  const element = h(
    "figure.chart",
    h("div.chart-head", spec.title && h("h4", spec.title), tools),
    legend.length > 0 && h("div.legend", legend.map(one => h("span.legend-item", swatch(one), one.name, values.get(one.name)))),
    stage,
    spec.note && h("figcaption", spec.note),
  );
  if (spec.key) element.dataset.chart = spec.key;
  return { spec, element, tools, stage, legend: values, width: 0 };
}
const noData = () => h("p.empty", "no data yet");
const titleAt = ({ name }, text) => (name ? `${name} ${text}` : text);

// Let the keyboard select a place. places() returns all places, current() the selected one; read(place) selects a
// place, or none if it is null.
function listen(stage, { places, current, read, keys }) {
  stage.addEventListener("blur", () => read(null));
  stage.addEventListener("keydown", event => {
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    const [by, all] = [moves[event.key], places()];
    if (event.key === "Escape") read(null);
    else if (by && all.length) {
      event.preventDefault();
      const from = all.indexOf(current());
      read(all[clamp(0, (from < 0 && by < 0 ? all.length : from) + by, all.length - 1)]);
    } else keys?.(event.key);
  });
}

// --- ticks
const decades = (first, count) => Array.from({ length: 3 * count }, (_, index) => [1, 2, 5][index % 3] * 10 ** (first + Math.floor(index / 3)));
const WHOLE = decades(0, 15);
const CLOCK_STEPS = [...decades(-6, 6), 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...WHOLE.map(days => 86400 * days)];
const stepsOf = axis => (axis.integer ? WHOLE : axis.time ? CLOCK_STEPS : undefined);

// --- zoom
// The range of the x axis that a group of charts shows, in the unit of the axis; undefined for the whole axis.
function zoomOf({ group, x }) {
  const [unit, ...ends] = Address.get(`zoom.${group}`).split("~");
  const range = ends.map(Number);
  return group && unit === x.label && range.length === 2 && range.every(isNumber) ? range : undefined;
}

// Show a range in all charts of a group, or the whole axis.
function zoom({ group, x }, range) {
  Address.set(`zoom.${group}`, range ? [x.label, ...range.map(value => Number(value.toPrecision(6)))].join("~") : "");
  hideTooltip();
  refresh(group);
}

const refresh = group => redraw(spec => spec.group === group);
Address.restore(() => redraw(spec => spec.group));

// --- drawing on the canvas, in units of the axes
function trace(u, paths) {
  const path = new Path2D();
  for (const points of paths)
    points.forEach(([x, y], index) => path[index ? "lineTo" : "moveTo"](u.valToPos(x, "x", true), u.valToPos(y, "y", true)));
  return path;
}

function stroke(u, color, width, paths) {
  Object.assign(u.ctx, { strokeStyle: ink(color), lineWidth: width * devicePixelRatio });
  u.ctx.stroke(trace(u, paths));
}

function write(u, text, x, y, look) {
  const { size = 11, weight = 400, color = "muted", align = "center", room = Infinity } = look;
  u.ctx.font = `${weight} ${size * devicePixelRatio}px ${family}`;
  if (u.ctx.measureText(text).width > room) return;
  const style = { fillStyle: ink(color), strokeStyle: ink("ground"), lineWidth: 4 * devicePixelRatio, lineJoin: "round" };
  Object.assign(u.ctx, { ...style, textAlign: align, textBaseline: "middle" });
  if (look.halo) u.ctx.strokeText(text, x, y);
  u.ctx.fillText(text, x, y);
}

// --- charts that uPlot draws
const whenIdle = window.requestIdleCallback ?? (run => setTimeout(run, 500));
const placesOf = values => [...new Set(values)].sort((a, b) => a - b);
const nearest = (all, value) => all.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best), all[0]);
function widest(u, texts) {
  u.ctx.font = u.axes[1].font[0];
  return Math.max(0, ...texts.map(text => u.ctx.measureText(text).width)) / devicePixelRatio;
}

/* reading(isLog): what to draw, read again for each drawing: {series of {name, x, y, low?, high?, color},
   columns: these series as those of uPlot, each with x and y of its own, notes, draw: hooks}. pad: of the x axis. */
function plotted(spec, reading, pad = [0, 0]) {
  const { x, group } = spec;
  const y = { format: Format.number, ...spec.y };
  const height = spec.height || 168;
  let [isLog, isDue, at, plot, shown, places] = [false, false, null, null, reading(false), []];
  const chart = framed(spec, spec.legend || (shown.series.length > 1 || spec.showLegend ? shown.series : []));
  const { stage } = chart;
  const formatX = value => x.names?.[places.indexOf(value)] ?? (x.format || Format.integer)(value);
  const visible = () => places.filter(value => value >= plot.scales.x.min && value <= plot.scales.x.max);
  const whole = Page.chip("whole range", () => zoom(spec), { hidden: true });
  if (group) chart.tools.append(whole);

  chart.redraw = () => {
    plot?.destroy();
    plot = null;
    shown = reading(isLog);
    places = placesOf(shown.series.flatMap(one => one.x));
    whole.hidden = !zoomOf(spec);
    stage.ariaLabel = describe();
    stage.replaceChildren(...(places.length ? shown.notes || [] : [noData()]));
    stage.style.minHeight = places.length ? `${height}px` : "";
    if (chart.width < 40 || !places.length || !(isDue || matchMedia("print").matches)) return;
    const { columns } = shown;
    const bands = columns.flatMap(({ area }, index) => (area ? { series: [index + 1, index + 2], fill: area } : []));
    const data = uPlot.join(columns.map(one => [one.x, one.y]));
    plot = new uPlot({ ...options(), width: chart.width, series: [{}, ...columns], bands }, data, stage);
    if (spec.pick) plot.over.addEventListener("click", () => at !== null && spec.pick(at));
    plot.over.addEventListener("pointermove", event => event.pointerType === "touch" && follow(event.offsetX));
    queueMicrotask(() => (at === null ? show(null) : follow(plot.valToPos(at, "x"), false)));
  };
  const follow = (left, isShared = true) => plot.setCursor({ left, top: 0 }, true, isShared);

  function options() {
    const axis = { stroke: ink("muted"), font: `11px ${family}`, ticks: { show: false }, gap: 6 };
    const tickX = value => (isNothing(value) ? "" : (x.tick || x.format || Format.integer)(value));
    const label = x.label && { label: x.label, labelSize: 14, labelGap: 0, labelFont: axis.font };
    const splits = x.ticks && { splits: () => x.ticks };
    // Labels that would overlap are left out.
    const apart = (u, all) => {
      const texts = all.map(tickX);
      const every = all.length > 1 ? Math.ceil((widest(u, texts) + 8) / (u.valToPos(all[1], "x") - u.valToPos(all[0], "x"))) : 1;
      return texts.map((text, index) => (index % every ? "" : text));
    };
    const end = { pad: 0.06, soft: 0, mode: y.zero === false ? 0 : 1 };
    const padded = (low, high) => (low === high && !pad[0] ? [low - 1, high + 1] : [low - pad[0], high + pad[1]]);
    return {
      height,
      padding: [8, u => Math.max(10, widest(u, [tickX(last(places))]) / 2 + 2), 0, 0], // room for half of the last label
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, ...ends) => zoomOf(spec) || padded(...ends) },
        y: isLog ? { distr: 3 } : { range: y.domain || ((_, low, high) => uPlot.rangeNum(low, high, { min: end, max: end })) },
      },
      axes: [
        { ...axis, ...label, ...splits, size: 22, incrs: stepsOf(x), space: 64, grid: { show: false }, values: apart },
        {
          ...axis,
          incrs: stepsOf(y),
          space: 28,
          size: (u, texts) => 12 + widest(u, texts || []),
          grid: { stroke: ink("grid"), width: 1 },
          values: (_, all) => all.map(value => (isNothing(value) ? "" : (y.tick || y.format)(value))),
        },
      ],
      cursor: {
        y: false,
        move: (u, left, top) => [left < 0 ? left : u.valToPos(nearest(visible(), u.posToVal(left, "x")), "x"), top],
        points: { size: 7, show: (_, index) => !shown.columns[index - 1].isQuiet && h("i") },
        // uPlot takes a click for the end of a drag if its last move is not handled yet.
        drag: { x: Boolean(group), setScale: false, dist: 8, click: (u, event) => u.select.width && event.stopPropagation() },
        bind: { dblclick: () => () => group && zoom(spec) },
        sync: group && { key: group, scales: ["x", null], filters: { pub: type => type === "mousemove" } },
      },
      hooks: {
        setSelect: [u => zoom(spec, [0, u.select.width].map(more => u.posToVal(u.select.left + more, "x")))],
        setCursor: [u => plot && show(u.cursor.left < 0 ? null : nearest(visible(), u.posToVal(u.cursor.left, "x")), u.cursor.event)],
        drawClear: [drawBands],
        drawAxes: [u => u.scales.y.min <= 0 && stroke(u, "zero", 1, [[[u.scales.x.min, 0], [u.scales.x.max, 0]]])],
        draw: shown.draw || [],
      },
    };
  }

  function drawBands(u) {
    const { left, top, width, height } = u.bbox;
    for (const [index, band] of (spec.bands || []).entries()) {
      const [from, to] = [band.begin, band.end].map(value => clamp(left, u.valToPos(value, "x", true), left + width));
      u.ctx.fillStyle = ink("sunk", 70);
      if (index % 2 === 0) u.ctx.fillRect(from, top, to - from, height);
      write(u, band.name, (from + to) / 2, top + 8 * devicePixelRatio, { room: to - from });
    }
  }

  function describe() {
    const parts = shown.series.map(one => {
      const values = one.y.filter(isNumber);
      return `${one.name} from ${y.format(values[0])} to ${y.format(last(values))}`;
    });
    return places.length ? `${spec.title || ""}: ${parts.join("; ")}. Arrow keys read single points.` : "no data yet";
  }

  function rowsAt(value) {
    const found = shown.series.map(one => [one, one.x.indexOf(value)]).filter(([one, index]) => isNumber(one.y[index]));
    const rows = found.map(([{ y: values, low, high, ...look }, index]) => {
      const range = isNumber(low?.[index]) ? ` (${y.format(low[index])} to ${y.format(high[index])})` : "";
      return { ...look, value: y.format(values[index]) + range };
    });
    return spec.total ? [...rows, { name: "total", value: y.format(sum(found.map(([one, index]) => one.y[index]))) }] : rows;
  }

  // Show the values at a place, or in the legend those at the last place if it is null. Only the chart under the
  // pointer gets an event, and shows a tooltip.
  function show(value, event) {
    at = value;
    const rows = rowsAt(value ?? last(visible()));
    for (const [name, element] of chart.legend) {
      const row = rows.find(one => one.name === name);
      element.textContent = row && !spec.quietLegend ? row.value.split(" (")[0] : "";
    }
    if (event && value === null) hideTooltip();
    else if (event) tell(event.clientX, event.clientY);
  }
  const tell = (left, top) => showTooltip(left, top, titleAt(x, formatX(at)), rowsAt(at));

  listen(stage, {
    places: () => (plot ? visible() : []),
    current: () => at,
    read(value) {
      if (!plot) return;
      follow(value === null ? -10 : plot.valToPos(value, "x"));
      if (value === null) return hideTooltip();
      const { left, top } = plot.over.getBoundingClientRect();
      tell(left + plot.cursor.left, top + 20);
    },
    keys(key) {
      if (key === "0" && group) return zoom(spec);
      if (at === null) return undefined;
      if (key === "Enter") return spec.pick?.(at);
      if (key !== "z" || !group) return undefined;
      const all = visible();
      const [place, reach] = [all.indexOf(at), Math.max(2, Math.round(all.length / 6))];
      return zoom(spec, [all[Math.max(0, place - reach)], all[Math.min(all.length - 1, place + reach)]]);
    },
  });
  if (y.log && shown.series.some(one => one.y.some(value => value > 0))) {
    const toggle = () => {
      isLog = !isLog;
      button.ariaPressed = String(isLog);
      chart.redraw();
    };
    const button = Page.chip("log", toggle, { ariaPressed: "false", title: "Logarithmic scale" });
    chart.tools.append(button);
  }
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (!chart.element.isConnected) charts.delete(chart);
    if (width === chart.width) return;
    chart.width = width;
    chart.redraw();
  }).observe(stage);
  // A chart is first drawn when it comes near the window, or when the browser has nothing else to do.
  const come = () => {
    isDue = true;
    if (!plot) chart.redraw();
  };
  new IntersectionObserver(([entry]) => entry.isIntersecting && come(), { rootMargin: "300px" }).observe(stage);
  whenIdle(come);
  charts.add(chart);
  return chart.element;
}

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

const QUIET = { isQuiet: true, width: 0, points: { show: false } };

// The indices of values without a neighbor, which no line shows. Undefined values belong to other series.
function lonely(values) {
  const known = [...values.keys()].filter(index => values[index] !== undefined);
  const isAlone = (index, place) => [place - 1, place + 1].every(other => !isNumber(values[known[other]]));
  return known.filter((index, place) => isNumber(values[index]) && isAlone(index, place));
}

// The values at each place, beside their points, moved apart so that none overlap.
function drawLabels(u, series, format) {
  const [{ top, height }, unit] = [u.bbox, devicePixelRatio];
  for (const place of placesOf(series.flatMap(one => one.x))) {
    const known = series.map((one, index) => ({ one, index, value: one.y[one.x.indexOf(place)] })).filter(({ value }) => isNumber(value));
    const all = known.map(one => ({ ...one, y: u.valToPos(one.value, "y", true) })).sort((a, b) => a.y - b.y);
    for (const [index, one] of all.entries()) one.y = Math.max(top + 4 * unit, one.y, index ? all[index - 1].y + 13 * unit : 0);
    const excess = Math.max(0, last(all).y - (top + height - 5 * unit));
    for (const { one, index, value, y } of all) {
      const look = index ? { size: 12 } : { size: 13, weight: 660 };
      write(u, format(value), u.valToPos(place, "x", true) + 20 * unit, y - excess, { ...look, halo: true, align: "left", color: `c${one.color}` });
    }
  }
}

/* lines(spec): series {name, x, y, low?, high?, color, dash?, points?, area?}, or a function that returns them.
   low and high are whiskers, or with `area` the edges of a filled area.
   edges: with categories, the pairs of places that a line joins; by default each and the next.
   x: {label, categories?, format?}; y: {format, tick, zero, domain, log: offer a log scale?}.
   group: charts of one group share the crosshair; smooth: follow the slider; pick(x): on click. */
function lines(spec) {
  const { categories } = spec.x;
  const { format } = { format: Format.number, ...spec.y };
  const x = categories ? { ...spec.x, names: categories, ticks: [...categories.keys()], tick: value => categories[value] } : spec.x;

  function columnsOf(one, shift, isLog) {
    const isSmooth = spec.smooth && smoothing > 0;
    const at = shift ? one.x.map(value => value + shift) : one.x;
    const column = (values, look) => ({ x: at, y: isLog ? values.map(value => (value > 0 ? value : null)) : values, ...look });
    const color = ink(`c${one.color}`);
    const lone = { show: false, size: 6, fill: color, filter: (u, index) => lonely(u.data[index]) };
    const point = { show: true, size: 9, width: 1.6, stroke: color, fill: one.hollow ? ink("surface") : color };
    const ends = edge => edge.map(place => [at[place], one.y[place]]);
    const whole = spec.edges?.filter(edge => edge.every(place => isNumber(one.y[place])));
    const paths = whole && (u => ({ stroke: trace(u, whole.map(ends)) }));
    return [
      ...(one.low ? [column(one.high, { ...QUIET, area: one.area && ink(`c${one.color}`, 14) }), column(one.low, QUIET)] : []),
      ...(isSmooth ? [column(one.y, { ...QUIET, width: 1, stroke: ink(`c${one.color}`, 25) })] : []),
      column(isSmooth ? ema(one.y, smoothing) : one.y, {
        stroke: ink(`c${one.color}`, categories ? 55 : 100),
        width: 1.7,
        dash: one.dash && [5, 4],
        points: one.points ? point : lone,
        paths,
      }),
    ];
  }

  function whiskers(u, { x: at, low, high, color }, shift) {
    const isShown = place => isNumber(low[place]) && at[place] >= u.scales.x.min && at[place] <= u.scales.x.max;
    const found = [...at.keys()].filter(isShown).map(place => [low, high].map(values => [at[place] + shift, values[place]]));
    stroke(u, `c${color}`, 1.5, found);
  }

  return plotted(
    { ...spec, x },
    isLog => {
      const given = typeof spec.series === "function" ? spec.series() : spec.series;
      const series = given.filter(one => one.y.some(isNumber));
      // Intervals of the same category stand side by side.
      const shiftOf = index => (categories ? (index - (series.length - 1) / 2) * 0.02 * categories.length : 0);
      const hidden = series.flatMap(one => one.y).filter(value => isNumber(value) && value <= 0).length;
      return {
        series,
        columns: series.flatMap((one, index) => columnsOf(one, shiftOf(index), isLog)),
        notes: isLog && hidden ? [h("small", `${hidden} values at or below 0 are not on this scale`)] : [],
        draw: [
          u => series.forEach((one, index) => one.low && !one.area && whiskers(u, one, shiftOf(index))),
          u => spec.valueLabels && drawLabels(u, series, format),
        ],
      };
    },
    categories ? [0.35, spec.valueLabels ? 0.6 : 0.35] : undefined,
  );
}

// --- bar chart
/* bars(spec): series {name, values, color} over x.centers, mode "stacked", "grouped" or "mirrored"
   (the second series hangs below zero). x: {label, centers, width, format}; y: {format}. */
function bars(spec) {
  const { centers, width } = spec.x;
  const count = spec.mode === "grouped" ? spec.series.length : 1;
  const series = spec.series.map(({ name, color, values }) => ({ name, color, x: centers, y: centers.map((_, place) => values[place] || 0) }));
  const heights = { mirrored: (one, index) => one.y.map(value => (index ? -value : value)), grouped: one => one.y };
  const stacked = (_, index) => centers.map((__, place) => sum(series.slice(0, index + 1).map(one => one.y[place])));
  const columns = () =>
    series.map((one, index) => ({
      ...QUIET,
      x: count > 1 ? centers.map(center => center + ((index - (count - 1) / 2) * 0.84 * width) / count) : centers,
      y: (heights[spec.mode] || stacked)(one, index),
      fill: ink(`c${one.color}`),
      paths: centers.length > 150 ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.bars({ size: [0.84 / count, Infinity] }),
    }));
  const y = { tick: value => spec.y.format(Math.abs(value)), ...spec.y };
  const look = { height: 180, quietLegend: true, legend: spec.series, ...spec, x: { ...spec.x, time: false }, y };
  // In a stack, the first series is drawn last, in front of the others.
  return plotted(look, () => ({ series: centers.length ? series : [], columns: columns().reverse() }), [width / 2, width / 2]);
}

// --- row chart
/* rows(spec): one line per row {label, marks, value, details}; a mark is {bar: [from, to]},
   {dot: at} or {whisker: [low, high]} with a color. x: {domain, format, label, zero}. */
function rows(spec) {
  const [low, high] = spec.x.domain;
  const share = value => `${(100 * (value - low)) / (high - low || 1)}%`;
  const step = (stepsOf(spec.x) || decades(-9, 25)).find(one => (high - low) / one < 6);
  const ticks = Array.from({ length: 7 }, (_, index) => Number(((Math.ceil(low / step) + index) * step).toPrecision(12)));
  const format = spec.x.tick || spec.x.format;
  const drawn = ticks.filter(tick => tick <= high).map(tick => h(tick === 0 && spec.x.zero ? "i.tick.zero" : "i.tick", { "--from": share(tick) }, h("span", format(tick))));

  function mark({ color, dot, bar, whisker, hollow, thin }) {
    const ends = isNumber(dot) ? [dot] : bar || whisker;
    if (!ends) return null;
    const kind = isNumber(dot) ? (hollow ? ".dot.hollow" : ".dot") : whisker ? ".whisker" : thin ? ".bar.thin" : ".bar";
    const [from, to] = [Math.min(...ends), Math.max(...ends)].map(share);
    return h(`i.mark${kind}`, { "--from": from, "--to": to, "--mark": `var(--c${color})` });
  }

  const chart = framed(spec, spec.legend || []);
  let at = null;
  const read = (index, ...pointer) => {
    at = index;
    for (const [place, row] of all.entries()) row.classList.toggle("read", place === index);
    if (index === null) return hideTooltip();
    const { left, top } = all[index].getBoundingClientRect();
    const { label, details } = spec.rows[index];
    return showTooltip(...(pointer.length ? pointer : [left + 100, top]), label, details);
  };
  const all = spec.rows.map((row, index) => {
    const events = { onpointermove: event => read(index, event.clientX, event.clientY), onpointerleave: () => read(null) };
    const label = h(row.strong ? "span.row-label.strong" : "span.row-label", row.label);
    return h("div.row", { ...events, "--row": String(index + 1) }, label, h("div.lane", row.marks.map(mark)), h("span.row-value", row.value));
  });
  const look = { "--height": `${spec.rowHeight || 30}px`, "--count": String(all.length) };
  const grid = h("div.rows", look, h("div.lane.axis", drawn), all, spec.x.label && h("span.axis-label", spec.x.label));
  chart.stage.append(all.length ? grid : noData());
  chart.stage.ariaLabel = `${spec.title || ""}: ${spec.rows.map(row => `${row.label} ${row.value || ""}`).join("; ")}`;
  listen(chart.stage, { places: () => [...all.keys()], current: () => at, read });
  return chart.element;
}

// Draw a chart from its kind and the names of its axis formats.
const figure = ({ kind, x, y = {}, ...spec }) =>
  ({ lines, bars, rows })[kind]({ ...spec, x: { ...AXES[x.as], ...x }, y: { ...AXES[y.as], ...y } });

function smooth(weight) {
  smoothing = weight;
  redraw(spec => spec.smooth);
}

globalThis.Charts = { figure, lines, bars, rows, showTooltip, hideTooltip, refresh, smooth };
