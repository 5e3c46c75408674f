// Charts. uPlot draws lines and bars on a canvas; rows (dumbbells, forests, waterfalls, time lines) are elements.

// --- colors
// The value of a color variable, which the canvas needs; `share` is the opacity in percent.
const probe = document.body.appendChild(document.createElement("i"));
probe.hidden = true;
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

function recolor() {
  inks.clear();
  redraw("colors");
}
const printing = matchMedia("print");
for (const query of [matchMedia("(prefers-color-scheme: dark)"), printing]) query.addEventListener("change", recolor);
new MutationObserver(recolor).observe(document.documentElement, { attributeFilter: ["data-theme"] });

// --- tooltip
const tooltip = document.body.appendChild(document.createElement("div"));
Object.assign(tooltip, { className: "tooltip", role: "status", hidden: true });

function showTooltip(x, y, title, rows) {
  const row = one => html`<div class="tooltip-row">${swatch(one)}<span>${one.name}</span><b>${one.value}</b></div>`;
  render(html`<div class="tooltip-title">${title}</div>${rows.map(row)}`, tooltip);
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

function swatch({ color, hollow, dash, ring }) {
  const kind = ring ? "swatch ring" : hollow ? "swatch hollow" : dash ? "swatch dashed" : "swatch";
  return color !== undefined && html`<i class=${kind} style=${{ "--swatch": `var(--c${color})` }} />`;
}

// --- parts of every chart: title, tools, legend with current values, drawing, caption
function Frame({ spec: { key, title, note }, tools, legend, values = new Map(), stage, children, ...more }) {
  const item = one => html`<span class="legend-item">${swatch(one)}${one.name}<b>${values.get(one.name)}</b></span>`;
  return html`<figure class="chart" data-chart=${key}>
    <div class="chart-head">${title && html`<h4>${title}</h4>`}<div class="chart-tools">${tools}</div></div>
    ${legend?.length > 0 && html`<div class="legend">${legend.map(item)}</div>`}
    <div class="chart-stage" role="img" tabindex="0" ref=${stage} ...${more}>${children}</div>
    ${note && html`<figcaption>${note}</figcaption>`}
  </figure>`;
}
const noData = html`<p class="empty">no data yet</p>`;

// Let the keyboard select one of all places. read(place) selects a place, or none if it is null.
function keyboard(all, current, read, otherKey) {
  const arrows = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
  const moves = { ...arrows, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const onkeydown = event => {
    const by = moves[event.key];
    if (event.key === "Escape") read(null);
    else if (by && all.length) {
      event.preventDefault();
      const from = all.indexOf(current);
      read(all[clamp(0, (from < 0 && by < 0 ? all.length : from) + by, all.length - 1)]);
    } else otherKey?.(event.key);
  };
  return { onkeydown, onblur: () => read(null) };
}

// --- ticks
const decades = (first, count) => Array.from({ length: 3 * count }, (_, index) => [1, 2, 5][index % 3] * 10 ** (first + Math.floor(index / 3)));
const WHOLE = decades(0, 15);
const CLOCK_STEPS = [...decades(-6, 6), 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...WHOLE.map(days => 86400 * days)];
const stepsOf = axis => (axis.integer ? WHOLE : axis.time ? CLOCK_STEPS : undefined);

// --- zoom
// The range of the x axis that a group of charts shows, in the unit of the axis, or undefined for the whole axis, and a
// function that changes it for the group.
function useZoom({ group, x }) {
  const [kept, keep] = useSetting(`zoom.${group}`);
  const [unit, ...ends] = kept.split("~");
  const range = ends.map(Number);
  const isRange = group && unit === x.label && range.length === 2 && range.every(isNumber);
  const zoom = to => {
    keep(to ? [x.label, ...to.map(value => Number(value.toPrecision(6)))].join("~") : "");
    hideTooltip();
  };
  return [isRange ? range : undefined, zoom];
}

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

// A reference for the stage of a chart, its width, and whether to draw: from when it comes near the window, or when the
// browser has nothing else to do.
function useStage() {
  const stage = useRef();
  const [width, setWidth] = useState(0);
  const [isDue, setDue] = useState(false);
  useLayoutEffect(() => {
    const resized = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    const near = new IntersectionObserver(([entry]) => entry.isIntersecting && setDue(true), { rootMargin: "300px" });
    for (const observer of [resized, near]) observer.observe(stage.current);
    whenIdle(() => setDue(true));
    return () => [resized, near].forEach(observer => observer.disconnect());
  }, []);
  return [stage, width, isDue];
}

/* make(given, isLog, smoothing): what to draw: {spec: with all details, series of {name, x, y, low?, high?, color},
   columns: these series as those of uPlot, each with x and y of its own, notes, draw: hooks, pad: of the x axis}.
   Another object `given` draws the chart again. */
function Plot({ given, make }) {
  const [scale, setScale] = useSetting(`scale.${given.key}`);
  const isLog = scale === "log";
  const [at, setAt] = useState(null); // the place whose values are shown
  const [stage, width, isDue] = useStage();
  const [smoothing] = useSetting("smoothing");
  const [range, zoom] = useZoom(given);
  const colors = useUpdates("colors");
  const holder = useRef();
  const plot = useRef(null);
  const chart = useMemo(() => {
    const made = make(given, isLog, Number(smoothing));
    return { ...made, places: placesOf(made.series.flatMap(one => one.x)) };
  }, [given, isLog, given.smooth && smoothing, colors]);
  const { spec, series, columns, places, pad = [0, 0] } = chart;
  const { x, group, height = 168 } = spec;
  const y = { format: Format.number, ...spec.y };
  const visible = range ? places.filter(value => value >= range[0] && value <= range[1]) : places;
  const isDrawn = width >= 40 && places.length > 0 && (isDue || printing.matches);

  useLayoutEffect(() => {
    if (!isDrawn) return undefined;
    const bands = columns.flatMap(({ area }, index) => (area ? { series: [index + 1, index + 2], fill: area } : []));
    const data = uPlot.join(columns.map(one => [one.x, one.y]));
    const drawn = new uPlot({ ...options(), width, series: [{}, ...columns], bands }, data, holder.current);
    plot.current = drawn;
    if (at !== null) queueMicrotask(() => plot.current === drawn && follow(drawn.valToPos(at, "x"), false));
    return () => {
      plot.current = null;
      drawn.destroy();
    };
  }, [chart, width, isDrawn, range?.join()]);
  const follow = (left, isShared = true) => plot.current.setCursor({ left, top: 0 }, true, isShared);

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
    const under = (u, left = u.cursor.left) => nearest(visible, u.posToVal(left, "x"));
    const end = { pad: 0.06, soft: 0, mode: y.zero === false ? 0 : 1 };
    const padded = (low, high) => (low === high && !pad[0] ? [low - 1, high + 1] : [low - pad[0], high + pad[1]]);
    return {
      height,
      padding: [8, u => Math.max(10, widest(u, [tickX(last(places))]) / 2 + 2), 0, 0], // room for half of the last label
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, ...ends) => range || padded(...ends) },
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
        move: (u, left, top) => [left < 0 ? left : u.valToPos(under(u, left), "x"), top],
        points: { size: 7, show: (_, index) => !columns[index - 1].isQuiet && document.createElement("i") },
        // uPlot takes a click for the end of a drag if its last move is not handled yet.
        drag: { x: Boolean(group), setScale: false, dist: 8, click: (u, event) => u.select.width && event.stopPropagation() },
        bind: { dblclick: () => () => group && zoom() },
        sync: group && { key: group, scales: ["x", null], filters: { pub: type => type === "mousemove" } },
      },
      hooks: {
        setSelect: [u => zoom([0, u.select.width].map(more => u.posToVal(u.select.left + more, "x")))],
        setCursor: [({ cursor }) => plot.current && show(cursor.left < 0 ? null : under(plot.current), cursor.event)],
        drawClear: [drawBands],
        drawAxes: [u => u.scales.y.min <= 0 && stroke(u, "zero", 1, [[[u.scales.x.min, 0], [u.scales.x.max, 0]]])],
        draw: chart.draw || [],
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
    const parts = series.map(one => {
      const values = one.y.filter(isNumber);
      return `${one.name} from ${y.format(values[0])} to ${y.format(last(values))}`;
    });
    return places.length ? `${spec.title || ""}: ${parts.join("; ")}. Arrow keys read single points.` : "no data yet";
  }

  function rowsAt(place) {
    const found = series.map(one => [one, one.x.indexOf(place)]).filter(([one, index]) => isNumber(one.y[index]));
    const rows = found.map(([{ y: values, low, high, ...look }, index]) => {
      const interval = isNumber(low?.[index]) ? ` (${y.format(low[index])} to ${y.format(high[index])})` : "";
      return { ...look, value: y.format(values[index]) + interval };
    });
    return spec.total ? [...rows, { name: "total", value: y.format(sum(found.map(([one, index]) => one.y[index]))) }] : rows;
  }

  // Show the values at a place, or in the legend those at the last place if it is null. Only the chart under the
  // pointer gets an event, and shows a tooltip.
  function show(place, event) {
    setAt(place);
    if (event && place === null) hideTooltip();
    else if (event) explain(place, event.clientX, event.clientY);
  }

  function explain(place, left, top) {
    const text = x.names?.[places.indexOf(place)] ?? (x.format || Format.integer)(place);
    showTooltip(left, top, x.name ? `${x.name} ${text}` : text, rowsAt(place));
  }

  function read(place) {
    if (!plot.current) return;
    follow(place === null ? -10 : plot.current.valToPos(place, "x"));
    if (place === null) return hideTooltip();
    const { left, top } = plot.current.over.getBoundingClientRect();
    explain(place, left + plot.current.cursor.left, top + 20);
  }

  function otherKey(key) {
    if (key === "0" && group) zoom();
    if (key === "Enter" && at !== null) spec.pick?.(at);
    if (key !== "z" || at === null || !group) return;
    const [place, reach] = [visible.indexOf(at), Math.max(2, Math.round(visible.length / 6))];
    zoom([visible[Math.max(0, place - reach)], visible[Math.min(visible.length - 1, place + reach)]]);
  }

  const hasLog = y.log && series.some(one => one.y.some(value => value > 0));
  const tools = html`
    ${group && html`<${Chip} hidden=${!range} onclick=${() => zoom()}>whole range<//>`}
    ${hasLog && html`<${Chip} aria-pressed=${isLog} title="Logarithmic scale" onclick=${() => setScale(isLog ? "" : "log")}>log<//>`}`;
  const legend = spec.legend || (series.length > 1 || spec.showLegend ? series : []);
  const rows = spec.quietLegend ? [] : rowsAt(at ?? last(visible));
  const values = new Map(rows.map(({ name, value }) => [name, value.split(" (")[0]]));
  const events = {
    ...keyboard(isDrawn ? visible : [], at, read, otherKey),
    onclick: event => at !== null && event.target.matches(".u-over") && spec.pick?.(at),
    onpointermove: event => event.pointerType === "touch" && event.target.matches(".u-over") && follow(event.offsetX),
  };
  return html`<${Frame} spec=${spec} tools=${tools} legend=${legend} values=${values} stage=${stage}
    aria-label=${useMemo(describe, [chart])} style=${{ minHeight: places.length ? `${height}px` : "" }} ...${events}>
    ${places.length ? chart.notes : noData}
    <div ref=${holder} />
  <//>`;
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

/* lines(spec): series {name, x, y, low?, high?, color, dash?, points?, area?, best?: the point to mark as the best}.
   low and high are whiskers, or with `area` the edges of a filled area.
   edges: with categories, the pairs of places that a line joins; by default each and the next.
   x: {label, categories?, format?}; y: {format, tick, zero, domain, log: offer a log scale?}.
   group: charts of one group share the crosshair and the zoom; smooth: follow the slider; pick(x): on click. */
function lines(spec, isLog, smoothing) {
  const { categories } = spec.x;
  const { format } = { format: Format.number, ...spec.y };
  const series = spec.series.filter(one => one.y.some(isNumber));
  const x = categories ? { ...spec.x, names: categories, ticks: [...categories.keys()], tick: value => categories[value] } : spec.x;

  function columnsOf(one, shift) {
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

  const isVisible = (u, value) => value >= u.scales.x.min && value <= u.scales.x.max;

  function whiskers(u, { x: at, low, high, color }, shift) {
    const isShown = place => isNumber(low[place]) && isVisible(u, at[place]);
    const found = [...at.keys()].filter(isShown).map(place => [low, high].map(values => [at[place] + shift, values[place]]));
    stroke(u, `c${color}`, 1.5, found);
  }

  function ring(u, { x: at, y: values, best, color }, shift) {
    const path = new Path2D();
    path.arc(u.valToPos(at[best] + shift, "x", true), u.valToPos(values[best], "y", true), 9 * devicePixelRatio, 0, 7);
    Object.assign(u.ctx, { strokeStyle: ink(`c${color}`), lineWidth: 1.5 * devicePixelRatio });
    u.ctx.stroke(path);
  }

  const marked = series.filter(one => one.best >= 0);
  const nameOf = ({ best, x: at }) => categories?.[at[best]] ?? `${x.name} ${x.format(at[best])}`;
  const bests = marked.map(({ color, ...one }) => ({ name: `best: ${nameOf(one)}`, color, ring: true }));
  // Intervals of the same category stand side by side.
  const shiftOf = index => (categories ? (index - (series.length - 1) / 2) * 0.02 * categories.length : 0);
  const hidden = series.flatMap(one => one.y).filter(value => isNumber(value) && value <= 0).length;
  return {
    spec: { ...spec, x, legend: marked.length > 0 && [...series, ...bests] },
    series,
    columns: series.flatMap((one, index) => columnsOf(one, shiftOf(index))),
    notes: isLog && hidden > 0 && html`<small>${hidden} values at or below 0 are not on this scale</small>`,
    draw: [
      u => series.forEach((one, index) => one.low && !one.area && whiskers(u, one, shiftOf(index))),
      u => marked.forEach(one => isVisible(u, one.x[one.best]) && ring(u, one, shiftOf(series.indexOf(one)))),
      u => spec.valueLabels && drawLabels(u, series, format),
    ],
    pad: categories && [0.35, spec.valueLabels ? 0.6 : 0.35],
  };
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
  const columns = series.map((one, index) => ({
    ...QUIET,
    x: count > 1 ? centers.map(center => center + ((index - (count - 1) / 2) * 0.84 * width) / count) : centers,
    y: (heights[spec.mode] || stacked)(one, index),
    fill: ink(`c${one.color}`),
    paths: centers.length > 150 ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.bars({ size: [0.84 / count, Infinity] }),
  }));
  const y = { tick: value => spec.y.format(Math.abs(value)), ...spec.y };
  const look = { height: 180, quietLegend: true, legend: spec.series, ...spec, x: { ...spec.x, time: false }, y };
  // In a stack, the first series is drawn last, in front of the others.
  return { spec: look, series: centers.length ? series : [], columns: columns.reverse(), pad: [width / 2, width / 2] };
}

// --- row chart
/* A row chart: one line per row {label, marks, value, details}; a mark is {bar: [from, to]},
   {dot: at} or {whisker: [low, high]} with a color. x: {domain, format, label, zero}. */
function Rows({ spec }) {
  const [at, setAt] = useState(null);
  const stage = useRef();
  const [low, high] = spec.x.domain;
  const share = value => `${(100 * (value - low)) / (high - low || 1)}%`;
  const step = (stepsOf(spec.x) || decades(-9, 25)).find(one => (high - low) / one < 6);
  const ticks = Array.from({ length: 7 }, (_, index) => Number(((Math.ceil(low / step) + index) * step).toPrecision(12)));
  const format = spec.x.tick || spec.x.format;
  const kindOf = tick => (tick === 0 && spec.x.zero ? "tick zero" : "tick");
  const drawn = tick => html`<i class=${kindOf(tick)} style=${{ "--from": share(tick) }}><span>${format(tick)}</span></i>`;

  function mark({ color, dot, bar, whisker, hollow, thin }) {
    const ends = isNumber(dot) ? [dot] : bar || whisker;
    if (!ends) return null;
    const kind = isNumber(dot) ? (hollow ? "dot hollow" : "dot") : whisker ? "whisker" : thin ? "bar thin" : "bar";
    const [from, to] = [Math.min(...ends), Math.max(...ends)].map(share);
    return html`<i class="mark ${kind}" style=${{ "--from": from, "--to": to, "--mark": `var(--c${color})` }} />`;
  }

  function read(index, ...pointer) {
    setAt(index);
    if (index === null) return hideTooltip();
    const { left, top } = stage.current.querySelectorAll(".row")[index].getBoundingClientRect();
    const { label, details } = spec.rows[index];
    return showTooltip(...(pointer.length ? pointer : [left + 100, top]), label, details);
  }

  const row = ({ label, strong, marks, value }, index) => html`<div
    class=${index === at ? "row read" : "row"} style=${{ "--row": String(index + 1) }}
    onpointermove=${event => read(index, event.clientX, event.clientY)} onpointerleave=${() => read(null)}>
    <span class=${strong ? "row-label strong" : "row-label"}>${label}</span>
    <div class="lane">${marks.map(mark)}</div>
    <span class="row-value">${value}</span>
  </div>`;
  const look = { "--height": `${spec.rowHeight || 30}px`, "--count": String(spec.rows.length) };
  const grid = html`<div class="rows" style=${look}>
    <div class="lane axis">${ticks.filter(tick => tick <= high).map(drawn)}</div>
    ${spec.rows.map(row)}
    ${spec.x.label && html`<span class="axis-label">${spec.x.label}</span>`}
  </div>`;
  const label = `${spec.title || ""}: ${spec.rows.map(one => `${one.label} ${one.value || ""}`).join("; ")}`;
  const events = keyboard([...spec.rows.keys()], at, read);
  return html`<${Frame} spec=${spec} legend=${spec.legend} stage=${stage} aria-label=${label} ...${events}>
    ${spec.rows.length ? grid : noData}
  <//>`;
}

const plot = make => spec => html`<${Plot} key=${spec.key} given=${spec} make=${make} />`;
const CHARTS = { lines: plot(lines), bars: plot(bars), rows: spec => html`<${Rows} key=${spec.key} spec=${spec} />` };
// A chart from its kind and the names of its axis formats.
const figure = ({ kind, x, y = {}, ...spec }) =>
  CHARTS[kind]({ ...spec, x: { ...AXES[x.as], ...x }, y: { ...AXES[y.as], ...y } });

globalThis.Charts = { ...CHARTS, figure, showTooltip, hideTooltip };
