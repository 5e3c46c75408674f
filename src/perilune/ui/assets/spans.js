// The agents of an episode as lanes over its rounds: who worked when, who waited for whom.
"use strict";

const Spans = (() => {
  // A lane: its turns as bars, and a thin bar from its end until its parent used the result.
  function lane(span, rounds) {
    const depth = span.id.split(".").length - 1;
    const end = span.rounds.length ? span.rounds[span.rounds.length - 1] + 1 : 0;
    const color = (depth % 7) + 1;
    return {
      label: `${"· ".repeat(depth)}${span.name} ${span.id}`,
      strong: depth === 0,
      value: `${Format.integer(span.tokens)} tokens`,
      marks: [
        ...(span.joined > end ? [{ bar: [end, span.joined], color, thin: true }] : []),
        ...span.rounds.map((round) => ({ bar: [round + 0.06, round + 0.94], color })),
      ],
      details: [
        { name: "turns", value: Format.integer(span.rounds.length), color },
        { name: "rounds", value: span.rounds.length ? `${span.rounds[0] + 1} to ${end} of ${rounds}` : "none" },
        { name: "used in round", value: span.joined < 0 ? "never" : Format.integer(span.joined + 1) },
        { name: "sampled", value: `${Format.integer(span.tokens)} tokens` },
        { name: "read", value: `${Format.integer(span.prompt_tokens)} tokens` },
        ...(span.version < 0 ? [] : [{ name: "weights", value: `version ${span.version}` }]),
      ],
    };
  }

  const conversation = (span) =>
    h(
      "details",
      {},
      h("summary", {}, `${span.name} ${span.id}`, h("span", { class: "muted" }, `${span.messages.length} messages`)),
      h(
        "div",
        { class: "prose", tabindex: 0 },
        span.messages.map((one) => [h("span", { class: "role" }, one.role), h("span", {}, one.content), "\n"]),
      ),
    );

  // Lanes and the conversations of sub-agents; null for an episode without.
  function lanes(episode) {
    const { spans } = episode;
    if (!spans) return null;
    const rounds = Math.max(1, ...spans.lanes.flatMap((span) => [...span.rounds.map((one) => one + 1), span.joined]));
    const saved = spans.critical ? spans.total / spans.critical : 1;
    return h(
      "div",
      { class: "lanes" },
      Charts.rows({
        key: "spans",
        title: `${Format.integer(spans.total)} turns in ${Format.integer(spans.critical)} critical steps`,
        note: `On average ${Format.number(saved, 2)} turns at a time. Thin lines: finished, and not used yet.`,
        rowHeight: 24,
        x: { domain: [0, rounds], format: Format.integer, tick: (value) => (Number.isInteger(value) ? Format.integer(value) : ""), label: "rounds" },
        rows: spans.lanes.map((span) => lane(span, rounds)),
      }),
      spans.lanes.filter((span) => span.messages.length).map(conversation),
    );
  }

  return { lanes };
})();
