// The agents of an episode as lanes over its rounds: who worked when, who waited for whom.
// A lane: its turns as bars, and a thin bar from its end until its parent used the result.
function lane(span, total) {
  const depth = span.id.split(".").length - 1;
  const { rounds, joined } = span;
  const end = rounds.length && last(rounds) + 1;
  const color = (depth % 7) + 1;
  const tokens = count => `${Format.integer(count)} tokens`;
  return {
    label: `${"· ".repeat(depth)}${span.name} ${span.id}`,
    strong: depth === 0,
    value: tokens(span.tokens),
    marks: [
      ...(joined > end ? [{ bar: [end, joined], color, thin: true }] : []),
      ...rounds.map(round => ({ bar: [round + 0.06, round + 0.94], color })),
    ],
    details: [
      { name: "turns", value: Format.integer(rounds.length), color },
      { name: "rounds", value: rounds.length ? `${rounds[0] + 1} to ${end} of ${total}` : "none" },
      ...(depth ? [{ name: "used", value: joined < 0 ? "by no turn" : `in round ${joined + 1}` }] : []),
      { name: "sampled", value: tokens(span.tokens) },
      { name: "read", value: tokens(span.prompt_tokens) },
      ...(span.version < 0 ? [] : [{ name: "weights", value: `version ${span.version}` }]),
    ],
  };
}

function conversation({ name, id, messages }) {
  const count = html`<span class="muted">${messages.length} messages</span>`;
  return html`<details><summary>${name} ${id}${count}</summary><${Messages} said=${messages} /></details>`;
}

// The lanes and the conversations of an episode's sub-agents; nothing without sub-agents.
function Spans({ spans }) {
  if (!spans) return null;
  const rounds = Math.max(1, ...spans.lanes.flatMap(span => [...span.rounds.map(one => one + 1), span.joined]));
  const saved = spans.critical ? spans.total / spans.critical : 1;
  const chart = Charts.rows({
    key: "spans",
    title: `${Format.integer(spans.total)} turns in ${Format.integer(spans.critical)} critical steps`,
    note: `On average ${Format.number(saved, 2)} turns at a time. Thin lines: finished, and not used yet.`,
    rowHeight: 24,
    x: { domain: [0, rounds], format: Format.integer, integer: true, label: "rounds" },
    rows: spans.lanes.map(span => lane(span, rounds)),
  });
  return html`<div class="lanes">${chart}${spans.lanes.filter(span => span.messages.length).map(conversation)}</div>`;
}

globalThis.Spans = Spans;
