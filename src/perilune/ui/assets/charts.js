// Small SVG charts without dependencies: lines (with intervals, linked crosshairs, log scales), bars
// (stacked, grouped or mirrored) and rows (dumbbells, forests, waterfalls, time lines).
"use strict";

const Charts = (() => {
  const groups = new Map(); // name of a linked x axis -> the charts that share its crosshair
  const zooms = new Map(); // name of a linked x axis -> the range that is shown of it
  const smoothed = new Set(); // charts that follow the smoothing slider
  let smoothing = 0;

  function s(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes))
      if (value !== undefined && value !== null) element.setAttribute(key, value);
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const ruler = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  function textWidth(text, size, weight = 400) {
    ruler.font = `${weight} ${size}px ${family}`;
    return ruler.measureText(text).width;
  }

  const line = (x1, y1, x2, y2, name) =>
    s("line", { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2), class: name });
  const disc = (x, y, r, fill, stroke) => s("circle", { cx: round(x), cy: round(y), r, class: "dot", fill, stroke });
  const label = (x, y, content, name, anchor) =>
    s("text", { x: round(x), y: round(y), class: name, "text-anchor": anchor }, content);
  const box = (x, y, width, height, name, fill) =>
    s("rect", {
      x: round(x),
      y: round(y),
      width: round(Math.max(0.5, width)),
      height: round(Math.max(0.5, height)),
      class: name,
      fill,
    });

  const round = (value) => Math.round(value * 100) / 100;
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const color = (index) => `var(--c${index})`;

  // ------------------------------------------------------------------------------------- scales
  function niceTicks(low, high, count) {
    const span = high - low;
    if (!(span > 0)) return [low];
    const rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 2.5, 5, 10].find((multiple) => multiple * power >= rough * 0.999) || 10);
    const ticks = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1)
      ticks.push(Number((index * step).toPrecision(12)));
    return ticks;
  }

  const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

  function timeTicks(low, high, count) {
    const step = TIME_STEPS.find((one) => (high - low) / one <= count);
    return step && high - low > 4
      ? niceTicks(low / step, high / step, count)
          .filter(Number.isInteger)
          .map((tick) => tick * step)
      : niceTicks(low, high, count);
  }

  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low) + 1e-9);
    const last = Math.ceil(Math.log10(high) - 1e-9);
    const stride = Math.max(1, Math.ceil((last - first) / Math.max(2, count)));
    const ticks = [];
    for (let power = first; power <= last; power += stride) ticks.push(10 ** power);
    const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return inside.length > 1 ? inside : niceTicks(low, high, count);
  }

  function scale(low, high, from, to, log = false) {
    const map = log ? Math.log10 : (value) => value;
    const [start, end] = [map(low), map(high)];
    const ratio = end === start ? 0 : (to - from) / (end - start);
    const position = (value) => (ratio === 0 ? (from + to) / 2 : from + (map(value) - start) * ratio);
    position.invert = (pixel) =>
      ratio === 0 ? low : log ? 10 ** (start + (pixel - from) / ratio) : start + (pixel - from) / ratio;
    return position;
  }

  // Domain of the y axis: padded, anchored at zero when `zero`, never empty.
  function domainOf(values, axis, log) {
    if (axis.domain && !log) return axis.domain;
    let low = Infinity;
    let high = -Infinity;
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
    return [low === 0 ? 0 : low - pad, high === 0 ? 0 : high + pad];
  }

  // ------------------------------------------------------------------------------------ tooltip
  const tooltip = h("div", { class: "tooltip", role: "status", hidden: true });
  document.body.append(tooltip);

  function showTooltip(clientX, clientY, title, rows) {
    tooltip.replaceChildren(
      h("div", { class: "tooltip-title" }, title),
      ...rows.map((row) =>
        h(
          "div",
          { class: "tooltip-row" },
          swatch(row),
          h("span", { class: "tooltip-name" }, row.name),
          h("b", {}, row.value),
        ),
      ),
    );
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    const right = clientX + 14 + box.width < document.documentElement.clientWidth;
    tooltip.style.left = `${Math.max(4, right ? clientX + 14 : clientX - box.width - 14)}px`;
    tooltip.style.top = `${Math.max(4, Math.min(clientY - box.height - 10, window.innerHeight - box.height - 4))}px`;
  }

  function hideTooltip() {
    tooltip.hidden = true;
  }
  addEventListener("scroll", hideTooltip, { passive: true, capture: true });

  function swatch({ color: index, hollow, dash }) {
    if (index === undefined) return null;
    const mark = h("i", { class: `swatch${hollow ? " hollow" : dash ? " dashed" : ""}` });
    mark.style.setProperty("--swatch", color(index));
    return mark;
  }

  // -------------------------------------------------------------------------------- chart figure
  // The chrome every chart shares: title, tools, legend with live values, drawing, caption.
  // `draw(width)` returns an svg element; it is called again whenever the width changes.
  function figure(spec, draw) {
    const legendItems = new Map();
    const legend = h("div", { class: "legend" });
    for (const entry of spec.legend || []) {
      const value = h("b", {});
      legendItems.set(entry.name, value);
      legend.append(h("span", { class: "legend-item" }, swatch(entry), entry.name, value));
    }
    const tools = h("div", { class: "chart-tools" });
    const stage = h("div", { class: "chart-stage" });
    const element = h(
      "figure",
      { class: `chart ${spec.class || ""}` },
      h("div", { class: "chart-head" }, spec.title && h("h4", {}, spec.title), tools),
      (spec.legend || []).length ? legend : null,
      stage,
      spec.note ? h("figcaption", {}, spec.note) : null,
    );
    if (spec.key) element.dataset.chart = spec.key;
    const chart = { element, stage, tools, legendItems, width: 0 };
    chart.redraw = () => {
      if (chart.width < 40) return;
      const drawing = draw(chart.width);
      stage.replaceChildren(drawing);
    };
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (Math.abs(width - chart.width) < 1) return;
      chart.width = width;
      chart.redraw();
    }).observe(stage);
    return chart;
  }

  function canvas(width, height, label) {
    return s("svg", {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": label,
      tabindex: 0,
      class: "plot",
    });
  }

  function emptyDrawing(width, height, message) {
    const root = canvas(width, height, message);
    root.removeAttribute("tabindex");
    root.append(label(width / 2, height / 2, message, "empty", "middle"));
    return root;
  }

  // Axes with horizontal gridlines; returns the scales of the plotting area.
  function frame(root, width, height, { xTicks, xFormat, xLabel, xScaleOf, yDomain, yFormat, yLog, yTime, yCount, yInteger }) {
    const ticks = (yLog ? logTicks : yTime ? timeTicks : niceTicks)(
      yDomain[0],
      yDomain[1],
      yCount || Math.max(2, Math.round(height / 48)),
    ).filter((tick) => !yInteger || Number.isInteger(tick));
    const labels = ticks.map((tick) => yFormat(tick));
    const left = Math.max(22, 10 + Math.max(0, ...labels.map((label) => textWidth(label, 11))));
    const area = { left, right: width - 8, top: 10, bottom: height - (xLabel ? 34 : 22) };
    const y = scale(yDomain[0], yDomain[1], area.bottom, area.top, yLog);
    const x = xScaleOf(area.left, area.right);
    ticks.forEach((tick, index) => {
      const at = round(y(tick));
      root.append(
        line(area.left, at, area.right, at, tick === 0 ? "gridline zero" : "gridline"),
        label(area.left - 7, at + 3.5, labels[index], "tick", "end"),
      );
    });
    let lastEnd = -Infinity;
    for (const tick of xTicks(x)) {
      const text = xFormat(tick);
      const at = x(tick);
      const half = textWidth(text, 11) / 2;
      if (at - half < lastEnd + 6) continue;
      const anchor = at + half > width ? "end" : at - half < 0 ? "start" : "middle";
      lastEnd = at + half;
      root.append(label(anchor === "end" ? width : at, area.bottom + 15, text, "tick", anchor));
    }
    if (xLabel) root.append(label((area.left + area.right) / 2, height - 4, xLabel, "axis-label", "middle"));
    return { x, y, area };
  }

  // ---------------------------------------------------------------------------------- line chart
  // Exponential moving average without the pull towards its start.
  function ema(values, weight) {
    let total = 0;
    let norm = 0;
    return values.map((value) => {
      if (!isNumber(value)) return null;
      total = weight * total + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return total / norm;
    });
  }

  // Path through the points; thousands of points keep the extremes of every pixel column.
  function pathOf(xs, ys, x, y, width, log) {
    const usable = (value) => isNumber(value) && !(log && value <= 0);
    let path = "";
    let open = false;
    const draw = (px, py) => {
      path += `${open ? "L" : "M"}${round(px)},${round(py)}`;
      open = true;
    };
    const dense = xs.length > 3 * width;
    let column = null;
    const flush = () => {
      if (!column) return;
      draw(column.px, column.low);
      if (column.high !== column.low) draw(column.px, column.high);
      column = null;
    };
    for (let index = 0; index < xs.length; index += 1) {
      if (!usable(ys[index])) {
        flush();
        open = false;
        continue;
      }
      const [px, py] = [x(xs[index]), y(ys[index])];
      if (!dense) draw(px, py);
      else if (column && Math.floor(px) === column.pixel) {
        column.low = Math.min(column.low, py);
        column.high = Math.max(column.high, py);
      } else {
        flush();
        column = { pixel: Math.floor(px), px, low: py, high: py };
      }
    }
    flush();
    return path;
  }

  // Straight lines between the places of each edge whose ends are known.
  function joined(one, edges, x, y) {
    const at = (place) => `${round(x(place))},${round(y(one.y[place]))}`;
    return edges
      .filter((edge) => edge.every((place) => isNumber(one.y[place])))
      .map(([from, to]) => `M${at(from)}L${at(to)}`)
      .join("");
  }

  // Filled area between `low` and `high`, over the points that have both.
  function areaOf(one, x, y) {
    const known = one.x.map((_, index) => index).filter((index) => isNumber(one.low[index]) && isNumber(one.high[index]));
    const edge = (values, order) => order.map((index) => `${round(x(one.x[index]))},${round(y(values[index]))}`);
    return known.length ? `M${[...edge(one.high, known), ...edge(one.low, known.reverse())].join("L")}Z` : "";
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

  // Whether a chart is still to be drawn: it was not drawn yet, or nothing has taken its place.
  const isOnPage = (chart) => !chart.width || chart.element.isConnected;

  // The points of a series from range[0] to range[1].
  function within(one, [from, to]) {
    const places = one.x.map((_, place) => place).filter((place) => one.x[place] >= from && one.x[place] <= to);
    const cut = (values) => values && places.map((place) => values[place]);
    return { ...one, x: cut(one.x), y: cut(one.y), low: cut(one.low), high: cut(one.high) };
  }

  // Show a range of the x axis in all charts of a group, or the whole axis for null.
  function zoom(group, range) {
    if (range) zooms.set(group, range);
    else zooms.delete(group);
    hideTooltip();
    for (const chart of groups.get(group) || []) chart.refresh();
  }

  // Let the mouse select a range by dragging; the click that ends it picks nothing.
  function brush(root, spec, area, valueAt) {
    let start = null;
    let selection = null;
    const pixel = (event) => {
      const box = root.getBoundingClientRect();
      const at = ((event.clientX - box.left) * root.viewBox.baseVal.width) / box.width;
      return Math.max(area.left, Math.min(area.right, at));
    };
    root.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) start = pixel(event);
    });
    root.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const at = pixel(event);
      if (!selection && Math.abs(at - start) < 8) return;
      selection ||= root.appendChild(box(start, area.top, 1, area.bottom - area.top, "selection"));
      selection.setAttribute("x", round(Math.min(start, at)));
      selection.setAttribute("width", round(Math.abs(at - start)));
    });
    root.addEventListener("pointerleave", () => {
      if (selection) selection.remove();
      start = selection = null;
    });
    root.addEventListener(
      "click",
      (event) => {
        const chosen = selection && [start, pixel(event)].sort((a, b) => a - b).map(valueAt);
        start = selection = null;
        if (!chosen) return;
        event.stopImmediatePropagation();
        zoom(spec.group, chosen);
      },
      true,
    );
    root.addEventListener("dblclick", () => zoom(spec.group, null));
  }

  /* lines(spec): series {name, x, y, low?, high?, color, dash?, points?, area?, format?} over one x axis.
     series may be a function that returns them, for charts that are refreshed.
     low and high are whiskers, or with `area` the edges of a filled area.
     edges: with categories, the pairs of places that a line joins; by default each and the next.
     x: {label, categories?, format?}; y: {format, tick, zero, domain, log: offer a log scale?}.
     group: charts of one group share the crosshair; smooth: follow the slider; pick(x): on click. */
  function lines(spec) {
    const y = { format: Format.number, zero: true, ...spec.y };
    const height = spec.height || 168;
    const read = typeof spec.series === "function" ? spec.series : () => spec.series;
    const reset = spec.group
      ? h("button", { type: "button", class: "chip", hidden: true, on: { click: () => zoom(spec.group, null) } }, "whole range")
      : null;
    let series;
    let xs;
    const measure = () => {
      const range = zooms.get(spec.group);
      series = read()
        .map((one) => (range ? within(one, range) : one))
        .filter((one) => one.y.some(isNumber));
      if (reset) reset.hidden = !range;
      xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    };
    measure();
    const categories = spec.x.categories;
    const formatX = (value) => (categories ? categories[value] : (spec.x.format || Format.integer)(value));
    let log = y.log === "on";
    let hovered = null; // index into xs
    let state = null;

    const chart = figure(
      { ...spec, legend: spec.legend || (series.length > 1 || spec.showLegend ? series : []) },
      (width) => {
        if (!xs.length) return emptyDrawing(width, Math.min(height, 90), spec.empty || "no data yet");
        const ys = series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]);
        const domain = domainOf(ys, y, log);
        const root = canvas(width, height, describe());
        const pad = categories ? 0.35 : 0;
        const [first, last] = [xs[0], xs[xs.length - 1]];
        const {
          x,
          y: toY,
          area,
        } = frame(root, width, height, {
          xTicks: () =>
            categories
              ? xs
              : spec.x.ticks
                ? spec.x.ticks
                : (spec.x.time ? timeTicks : niceTicks)(first, last, Math.max(2, Math.round(width / 64))).filter(
                    (tick) => !spec.x.integer || Number.isInteger(tick),
                  ),
          xFormat: spec.x.tick || formatX,
          xLabel: spec.x.label,
          xScaleOf: (from, to) => scale(first - pad, last + (spec.valueLabels ? 1.7 : 1) * pad, from, to),
          yDomain: domain,
          yFormat: y.tick || y.format,
          yLog: log,
          yCount: y.ticks,
          yInteger: y.integer,
        });
        for (const [place, band] of (spec.bands || []).entries()) {
          const [from, to] = [x(band.begin), x(band.end)];
          if (place % 2 === 0) root.prepend(box(from, area.top, to - from, area.bottom - area.top, "band"));
          if (textWidth(band.name, 10.5) + 8 < to - from)
            root.append(label((from + to) / 2, area.top + 9, band.name, "band-label", "middle"));
        }
        if (isNumber(spec.marker)) root.append(line(x(spec.marker), area.top, x(spec.marker), area.bottom, "marker"));
        const endLabels = [];
        series.forEach((one, position) => {
          const stroke = color(one.color);
          const values = spec.smooth && smoothing > 0 ? ema(one.y, smoothing) : one.y;
          const dodge = categories && one.low ? (position - (series.length - 1) / 2) * 7 : 0;
          const xOf = (value) => x(value) + dodge;
          if (one.area) root.append(s("path", { d: areaOf(one, xOf, toY), class: "area", fill: stroke }));
          if (spec.smooth && smoothing > 0)
            root.append(s("path", { d: pathOf(one.x, one.y, xOf, toY, width, log), class: "line raw", stroke }));
          root.append(
            s("path", {
              d: spec.edges ? joined(one, spec.edges, xOf, toY) : pathOf(one.x, values, xOf, toY, width, log),
              class: `line${one.dash ? " dashed" : ""}${categories ? " thin" : ""}`,
              stroke,
            }),
          );
          one.x.forEach((value, index) => {
            if (!isNumber(one.y[index])) return;
            const isAlone = !isNumber(one.y[index - 1]) && !isNumber(one.y[index + 1]);
            if (one.low && !one.area && isNumber(one.low[index])) {
              const [at, top, bottom] = [round(xOf(value)), round(toY(one.high[index])), round(toY(one.low[index]))];
              root.append(
                s("path", {
                  d: `M${at},${top}V${bottom}M${at - 3},${top}h6M${at - 3},${bottom}h6`,
                  class: "whisker",
                  stroke,
                }),
              );
            }
            if (one.points || isAlone)
              root.append(
                disc(
                  xOf(value),
                  toY(values[index]),
                  one.points ? 4 : 3,
                  one.hollow ? "var(--surface)" : stroke,
                  stroke,
                ),
              );
          });
          if (spec.valueLabels) {
            one.x.forEach(
              (value, index) =>
                isNumber(one.y[index]) &&
                endLabels.push({
                  at: value,
                  x: xOf(value),
                  y: toY(one.y[index]),
                  text: y.format(one.y[index]),
                  stroke,
                  bold: position === 0,
                }),
            );
          }
        });
        placeLabels(root, endLabels, area);
        const crosshair = s("line", { y1: area.top, y2: area.bottom, class: "crosshair", visibility: "hidden" });
        const dots = s("g", {});
        root.append(crosshair, dots);
        if (log) noteHidden(root, series, area);
        state = { root, x, toY, crosshair, dots, area, width };
        if (spec.group) brush(root, spec, area, (at) => x.invert(at));
        listen(root);
        show(hovered);
        return root;
      },
    );

    function placeLabels(root, labels, area) {
      const columns = new Map();
      for (const one of labels) columns.set(one.at, [...(columns.get(one.at) || []), one]);
      for (const column of columns.values()) {
        column.sort((a, b) => a.y - b.y);
        column.forEach((one, index) => {
          one.top = Math.max(area.top + 4, index ? Math.max(one.y, column[index - 1].top + 13) : one.y);
        });
        const excess = Math.max(0, column[column.length - 1].top - (area.bottom - 5));
        const right = Math.max(...column.map((one) => one.x)) + 10;
        for (const one of column) {
          const text = label(right, one.top - excess + 4, one.text, `value-label${one.bold ? " strong" : ""}`);
          text.setAttribute("fill", one.stroke);
          root.append(text);
        }
      }
    }

    function noteHidden(root, shown, area) {
      const hidden = shown.reduce(
        (total, one) => total + one.y.filter((value) => isNumber(value) && value <= 0).length,
        0,
      );
      if (hidden)
        root.append(
          label(area.right, area.top + 2, `${hidden} values at or below 0 are not on this scale`, "axis-label", "end"),
        );
    }

    function describe() {
      const parts = series.map((one) => {
        const known = one.y.filter(isNumber);
        return `${one.name} from ${y.format(known[0])} to ${y.format(known[known.length - 1])}`;
      });
      return `${spec.title || ""}: ${parts.join("; ")}. Arrow keys read single points.`;
    }

    function rowsAt(index) {
      const rows = [];
      for (const one of series) {
        const at = one.x.length === xs.length ? index : one.x.indexOf(xs[index]);
        if (at < 0 || !isNumber(one.y[at])) continue;
        const format = one.format || y.format;
        const range = one.low && isNumber(one.low[at]) ? ` (${format(one.low[at])} to ${format(one.high[at])})` : "";
        rows.push({
          name: one.name,
          value: format(one.y[at]) + range,
          color: one.color,
          dash: one.dash,
          hollow: one.hollow,
          y: one.y[at],
        });
      }
      return rows;
    }

    // Show the crosshair at xs[index]; null goes back to the last point in the legend.
    function show(index) {
      hovered = index;
      if (!state) return;
      const { crosshair, dots, x, toY } = state;
      const rows = xs.length ? rowsAt(index === null ? xs.length - 1 : index) : [];
      for (const [name, element] of chart.legendItems) {
        const row = rows.find((one) => one.name === name);
        element.textContent = row && !spec.quietLegend ? row.value.split(" (")[0] : "";
      }
      dots.replaceChildren();
      crosshair.setAttribute("visibility", index === null ? "hidden" : "visible");
      if (index === null) return;
      const at = round(x(xs[index]));
      crosshair.setAttribute("x1", at);
      crosshair.setAttribute("x2", at);
      if (!categories)
        for (const row of rows)
          if (!(log && row.y <= 0)) dots.append(disc(at, toY(row.y), 3.2, color(row.color), "var(--surface)"));
    }

    chart.showAt = (value) => show(value === null || !xs.length ? null : nearestIndex(xs, value));

    function announce(index, clientX, clientY) {
      const value = index === null ? null : xs[index];
      for (const other of spec.group ? groups.get(spec.group) : [chart]) other.showAt(value);
      if (index === null) return hideTooltip();
      return showTooltip(clientX, clientY, `${spec.x.name ? `${spec.x.name} ` : ""}${formatX(value)}`, rowsAt(index));
    }

    function listen(root) {
      const indexAt = (event) => {
        const box = root.getBoundingClientRect();
        return nearestIndex(xs, state.x.invert(((event.clientX - box.left) * state.width) / box.width));
      };
      root.addEventListener("pointermove", (event) => announce(indexAt(event), event.clientX, event.clientY));
      root.addEventListener("pointerleave", () => announce(null));
      root.addEventListener("blur", () => announce(null));
      root.addEventListener("keydown", (event) => {
        const last = xs.length - 1;
        const current = hovered === null ? last : hovered;
        const moves = {
          ArrowLeft: current - 1,
          ArrowRight: hovered === null ? last : current + 1,
          Home: 0,
          End: last,
          PageUp: current - 10,
          PageDown: current + 10,
        };
        if (event.key === "Escape") return announce(null);
        if (event.key === "z" && spec.group && hovered !== null) {
          const reach = Math.max(2, Math.round(xs.length / 6));
          return zoom(spec.group, [xs[Math.max(0, hovered - reach)], xs[Math.min(last, hovered + reach)]]);
        }
        if (event.key === "0" && spec.group) return zoom(spec.group, null);
        if (event.key === "Enter" && spec.pick && hovered !== null) return spec.pick(xs[hovered]);
        if (!(event.key in moves)) return undefined;
        event.preventDefault();
        const index = Math.max(0, Math.min(last, moves[event.key]));
        const box = root.getBoundingClientRect();
        return announce(index, box.left + (state.x(xs[index]) * box.width) / state.width, box.top + 30);
      });
      if (spec.pick) {
        root.classList.add("pickable");
        root.addEventListener("click", (event) => spec.pick(xs[indexAt(event)]));
      }
    }

    if (y.log && series.some((one) => one.y.some((value) => value > 0))) {
      const button = h(
        "button",
        { type: "button", class: "chip", ariaPressed: String(log), title: "Logarithmic scale" },
        "log",
      );
      button.addEventListener("click", () => {
        log = !log;
        button.ariaPressed = String(log);
        chart.redraw();
      });
      chart.tools.append(button);
    }
    chart.refresh = () => {
      measure();
      chart.redraw();
    };
    if (reset) chart.tools.prepend(reset);
    if (spec.group) groups.set(spec.group, [...(groups.get(spec.group) || []).filter(isOnPage), chart]);
    if (spec.smooth) smoothed.add(chart);
    return chart.element;
  }

  // ----------------------------------------------------------------------------------- bar chart
  /* bars(spec): series {name, values, color} over x.centers, mode "stacked", "grouped" or "mirrored"
     (the second series hangs below zero). x: {label, centers, width, format}; y: {format}. */
  function bars(spec) {
    const { centers } = spec.x;
    const height = spec.height || 180;
    const format = spec.y.format || Format.number;
    const formatX = spec.x.format || Format.number;
    const mode = spec.mode || "stacked";
    const sign = (position) => (mode === "mirrored" && position === 1 ? -1 : 1);

    const chart = figure({ ...spec, legend: spec.series }, (width) => {
      if (!centers.length) return emptyDrawing(width, Math.min(height, 90), spec.empty || "no data yet");
      const root = canvas(
        width,
        height,
        `${spec.title || ""}: ${spec.series.map((one) => one.name).join(", ")} by ${spec.x.label || "group"}`,
      );
      const sums = centers.map((_, index) => spec.series.map((one) => one.values[index] || 0));
      const tops = sums.map((row) =>
        mode === "stacked" ? row.reduce((a, b) => a + b, 0) : Math.max(...(mode === "mirrored" ? [row[0]] : row)),
      );
      const depth = mode === "mirrored" ? Math.max(...sums.map((row) => row[1])) : 0;
      const domain = spec.y.domain || [-depth * 1.05, Math.max(...tops, depth ? 0 : 1e-9) * 1.05];
      const half = spec.x.width / 2;
      const { x, y, area } = frame(root, width, height, {
        xTicks: () =>
          spec.x.ticks ||
          niceTicks(centers[0], centers[centers.length - 1], Math.max(2, Math.round(width / 80))).filter(
            (tick) => !spec.x.integer || Number.isInteger(tick),
          ),
        xFormat: spec.x.tick || formatX,
        xLabel: spec.x.label,
        xScaleOf: (from, to) => scale(centers[0] - half, centers[centers.length - 1] + half, from, to),
        yDomain: domain,
        yFormat: spec.y.tick || ((value) => format(Math.abs(value))),
        yTime: spec.y.time,
      });
      const slot = x(centers[0] + half) - x(centers[0] - half);
      const gap = slot > 6 ? Math.min(4, slot * 0.16) : 0;
      if (mode === "stacked" && slot < 4) stackAreas(root, sums, x, y, half);
      else
        centers.forEach((center, index) => {
          const from = x(center - half) + gap / 2;
          const full = Math.max(0.5, slot - gap);
          let base = 0;
          spec.series.forEach((one, position) => {
            const value = sums[index][position];
            if (!value) return;
            const grouped = mode === "grouped";
            const bottom = grouped || mode === "mirrored" ? 0 : base;
            const top = bottom + sign(position) * value;
            base = top;
            const [y1, y2] = [y(Math.max(bottom, top)), y(Math.min(bottom, top))];
            const share = grouped ? full / spec.series.length : full;
            root.append(
              box(
                from + (grouped ? share * position : 0),
                y1,
                share - (grouped && share > 4 ? 1 : 0),
                y2 - y1,
                "mark",
                color(one.color),
              ),
            );
          });
        });
      if (mode === "mirrored") root.append(line(area.left, y(0), area.right, y(0), "gridline zero"));
      const highlight = s("rect", {
        y: area.top,
        height: area.bottom - area.top,
        width: round(slot),
        class: "highlight",
        visibility: "hidden",
      });
      root.prepend(highlight);
      interact(root, {
        count: centers.length,
        indexAt: (px) => nearestIndex(centers, x.invert(px)),
        show: (index) => {
          highlight.setAttribute("visibility", index === null ? "hidden" : "visible");
          if (index !== null) highlight.setAttribute("x", round(x(centers[index] - half)));
        },
        anchor: (index) => x(centers[index]),
        title: (index) => `${spec.x.name ? `${spec.x.name} ` : ""}${formatX(centers[index])}`,
        rows: (index) => [
          ...spec.series.map((one) => ({ name: one.name, color: one.color, value: format(one.values[index] || 0) })),
          ...(spec.total ? [{ name: "total", value: format(sums[index].reduce((a, b) => a + b, 0)) }] : []),
        ],
        width,
      });
      return root;
    });
    // Bars too narrow to be told apart, as one stepped outline a series.
    function stackAreas(root, sums, x, y, half) {
      const base = centers.map(() => 0);
      spec.series.forEach((one, position) => {
        const top = base.map((value, index) => value + sums[index][position]);
        const forward = centers.map(
          (center, index) => `${round(x(center - half))},${round(y(top[index]))}H${round(x(center + half))}`,
        );
        const backward = centers
          .map((center, index) => `${round(x(center + half))},${round(y(base[index]))}H${round(x(center - half))}`)
          .reverse();
        root.append(
          s("path", { d: `M${forward.join("L")}L${backward.join("L")}Z`, class: "mark", fill: color(one.color) }),
        );
        top.forEach((value, index) => (base[index] = value));
      });
    }
    return chart.element;
  }

  // Hover and arrow keys over a row of numbered positions.
  function interact(root, { count, indexAt, show, anchor, title, rows, width }) {
    let current = null;
    const set = (index, clientX, clientY) => {
      current = index;
      show(index);
      if (index === null) hideTooltip();
      else showTooltip(clientX, clientY, title(index), rows(index));
    };
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      set(
        indexAt(((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * width) / box.width),
        event.clientX,
        event.clientY,
      );
    });
    root.addEventListener("pointerleave", () => set(null));
    root.addEventListener("blur", () => set(null));
    root.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
      if (event.key === "Escape") return set(null);
      if (!(event.key in moves)) return undefined;
      event.preventDefault();
      const index = current === null ? 0 : Math.max(0, Math.min(count - 1, current + moves[event.key]));
      const box = root.getBoundingClientRect();
      return set(index, box.left + (anchor(index) * box.width) / width, box.top + 30);
    });
  }

  // ----------------------------------------------------------------------------------- row chart
  /* rows(spec): one line per row {label, marks, value, details}; a mark is {bar: [from, to]},
     {dot: at} or {whisker: [low, high]} with a color. x: {domain, format, label, zero}. */
  function rows(spec) {
    const rowHeight = spec.rowHeight || 30;
    const chart = figure(spec, (width) => {
      if (!spec.rows.length) return emptyDrawing(width, 70, spec.empty || "no data yet");
      const height = spec.rows.length * rowHeight + (spec.x.label ? 40 : 28);
      const root = canvas(
        width,
        height,
        `${spec.title || ""}: ${spec.rows.map((row) => `${row.label} ${row.value || ""}`).join("; ")}`,
      );
      const left = Math.min(width * 0.42, 14 + Math.max(...spec.rows.map((row) => textWidth(row.label, 12.5, 620))));
      const right = width - 16 - Math.max(0, ...spec.rows.map((row) => textWidth(row.value || "", 12.5, 560)));
      const x = scale(spec.x.domain[0], spec.x.domain[1], left, right);
      const bottom = spec.rows.length * rowHeight + 4;
      for (const tick of (spec.x.time ? timeTicks : niceTicks)(
        spec.x.domain[0],
        spec.x.domain[1],
        Math.max(2, Math.round((right - left) / 70)),
      )) {
        const at = round(x(tick));
        root.append(line(at, 2, at, bottom, tick === 0 && spec.x.zero ? "gridline zero" : "gridline"));
        root.append(label(at, bottom + 14, (spec.x.tick || spec.x.format)(tick), "tick", "middle"));
      }
      if (spec.x.label) root.append(label((left + right) / 2, height - 3, spec.x.label, "axis-label", "middle"));
      const highlight = s("rect", { x: 0, width, height: rowHeight, class: "highlight", visibility: "hidden" });
      root.prepend(highlight);
      spec.rows.forEach((row, index) => {
        const middle = 2 + rowHeight * (index + 0.5);
        root.append(
          label(left - 10, middle + 4, clip(row.label, left - 10), `row-label${row.strong ? " strong" : ""}`, "end"),
        );
        if (row.value) root.append(label(width - 2, middle + 4, row.value, "row-value", "end"));
        for (const mark of row.marks) {
          const paint = color(mark.color || 1);
          if (mark.bar) {
            const [from, to] = [x(Math.min(...mark.bar)), x(Math.max(...mark.bar))];
            const thickness = mark.thin ? 3 : rowHeight * 0.6;
            root.append(
              box(
                from,
                middle - thickness / 2,
                Math.max(1, to - from),
                thickness,
                mark.thin ? "mark thin" : "mark",
                paint,
              ),
            );
          } else if (mark.whisker) {
            const [from, to] = mark.whisker.map((value) => round(x(value)));
            root.append(
              s("path", {
                d: `M${from},${middle}H${to}M${from},${middle - 4}v8M${to},${middle - 4}v8`,
                class: "whisker",
                stroke: paint,
              }),
            );
          } else if (isNumber(mark.dot)) {
            root.append(disc(x(mark.dot), middle, 5, mark.hollow ? "var(--surface)" : paint, paint));
          }
        }
      });
      interact(root, {
        count: spec.rows.length,
        indexAt: (_, py) => Math.max(0, Math.min(spec.rows.length - 1, Math.floor((py - 2) / rowHeight))),
        show: (index) => {
          highlight.setAttribute("visibility", index === null ? "hidden" : "visible");
          if (index !== null) highlight.setAttribute("y", 2 + index * rowHeight);
        },
        anchor: () => left,
        title: (index) => spec.rows[index].label,
        rows: (index) => spec.rows[index].details || [{ name: "value", value: spec.rows[index].value || "" }],
        width,
      });
      return root;
    });
    return chart.element;
  }

  function clip(text, pixels) {
    if (textWidth(text, 12.5, 620) <= pixels) return text;
    let end = text.length;
    while (end > 1 && textWidth(`${text.slice(0, end)}…`, 12.5, 620) > pixels) end -= 1;
    return `${text.slice(0, end)}…`;
  }

  return {
    lines,
    bars,
    rows,
    showTooltip,
    hideTooltip,
    zoom,
    // Draw the charts of a group again, with the series that they have now.
    refresh(group) {
      for (const chart of groups.get(group) || []) chart.refresh();
    },
    // Drop the charts of a group, because others take their place.
    forget(group) {
      for (const chart of groups.get(group) || []) smoothed.delete(chart);
      groups.delete(group);
    },
    smooth(weight) {
      smoothing = weight;
      for (const chart of smoothed)
        if (isOnPage(chart)) chart.redraw();
        else smoothed.delete(chart);
    },
  };
})();
